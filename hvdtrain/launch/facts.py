"""`LaunchFacts`: what this machine has for starting ranks. Gathered once, then only values."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.world.network import is_own_address

_OPENMPI = re.compile(r"(?:Open MPI\)? |OpenRTE\)? )v?(\d+(?:\.\d+)*)")
_HYDRA = re.compile(r"HYDRA build details:.*?Version:\s*(\S+)|Intel\(R\) MPI.*?Version (\S+)",
                    re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """An mpirun that answers."""

    path: str
    flavour: str
    """`openmpi` or `mpich` (every hydra: MPICH, Intel MPI)."""
    version: str

    @property
    def major(self) -> int:
        """The first part of the version, 0 if it has none."""
        first = self.version.partition(".")[0]
        return int(first) if first.isdecimal() else 0


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """What `make_plan` decides from, beside the options."""

    horovod_ok: bool
    horovod_problem: str = ""
    horovod_gloo: bool = False
    horovod_mpi_kind: str | None = None
    """`openmpi`, `mpich`, or None where Horovod was built without MPI."""
    mpirun: Mpirun | None = None
    mpirun_problem: str = ""
    """Why there is none."""
    home: str = ""
    """This user's home folder."""
    cores: int
    is_root: bool = False
    python: str
    scripts_dir: str
    hostname: str = "localhost"
    srun: str | None = None
    """The path of Slurm's srun."""
    own_names: frozenset[str] = frozenset()
    """Names among those of the hosts that lead to this host, beside `localhost` and `hostname`."""
    strict_keys: bool = False
    """Whether ssh's configuration tells for some host what to do with a key that is not known."""


def gather_facts(hosts: Sequence[str] = (),
                 asks_about_keys: Callable[[str], bool] | None = None) -> LaunchFacts:
    """Look at this machine. Imports no TensorFlow; asks `mpirun --version` (10 ms).

    Args:
        hosts: Names of hosts; those of this host are told apart by their addresses.
        asks_about_keys: Callable that tells of another host whether ssh would ask about its key
            (5 ms); None where that does not matter.
    """
    # Imported here: `hvdtrain launch --help` does not need it.
    from hvdtrain.horovod_check import check_horovod

    check = check_horovod()
    scripts_dir = sysconfig.get_path("scripts")
    mpirun, problem = ask_mpirun(scripts_dir)
    own = frozenset(filter(_is_this_host, hosts))
    others = [] if asks_about_keys is None else [
        host for host in hosts if host not in own | {"localhost"}]
    with ThreadPoolExecutor(16) as pool:
        strict = not all(pool.map(asks_about_keys, others)) if asks_about_keys else False
    return LaunchFacts(
        horovod_ok=check.ok, horovod_problem=check.problems[0] if check.problems else "",
        horovod_gloo=check.gloo, horovod_mpi_kind=check.mpi_kind, mpirun=mpirun,
        mpirun_problem=problem, home=home(),
        cores=len(os.sched_getaffinity(0)), is_root=os.geteuid() == 0, python=sys.executable,
        scripts_dir=scripts_dir, hostname=os.uname().nodename, srun=shutil.which("srun"),
        own_names=own, strict_keys=strict)


def _is_this_host(name: str) -> bool:
    try:
        return is_own_address(socket.gethostbyname(name))
    except (OSError, UnicodeError):
        return False  # ssh may know the name, or tells what is wrong with it


def find_mpirun(scripts_dir: str, search_path: str | None = None) -> Mpirun | None:
    """The mpirun of this Python installation, else the first one on PATH; see `ask_mpirun`."""
    return ask_mpirun(scripts_dir, search_path)[0]


def ask_mpirun(scripts_dir: str, search_path: str | None = None) -> tuple[Mpirun | None, str]:
    """The mpirun of this Python installation, else the first one on PATH; else why there is none.

    A wheel's mpirun must be started by its absolute path to find its own files.
    """
    beside = Path(scripts_dir) / "mpirun"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun", path=search_path)
    if path is None:
        return None, f"there is no mpirun in {scripts_dir} nor on PATH"
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10,
                                errors="replace", stdin=subprocess.DEVNULL, check=False,
                                env={"HOME": home(), **os.environ})
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{path} does not answer: {error}"
    text = answer.stdout + answer.stderr
    said = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
    return read_version(path, text), (
        f"`{path} --version` ends with {answer.returncode} and says: {said}")


def home() -> str:
    """The home folder of this user, without which Open MPI 5 does not start."""
    found = os.path.expanduser("~")
    return found if os.path.isabs(found) else tempfile.gettempdir()


def read_version(path: str, text: str) -> Mpirun | None:
    """Tell the flavour from what `mpirun --version` prints; None for one that is not known."""
    found = _OPENMPI.search(text)
    if found is not None:
        return Mpirun(path=path, flavour="openmpi", version=found[1])
    found = _HYDRA.search(text)
    if found is not None:
        return Mpirun(path=path, flavour="mpich", version=found[1] or found[2])
    return None

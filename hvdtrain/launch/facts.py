"""`LaunchFacts`: what this machine has for starting ranks. Gathered once, then only values."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sysconfig
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hvdtrain.errors import EXIT_NOT_STARTED, EXIT_TIME_OVER
from hvdtrain.process import run_program
from hvdtrain.world.network import is_own_address

T = TypeVar("T")
R = TypeVar("R")
_FEW, _AT_ONCE = 2, 16
_FLAVOURS = {
    "openmpi": re.compile(r"(?:Open MPI\)? |OpenRTE\)? )v?(\d+(?:\.\d+)*)"),
    "mpich": re.compile(r"(?:HYDRA build details:.*?Version:\s*|Intel\(R\) MPI.*?Version )(\S+)",
                        re.DOTALL)}


@dataclass(frozen=True, kw_only=True)
class Mpirun:
    """An mpirun that answers; its flavor is `openmpi` or `mpich` (every hydra, Intel MPI)."""

    path: str
    flavour: str
    version: str

    @property
    def major(self) -> int:
        """The first part of the version, 0 if it has none."""
        first = self.version.partition(".")[0]
        return int(first) if first.isdecimal() else 0


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """What `make_plan` decides from, besides the options.

    `horovod_mpi_kind` is `openmpi`, `mpich`, or None without MPI, `srun` a path. `own_names` are
    those of the hosts that are this one, besides `localhost` and `hostname`; `strict_keys` says
    whether the ssh configuration decides for some host how to treat unknown keys.
    """

    horovod_ok: bool
    horovod_problem: str = ""
    horovod_gloo: bool = False
    horovod_mpi_kind: str | None = None
    mpirun: Mpirun | None = None
    mpirun_problem: str = ""
    home: str = ""
    cores: int
    is_root: bool = False
    scripts_dir: str
    hostname: str = "localhost"
    srun: str | None = None
    own_names: frozenset[str] = frozenset()
    strict_keys: bool = False

    @property
    def local_names(self) -> frozenset[str]:
        """The names of this host."""
        return frozenset({"localhost", "127.0.0.1", self.hostname}) | self.own_names


def gather_facts(hosts: Sequence[str] = (),
                 asks_about_keys: Callable[[str], bool] | None = None) -> LaunchFacts:
    """Look at this machine, without TensorFlow; its names among `hosts` are found by address.

    `mpirun --version` takes 10 ms, `asks_about_keys` (None: not asked) 5 ms per host.
    """
    # Imported here: `hvdtrain launch --help` does not need it.
    from hvdtrain.horovod_check import check_horovod

    scripts_dir, answers = sysconfig.get_path("scripts"), list[tuple[Mpirun | None, str]]()
    asking = threading.Thread(
        target=lambda: answers.append(ask_mpirun(scripts_dir)), daemon=True)
    asking.start()
    check = check_horovod()
    own = frozenset(host for host, is_own in zip(hosts, for_all(is_this_host, hosts), strict=True)
                    if is_own)
    others = [host for host in hosts if host not in own | {"localhost"}]
    strict = asks_about_keys is not None and not all(for_all(asks_about_keys, others))
    asking.join()
    [(mpirun, problem)] = answers
    return LaunchFacts(
        horovod_ok=check.ok, horovod_problem=check.problems[0] if check.problems else "",
        horovod_gloo=check.gloo, horovod_mpi_kind=check.mpi_kind, mpirun=mpirun,
        mpirun_problem=problem, home=_home(),
        cores=len(os.sched_getaffinity(0)), is_root=os.geteuid() == 0,
        scripts_dir=scripts_dir, hostname=os.uname().nodename, srun=shutil.which("srun"),
        own_names=own, strict_keys=strict)


def for_all(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results of a function that may wait (for a name server), of several at the same time."""
    if len(items) < _FEW:
        return list(map(function, items))
    # Imported here: one host needs no threads.
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(function, items))


def ask_mpirun(scripts_dir: str, search_path: str | None = None) -> tuple[Mpirun | None, str]:
    """The mpirun of this Python, else the first on PATH, else why there is none.

    Its path is absolute: a wheel's mpirun does not find its own files otherwise.
    """
    beside = Path(scripts_dir) / "mpirun"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun", path=search_path)
    if path is None:
        return None, f"there is no mpirun in {scripts_dir} nor on PATH"
    answer = run_program([path, "--version"], env={"HOME": _home(), **os.environ}, limit_s=10)
    if answer.code in (EXIT_NOT_STARTED, EXIT_TIME_OVER):
        return None, f"{path} does not answer: {answer.last_line}"
    said = next((line.strip() for line in answer.text.splitlines() if line.strip()), "nothing")
    return read_version(path, answer.text), (
        f"`{path} --version` ends with {answer.code} and says: {said}")


def read_version(path: str, text: str) -> Mpirun | None:
    """Parse the output of `mpirun --version`; None for an unknown flavor."""
    for flavour, pattern in _FLAVOURS.items():
        if found := pattern.search(text):
            return Mpirun(path=path, flavour=flavour, version=found[1])
    return None


def _home() -> str:
    """The home folder of this user, without which Open MPI 5 does not start."""
    found = os.path.expanduser("~")
    if os.path.isabs(found):
        return found
    import tempfile
    return tempfile.gettempdir()


def is_this_host(name: str) -> bool:
    """Whether a name is one of this host; may ask a name server."""
    if name == "localhost":
        return True
    with suppress(OSError, UnicodeError):  # ssh may know the name, or tells what is wrong with it
        return is_own_address(socket.gethostbyname(name))
    return False

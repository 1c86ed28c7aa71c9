"""Which starter, and its command line: one function each, from values to an argument list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.launch.facts import LaunchFacts, Mpirun
from hvdtrain.launch.options import LaunchOptions

_NEEDS_MPI = ("horovod-mpi", "mpi4py")
_GET_HOROVOD = "hvdtrain build-horovod --install"
_GET_MPI = "pip install 'hvdtrain[mpi]'"


def choose_starter(options: LaunchOptions, facts: LaunchFacts,
                   np: int) -> tuple[str, tuple[str, ...]]:
    """The starter, never `auto`, and what the user should know about the choice.

    Raises:
        LaunchError: The starter, or the collective that is asked for, cannot work here.
    """
    starter = options.starter
    notes: list[str] = []
    if starter == "auto":
        starter, notes = _auto(options.collective, facts, np)
    if options.collective in _NEEDS_MPI and starter != "mpirun":
        raise LaunchError(
            f"The collective {options.collective} needs ranks that an MPI has started, but the "
            f"starter is {starter}. Use --starter mpirun, or --collective horovod-gloo.")
    if options.collective == "horovod-gloo" and starter == "mpirun":
        raise LaunchError(
            "The collective horovod-gloo needs a Gloo rendezvous, which mpirun does not prepare. "
            "Use --starter native, or --collective horovod-mpi.")
    if starter == "mpirun":
        notes += _check_mpi(options.collective, _need_mpirun(facts), facts)
    if starter == "horovodrun" and not facts.horovod_ok:
        raise LaunchError(
            f"horovodrun needs Horovod: {facts.horovod_problem or 'it is not installed'}. "
            f"Install it with: {_GET_HOROVOD}")
    return starter, tuple(notes)


def _auto(collective: str, facts: LaunchFacts, np: int) -> tuple[str, list[str]]:
    if collective in _NEEDS_MPI:
        return "mpirun", [f"starter mpirun, because the collective {collective} needs it"]
    if np == 1 or collective == "single":
        return "native", []
    problem = facts.horovod_problem or "Horovod is not installed"
    if facts.horovod_ok and facts.horovod_gloo:
        kind, mpirun = facts.horovod_mpi_kind, facts.mpirun
        if kind is not None and mpirun is not None and kind != mpirun.flavour:
            return "native", [f"Gloo is used: Horovod was built with {kind}, but {mpirun.path} is "
                              f"{mpirun.flavour}"]
        return "native", []
    if facts.horovod_ok:
        return "mpirun", ["starter mpirun, because this Horovod was built without Gloo"]
    if collective == "horovod-gloo":
        raise LaunchError(f"The collective horovod-gloo was asked for, but: {problem}. Install "
                          f"it with: {_GET_HOROVOD}")
    if facts.mpirun is None:
        raise LaunchError(
            f"Nothing here can reduce over {np} ranks: {problem}, and there is no mpirun. Install "
            f"one of them: {_GET_HOROVOD}, or {_GET_MPI}. For programs that need neither: "
            "--starter native")
    return "mpirun", [f"starter mpirun with mpi4py, because: {problem}"]


def _need_mpirun(facts: LaunchFacts) -> Mpirun:
    if facts.mpirun is None:
        raise LaunchError(
            f"There is no mpirun in {facts.scripts_dir} nor on PATH. Install one with: "
            f"{_GET_MPI}, or use --starter native.")
    return facts.mpirun


def _check_mpi(collective: str, mpirun: Mpirun, facts: LaunchFacts) -> list[str]:
    """Ranks under the mpirun of another MPI become many groups of one, and say nothing."""
    kind = facts.horovod_mpi_kind
    if collective == "horovod-mpi":
        if not facts.horovod_ok or kind is None:
            problem = facts.horovod_problem or "this Horovod was built without MPI"
            raise LaunchError(f"The collective horovod-mpi was asked for, but: {problem}. Build "
                              "it with: hvdtrain build-horovod --mpi auto --install --force")
        if kind != mpirun.flavour:
            raise LaunchError(
                f"Horovod was built with {kind}, but {mpirun.path} is {mpirun.flavour} "
                f"{mpirun.version}: each rank would train alone. Put the mpirun of {kind} first "
                "on PATH, or use --collective horovod-gloo.")
    elif facts.horovod_ok and kind is not None and kind != mpirun.flavour:
        return [f"mpi4py is used: Horovod was built with {kind}, but {mpirun.path} is "
                f"{mpirun.flavour}"]
    return []


def _native(command: Sequence[str], np: int, facts: LaunchFacts,
            exported: Sequence[str]) -> tuple[str, ...]:
    return tuple(command)


def _horovodrun(command: Sequence[str], np: int, facts: LaunchFacts,
                exported: Sequence[str]) -> tuple[str, ...]:
    return (str(Path(facts.scripts_dir) / "horovodrun"), "--gloo", "-np", str(np),
            "-H", f"localhost:{np}", *command)


def _mpirun(command: Sequence[str], np: int, facts: LaunchFacts,
            exported: Sequence[str]) -> tuple[str, ...]:
    mpirun = _need_mpirun(facts)
    if mpirun.flavour == "mpich":
        # Hydra hands down the whole environment by itself.
        return (mpirun.path, "-np", str(np), "-hosts", "localhost", "-ppn", str(np),
                "-bind-to", "none", *command)
    line = [mpirun.path]
    if facts.is_root:
        line.append("--allow-run-as-root")
    # Two dashes throughout: Open MPI 5 does not know all options of 4 with one.
    line += ["-np", str(np), "--host", f"localhost:{np}", "--bind-to", "none", "--map-by", "slot",
             "--oversubscribe"]
    # Naming the transports of one host saves the second in which MPI_Init probes the others.
    shared_memory = "sm" if mpirun.major >= 5 else "vader"
    line += ["--mca", "pml", "ob1", "--mca", "btl", f"self,{shared_memory},tcp"]
    for name in exported:
        line += ["-x", name]
    return (*line, *command)


COMMANDS: dict[str, Callable[[Sequence[str], int, LaunchFacts, Sequence[str]],
                             tuple[str, ...]]] = {
    "native": _native, "horovodrun": _horovodrun, "mpirun": _mpirun}

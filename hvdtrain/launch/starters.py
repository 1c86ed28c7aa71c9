"""Which starter fits, and whether it can work here."""

from __future__ import annotations

from hvdtrain.errors import LaunchError
from hvdtrain.launch.facts import LaunchFacts, Mpirun
from hvdtrain.launch.options import LaunchOptions

NEEDS_MPI = ("horovod-mpi", "mpi4py")
_GET_HOROVOD = "hvdtrain build-horovod --install"
_GET_MPI = "pip install 'hvdtrain[mpi]'"


def choose_starter(options: LaunchOptions, facts: LaunchFacts, np: int, *,
                   in_allocation: bool = False) -> tuple[str, tuple[str, ...]]:
    """The starter, never `auto`, and what the user should know about the choice.

    Args:
        options: What was asked for.
        facts: What is here.
        np: Number of ranks.
        in_allocation: Whether this is a Slurm job, outside of its steps.

    Raises:
        LaunchError: The starter, or the collective that is asked for, cannot work here.
    """
    starter = options.starter
    notes: list[str] = []
    if starter == "auto":
        starter, notes = _auto(options.collective, facts, np, in_allocation)
    if starter == "srun":
        _check_srun(options, facts, in_allocation)
    elastic = options.elastic.flags()
    if elastic and starter != "horovodrun":
        raise LaunchError(f"{elastic[0]} is an option of horovodrun, but the starter is {starter}. "
                          "Add --starter horovodrun.")
    by_horovodrun = starter == "horovodrun" and options.collective == "horovod-mpi"
    if options.collective in NEEDS_MPI and starter not in ("mpirun", "srun") and not by_horovodrun:
        raise LaunchError(
            f"The collective {options.collective} needs ranks that an MPI has started, but the "
            f"starter is {starter}. Use --starter mpirun, or --collective horovod-gloo.")
    if options.collective == "horovod-gloo" and starter == "mpirun":
        raise LaunchError(
            "The collective horovod-gloo needs a Gloo rendezvous, which mpirun does not prepare. "
            "Use --starter native, or --collective horovod-mpi.")
    if starter == "mpirun" or by_horovodrun:
        notes += _check_mpi(options.collective, need_mpirun(facts), facts)
    if starter == "horovodrun" and not facts.horovod_ok:
        raise LaunchError(
            f"horovodrun needs Horovod: {facts.horovod_problem or 'it is not installed'}. "
            f"Install it with: {_GET_HOROVOD}")
    return starter, tuple(notes)


def _auto(collective: str, facts: LaunchFacts, np: int,
          in_allocation: bool) -> tuple[str, list[str]]:
    if in_allocation and facts.srun is not None and collective not in NEEDS_MPI:
        return "srun", ["starter srun, because this is a Slurm job"]
    if collective in NEEDS_MPI:
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
            f"Nothing here can reduce over {np} ranks: {problem}, and no mpirun can be used: "
            f"{_no_mpirun(facts)}. Install one of them: {_GET_HOROVOD}, or {_GET_MPI}. For "
            "programs that need neither: --starter native")
    return "mpirun", [f"starter mpirun with mpi4py, because: {problem}"]


def _check_srun(options: LaunchOptions, facts: LaunchFacts, in_allocation: bool) -> None:
    if facts.srun is None:
        raise LaunchError("There is no srun on PATH. Use --starter native, or start this inside "
                          "of a Slurm job.")
    if not in_allocation:
        raise LaunchError(
            "The starter srun starts ranks inside of a Slurm allocation, but SLURM_JOB_ID is not "
            "set. Get one with sbatch or salloc; `hvdtrain slurm` writes the batch script.")


def need_mpirun(facts: LaunchFacts) -> Mpirun:
    """The mpirun that is here.

    Raises:
        LaunchError: There is none.
    """
    if facts.mpirun is None:
        raise LaunchError(f"No mpirun can be used: {_no_mpirun(facts)}. Install one with: "
                          f"{_GET_MPI}, or use --starter native.")
    return facts.mpirun


def _no_mpirun(facts: LaunchFacts) -> str:
    return facts.mpirun_problem or f"there is no mpirun in {facts.scripts_dir} nor on PATH"


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

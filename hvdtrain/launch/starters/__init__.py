"""The starters, and the choice where the user names none."""

from __future__ import annotations

from importlib import import_module

from hvdtrain.errors import LaunchError
from hvdtrain.hosts import in_allocation
from hvdtrain.launch.starters.base import (
    GET_HOROVOD,
    MPI_COLLECTIVES,
    ONE_HOST_COLLECTIVES,
    Request,
    Starter,
)
from hvdtrain.launch.starters.mpirun import GET_MPI, no_mpirun


def starter_named(name: str) -> Starter:
    """The starter of a name."""
    starter: Starter = import_module(f"hvdtrain.launch.starters.{name}").STARTER
    return starter


def choose_starter(request: Request) -> tuple[Starter, tuple[str, ...]]:
    """The starter, and what the user should know about the choice."""
    asked, collective = request.options.starter, request.options.collective
    if collective in ONE_HOST_COLLECTIVES and len(request.hosts) > 1:
        raise LaunchError(f"The collective {collective} needs ranks on one host. Received: "
                          f"{', '.join(request.hosts)}. Use --collective auto.")
    name, why = _auto(request) if asked == "auto" else (asked, "")
    starter = starter_named(name)
    return starter, (*filter(None, [why]), *starter.check(request))


def _auto(request: Request) -> tuple[str, str]:
    collective, facts, np = request.options.collective, request.facts, request.np
    if collective in MPI_COLLECTIVES:
        return "mpirun", f"starter mpirun, because the collective {collective} needs it"
    if in_allocation(request.environ) and facts.srun:
        return "srun", "starter srun, because this is a Slurm job"
    if np == 1 or collective in ONE_HOST_COLLECTIVES:
        return "native", ""
    problem = facts.horovod_problem or "Horovod is not installed"
    if facts.horovod_ok and facts.horovod_gloo:
        kind, mpirun = facts.horovod_mpi_kind, facts.mpirun
        if kind is not None and mpirun is not None and kind != mpirun.flavour:
            return "native", (f"Gloo is used: Horovod was built with {kind}, but {mpirun.path} is "
                              f"{mpirun.flavour}")
        return "native", ""
    if facts.horovod_ok:
        return "mpirun", "starter mpirun, because this Horovod was built without Gloo"
    if collective == "horovod-gloo":
        raise LaunchError(f"The collective horovod-gloo was asked for, but: {problem}. Install "
                          f"it with: {GET_HOROVOD}")
    if len(request.hosts) == 1 and collective == "auto":
        return "native", f"the ranks reduce in shared memory, because: {problem}"
    if facts.mpirun is None:
        raise LaunchError(
            f"Nothing here can reduce over {np} ranks: {problem}, and no mpirun can be used: "
            f"{no_mpirun(facts)}. Install one of them: {GET_HOROVOD}, or {GET_MPI}. For programs "
            "that need neither: --starter native")
    return "mpirun", f"starter mpirun with mpi4py, because: {problem}"

"""Which collective to use, and why: `choose` decides from values, `create` makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from hvdtrain.collectives.base import Collective
from hvdtrain.config import CollectiveName
from hvdtrain.errors import CollectiveError, ConfigError
from hvdtrain.horovod_check import HorovodCheck
from hvdtrain.world import World

NAMES: tuple[str, ...] = get_args(CollectiveName)
_MPI_OF_STARTER = {"openmpi": "openmpi", "hydra": "mpich"}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The collective to create and the reason, as one line for the plan."""

    name: str
    reason: str


def choose(requested: str, world: World, horovod: HorovodCheck) -> Choice:
    """Decide which collective this start uses. Pure; equal on all ranks of one installation.

    Args:
        requested: String, one of `NAMES`.
        world: What the starter promised.
        horovod: The static check of the installed Horovod.

    Raises:
        ConfigError: `requested` is not a known name.
        CollectiveError: What was asked for, or anything at all, is not usable here.
    """
    if requested not in NAMES:
        raise ConfigError(
            f"Unknown collective {requested!r}. Expected one of: {', '.join(NAMES)}.")
    if requested != "auto":
        return _requested(requested, world, horovod)
    if world.size == 1:
        return Choice(name="single", reason="one rank")
    if world.rendezvous == "mpi":
        return _auto_mpi(world, horovod)
    _need_horovod(horovod, f"{world.size} ranks started by {world.starter} reduce over Gloo")
    return Choice(name="horovod-gloo", reason=f"started by {world.starter} with Gloo")


def _auto_mpi(world: World, horovod: HorovodCheck) -> Choice:
    kind = _MPI_OF_STARTER.get(world.starter, "")
    if horovod.ok and horovod.mpi_kind == kind:
        return Choice(name="horovod-mpi", reason=f"started by {world.starter}, the MPI of Horovod")
    if not horovod.ok:
        why = horovod.problems[0] if horovod.problems else "Horovod is not installed"
    else:
        why = f"Horovod was built with {horovod.mpi_kind or 'no MPI'}, the starter is {kind}"
    return Choice(name="mpi4py", reason=why)


def _requested(requested: str, world: World, horovod: HorovodCheck) -> Choice:
    if requested == "single" and world.size > 1:
        raise CollectiveError(
            f"The collective `single` was asked for, but {world.starter} started {world.size} "
            "ranks: each would train alone. Use `auto`, or start one process.")
    if requested.startswith("horovod"):
        _need_horovod(horovod, f"`{requested}` was asked for")
    if requested == "horovod-mpi" and horovod.mpi_kind is None:
        raise CollectiveError(
            "`horovod-mpi` was asked for, but this Horovod was built without MPI. Use "
            "`horovod-gloo`, or rebuild it: hvdtrain build-horovod --mpi auto --install --force")
    if (requested in ("horovod-mpi", "mpi4py") and world.size > 1
            and not _has_mpi(world, horovod.mpi_kind)):
        raise CollectiveError(
            f"`{requested}` needs ranks that were started by an MPI, but {world.starter} started "
            f"these. Start them with: hvdtrain launch --starter mpirun -np {world.size} fit ...")
    if requested == "horovod-gloo" and world.rendezvous == "mpi":
        raise CollectiveError(
            f"`horovod-gloo` was asked for, but {world.starter} prepares no Gloo rendezvous. "
            f"Start the ranks with: hvdtrain launch -np {world.size} fit ...")
    return Choice(name=requested, reason="asked for")


def _has_mpi(world: World, kind: str | None) -> bool:
    """Whether the starter prepared MPI; `srun --mpi=pmix` and `pmi2` do so for one kind each."""
    variable = "PMI_RANK" if kind == "mpich" else "PMIX_RANK"
    return world.rendezvous == "mpi" or variable in world.evidence


def _need_horovod(horovod: HorovodCheck, purpose: str) -> None:
    if horovod.ok:
        return
    problem = horovod.problems[0] if horovod.problems else (
        "Horovod is not installed; run: hvdtrain build-horovod --install")
    raise CollectiveError(
        f"{purpose}, but Horovod cannot be used: {problem}\n"
        "Without a C++ compiler use mpi4py: "
        "hvdtrain launch --starter mpirun --collective mpi4py ...")


def create(choice: Choice) -> Collective:
    """Create and initialise the chosen collective. All ranks."""
    if choice.name == "single":
        from hvdtrain.collectives.single import SingleCollective
        return SingleCollective()
    if choice.name == "mpi4py":
        from hvdtrain.collectives.mpi import MpiCollective
        return MpiCollective()
    from hvdtrain.collectives.horovod import HorovodCollective
    return HorovodCollective(choice.name.removeprefix("horovod-"))

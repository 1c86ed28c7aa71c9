"""`World`: which rank this process is, of how many, and how that is known."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class World:
    """What a starter promised this process. Words as in Horovod and MPI.

    The promise is compared with what the collective finds after it is initialised
    (`hvdtrain.session`): a rank that was promised to be one of N never trains alone.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int | None = None
    """Rank among the processes with the same local rank; None where the starter does not say."""
    cross_size: int | None = None
    host: str
    starter: str
    """Who created this process: `native`, `horovodrun`, `openmpi`, `hydra`, `slurm`,
    `tf_config` or `single`."""
    rendezvous: str
    """How the ranks can find each other: `gloo` (an address was handed down), `mpi` (through
    MPI_Init), `bootstrap` (nobody prepared one: we do) or `none` (one rank)."""
    evidence: dict[str, str] = field(default_factory=dict)
    """The environment variables that were read, with their values."""
    hosts: tuple[str, ...] = ()
    """All host names in rank order of their first rank, where the starter tells them."""
    slots: tuple[int, ...] = ()
    """Ranks on each of `hosts`."""

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

"""The engines that are compared: what to add to `hvdtrain launch` and `hvdtrain fit` for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["single", "ring", "ps"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One way to train."""

    kind: Kind
    """How the bytes of a step are computed: none, a ring, parameter servers."""
    says: str
    launch: tuple[str, ...] = ()
    """Options of `hvdtrain launch`."""
    fit: tuple[str, ...] = ()
    """Options of `hvdtrain fit`."""
    synchronous: bool = True
    """Whether an update takes one batch of every worker; otherwise each batch is an update."""
    shared_memory: bool = False
    """Whether processes of one host exchange bytes that TCP does not see."""

    def ranks(self, workers: int, servers: int) -> int:
        """The processes of a job: with parameter servers, a chief as well."""
        if self.kind == "single":
            return 1
        return 1 + workers + servers if self.kind == "ps" else workers


_ALLREDUCE = ("--engine", "allreduce")

ENGINES: dict[str, Engine] = {
    "single": Engine(kind="single", says="one process", fit=_ALLREDUCE, synchronous=False),
    "allreduce-gloo": Engine(
        kind="ring", says="allreduce, Horovod over Gloo (TCP)",
        launch=("--starter", "native", "--collective", "horovod-gloo"), fit=_ALLREDUCE),
    "allreduce-mpi": Engine(
        kind="ring", says="allreduce, Horovod over MPI (within a host by shared memory)",
        launch=("--starter", "mpirun", "--collective", "horovod-mpi"), fit=_ALLREDUCE,
        shared_memory=True),
    "ps-async": Engine(
        kind="ps", says="parameter servers, each gradient applied when it arrives",
        launch=("--starter", "native"), fit=("--engine", "ps", "--ps-mode", "async"),
        synchronous=False),
    "ps-sync": Engine(
        kind="ps", says="parameter servers, the mean of one gradient per worker",
        launch=("--starter", "native"), fit=("--engine", "ps", "--ps-mode", "sync")),
    "multi-worker-mirrored": Engine(
        kind="ring", says="tf.distribute.MultiWorkerMirroredStrategy",
        launch=("--starter", "native"),
        fit=("--engine", "tf", "--strategy", "multi_worker_mirrored")),
}

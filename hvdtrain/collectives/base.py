"""`Collective`: the common interface of Horovod, mpi4py and a single process.

Two kinds of operation. Tensor operations (`reduce`, `reduce_scatter`, `allgather`, `alltoall`) work
eagerly and in a `tf.function`. Host operations (`broadcast_array`, `gather_objects`, `barrier`)
take numpy arrays or plain values (`plain.py`), run at once and block. **All ranks must call each
operation, in the same order, with the same names, shapes and types**, unless it says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence
from typing import Any, Literal

import numpy as np

from hvdtrain.collectives.plain import decode, encode
from hvdtrain.errors import CollectiveError
from hvdtrain.horovod_check import HorovodCheck
from hvdtrain.world import World

ReduceOp = Literal["average", "sum", "min", "max", "adasum"]
Array = np.ndarray[Any, Any]
Tensor = Any
"""A `tf.Tensor`: TensorFlow has no types that mypy could read."""

CHUNK_BYTES = 1 << 28
"""Limit of one broadcast: MPI counts elements in a 32-bit integer."""
MPI_OF_STARTER = {"openmpi": "openmpi", "hydra": "mpich"}
"""The kind of MPI, as `HorovodCheck.mpi_kind`, that a starter prepares."""


class Collective(ABC):
    """Moves bytes between the ranks. All of them create it together, by `start`.

    Attributes:
        name: String, its name in `config.COLLECTIVES`.
        rank: Integer, this process.
        size: Integer, number of processes.
        one_host: Boolean, all of them are known to be on one host; equal on all.
        spent_s: Float, seconds in tensor operations, where it counts them (`ArrayCollective`).
        waited_s: Float, how many of them it has waited for other ranks.
        tells_waiting: Boolean, whether it counts `waited_s`.
    """

    name: str
    rank: int
    size: int
    one_host: bool = False
    spent_s: float = 0.0
    waited_s: float = 0.0
    tells_waiting: bool = False

    @classmethod
    def automatic(cls, world: World, horovod: HorovodCheck) -> str | None:
        """Why `auto` takes this one where those before it in the table do not fit, or None.

        Raises:
            CollectiveError: Nothing else fits either, and this one cannot be used.
        """
        return None

    @classmethod  # noqa: B027 - not every collective has something to refuse
    def check_start(cls, world: World, horovod: HorovodCheck) -> None:
        """Refuse a start of ranks, or a build, with which it fails.

        Raises:
            CollectiveError: Its message says what to do instead.
        """

    @classmethod
    def start(cls, world: World, environ: MutableMapping[str, str],
              process_sets: Sequence[Sequence[int]] = ()) -> Collective:
        """Create it. All ranks together; `environ` tells where they find each other.

        `process_sets` are subsets of ranks that Horovod knows from its start on.
        """
        del world, environ, process_sets
        return cls()

    @abstractmethod
    def reduce(self, tensors: Sequence[Tensor], *, name: str, op: ReduceOp) -> list[Tensor]:
        """Reduce each tensor over all ranks, element by element.

        Args:
            tensors: Sequence of dense tensors of one dtype (float16, float32, float64, int32 or
                int64), shapes equal on all ranks.
            name: String, unique among the operations in flight, equal on all ranks.
            op: `"average"` (floats only: sum divided by `size`), `"sum"`, `"min"`, `"max"`, or
                `"adasum"` (floats only, where `refusal` returns None).

        Returns:
            A list of tensors of the same shapes and dtype, bitwise equal on all ranks.
        """

    def refusal(self, op: ReduceOp) -> str | None:
        """Why this collective cannot reduce by `op`, as a sentence; None if it can."""
        if op != "adasum" or self.size == 1:
            return None
        return f"The collective `{self.name}` has no Adasum; Horovod over MPI has it."

    def reduce_scatter(self, tensors: Sequence[Tensor], *, name: str,
                       op: ReduceOp) -> list[Tensor]:
        """Reduce each tensor over all ranks; each rank gets its part of the first axis only.

        The default implementation reduces the whole and cuts it.

        Args:
            tensors: Sequence of dense tensors of one dtype (float16, float32 or float64), of known
                shapes `(n, ...)` that are equal on all ranks; `n` is a multiple of `size`.
            name: String, as in `reduce`.
            op: `"average"` or `"sum"`.

        Returns:
            A list of tensors of shapes `(n / size, ...)`: the reduced tensor's rows from
            `rank * n / size` on.
        """
        parts = []
        for whole in self.reduce(tensors, name=name, op=op):
            rows = whole.shape[0] // self.size
            parts.append(whole[self.rank * rows:(self.rank + 1) * rows])
        return parts

    def part_shape(self, tensor: Tensor) -> list[int | None]:
        """The shape of `reduce_scatter`'s result for a tensor."""
        return [tensor.shape[0] // self.size, *tensor.shape[1:]]

    def alltoall(self, tensor: Tensor, *, name: str) -> Tensor:
        """Send the r-th of `size` equal parts of the first axis to rank r, for each r.

        Args:
            tensor: Tensor of shape `(n, ...)`, equal on all ranks; `n` is a multiple of `size`.
            name: String, as in `reduce`.

        Returns:
            A tensor of the same shape and dtype: the parts received, in rank order.
        """
        raise CollectiveError(f"The collective `{self.name}` has no alltoall.")

    def subset(self, ranks: Sequence[int]) -> Collective | None:
        """A collective of some of the ranks. All ranks of this one must call it.

        Its ranks are renumbered from 0 in ascending order. Returns None on a rank not among them.
        """
        members = sorted(set(ranks))
        if len(members) != len(ranks) or not members or not set(members) <= {*range(self.size)}:
            raise CollectiveError(
                f"A subset needs distinct ranks from 0 to {self.size - 1}. Received: "
                f"{list(ranks)}")
        return self._subset(members)

    def _subset(self, members: list[int]) -> Collective | None:
        raise CollectiveError(f"The collective `{self.name}` has no subsets of ranks.")

    @abstractmethod
    def allgather(self, tensor: Tensor, *, name: str) -> Tensor:
        """Concatenate tensors in rank order along the first axis, which may differ in length."""

    def broadcast_array(self, array: Array, *, root: int = 0) -> Array:
        """Return rank `root`'s array on every rank (host memory, any dtype, equal shapes)."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts = [self._broadcast_bytes(flat[start:start + CHUNK_BYTES], root)
                 for start in range(0, flat.size, CHUNK_BYTES)]
        joined = np.concatenate(parts) if parts else flat
        received: Array = joined.view(array.dtype).reshape(array.shape)
        return received

    def gather_objects(self, value: object) -> list[Any]:
        """Return the `value` of every rank, in rank order, on every rank.

        Args:
            value: None, bool, int, float, str, bytes, list, tuple, dict or numpy arrays, nested in
                any way, or a dataclass that `plain.carried` marks. Nothing is pickled.

        Raises:
            CollectiveError: It holds something else.
        """
        joined, sizes = self._gather_bytes(np.frombuffer(encode(value), np.uint8))
        return [decode(part.tobytes()) for part in np.split(joined, np.cumsum(sizes)[:-1])]

    def _broadcast_bytes(self, part: Array, root: int) -> Array:
        """Return rank `root`'s bytes, at most `CHUNK_BYTES`, on every rank."""
        raise NotImplementedError

    def _gather_bytes(self, mine: Array) -> tuple[Array, Sequence[int]]:
        """The concatenated bytes of all ranks, and how many each has sent."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.gather_objects(None)

    def close(self) -> None:  # noqa: B027 - most collectives have nothing to close
        """Release what the collective holds; it cannot be used afterwards. All ranks."""


def refuse_without_mpi(name: str, world: World, kind: str | None) -> None:
    """Refuse ranks that no MPI has started, for a collective with an MPI of a kind."""
    # `srun --mpi=pmix` and `pmi2` start ranks for one kind each.
    variable = "PMI_RANK" if kind == "mpich" else "PMIX_RANK"
    if world.size > 1 and world.rendezvous != "mpi" and variable not in world.evidence:
        raise CollectiveError(
            f"`{name}` needs ranks that were started by an MPI, but {world.starter} started "
            f"these. Start them with: hvdtrain launch --starter mpirun -np {world.size} fit ...")

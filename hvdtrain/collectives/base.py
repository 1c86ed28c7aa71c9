"""`Collective`: the one interface behind which Horovod, mpi4py and a lone process look alike.

Two kinds of operation. Tensor operations (`reduce`, `reduce_scatter`, `allgather`, `alltoall`) work
eagerly and in a `tf.function`. Host operations (`broadcast_array`, `gather_objects`, `barrier`)
take numpy arrays or plain values (`plain.py`), run at once and block. **All ranks must call each
operation, in the same order, with the same names, shapes and types**, unless it says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from hvdtrain.errors import CollectiveError

ReduceOp = Literal["average", "sum", "min", "max", "adasum"]
Array = np.ndarray[Any, Any]
Tensor = Any
"""A `tf.Tensor`. TensorFlow has no types of its own that mypy could read."""


class Collective(ABC):
    """Moves bytes between the ranks.

    Attributes:
        name: String, e.g. `"horovod-gloo"`, `"horovod-mpi"`, `"mpi4py"`, `"single"`.
        rank: Integer, this process.
        size: Integer, number of processes.
        one_host: Boolean, whether all of them are known to be on one host; equal on all.
    """

    name: str
    rank: int
    size: int
    one_host: bool = False

    @abstractmethod
    def reduce(self, tensors: Sequence[Tensor], *, name: str, op: ReduceOp) -> list[Tensor]:
        """Reduce each tensor over all ranks, element by element.

        Args:
            tensors: Sequence of dense tensors of one dtype (float16, float32, float64, int32
                or int64), shapes equal on all ranks.
            name: String, unique among the operations in flight, equal on all ranks.
            op: `"average"` (floats only: sum divided by `size`), `"sum"`, `"min"`, `"max"`, or
                `"adasum"` (floats only, where `refusal` returns None).

        Returns:
            A list of tensors of the same shapes and dtype, bitwise equal on all ranks.
        """

    def refusal(self, op: ReduceOp) -> str | None:
        """Why this collective cannot reduce by `op`, as a sentence; None where it can."""
        if op != "adasum" or self.size == 1:
            return None
        return f"The collective `{self.name}` has no Adasum; Horovod over MPI has it."

    def reduce_scatter(self, tensors: Sequence[Tensor], *, name: str,
                       op: ReduceOp) -> list[Tensor]:
        """Reduce each tensor over all ranks; each rank gets its part of the first axis only.

        Where a collective has no operation for it, the whole is reduced and cut.

        Args:
            tensors: Sequence of dense tensors of one dtype (float16, float32 or float64), of
                known shapes `(n, ...)` that are equal on all ranks; `n` is a multiple of `size`.
            name: String, as in `reduce`.
            op: `"average"` or `"sum"`.

        Returns:
            A list of tensors of shapes `(n / size, ...)`: of the reduced tensor the rows
            `rank * n / size` and following.
        """
        parts = []
        for whole in self.reduce(tensors, name=name, op=op):
            rows = whole.shape[0] // self.size
            parts.append(whole[self.rank * rows:(self.rank + 1) * rows])
        return parts

    def alltoall(self, tensor: Tensor, *, name: str) -> Tensor:
        """Send the r-th of `size` equal parts of the first axis to rank r, for each r.

        Args:
            tensor: Tensor of shape `(n, ...)`, equal on all ranks; `n` is a multiple of `size`.
            name: String, as in `reduce`.

        Returns:
            A tensor of the same shape and dtype: the parts received, in rank order.

        Raises:
            CollectiveError: This collective cannot.
        """
        del tensor, name
        raise CollectiveError(f"The collective `{self.name}` has no alltoall.")

    def subset(self, ranks: Sequence[int]) -> Collective | None:
        """A collective of some of the ranks. All ranks of this one must call it.

        Args:
            ranks: Sequence of integers, ranks of this collective without repetition.

        Returns:
            The `Collective` of these ranks, numbered anew from 0 in ascending order; None on a
            rank that is not among them.

        Raises:
            CollectiveError: `ranks` are not ranks of this collective, or it has no subsets.
        """
        self._check_subset(ranks)
        raise CollectiveError(f"The collective `{self.name}` has no subsets of ranks.")

    def _check_subset(self, ranks: Sequence[int]) -> list[int]:
        """The ranks in ascending order, checked."""
        members = sorted(set(ranks))
        if not members or len(members) != len(ranks) or not (
                members[0] >= 0 and members[-1] < self.size):
            raise CollectiveError(
                f"A subset needs distinct ranks from 0 to {self.size - 1}. Received: "
                f"{list(ranks)}")
        return members

    @abstractmethod
    def allgather(self, tensor: Tensor, *, name: str) -> Tensor:
        """Concatenate the tensors of all ranks in rank order along the first axis.

        Args:
            tensor: Tensor of shape `(n, ...)`; only `n` may differ between ranks.
            name: String, as in `reduce`.
        """

    @abstractmethod
    def broadcast_array(self, array: Array, *, root: int = 0) -> Array:
        """Return rank `root`'s array on every rank (host memory, any dtype, equal shapes)."""

    @abstractmethod
    def gather_objects(self, value: object) -> list[Any]:
        """Return the `value` of every rank, in rank order, on every rank.

        Args:
            value: None, bool, int, float, str, bytes, list, tuple, dict or numpy arrays, nested
                at will, or a dataclass that `plain.carried` marks. Nothing is pickled.

        Raises:
            CollectiveError: It holds something else.
        """

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.gather_objects(None)

    def close(self) -> None:  # noqa: B027 - most collectives have nothing to close
        """Release what the collective holds. Collective on all ranks; the object is dead after."""

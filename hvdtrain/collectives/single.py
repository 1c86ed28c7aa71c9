"""`SingleCollective`: one process, no communication, the same interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.collectives.base import Array, Collective, ReduceOp, Tensor


class SingleCollective(Collective):
    """The collective of a process that is alone: every operation is the identity."""

    name = "single"
    rank = 0
    size = 1

    def reduce(self, tensors: Sequence[Tensor], *, name: str, op: ReduceOp) -> list[Tensor]:
        """Return the tensors as they are."""
        del name, op
        return list(tensors)

    def allgather(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return the tensor as it is."""
        del name
        return tensor

    def reduce_scatter(self, tensors: Sequence[Tensor], *, name: str,
                       op: ReduceOp) -> list[Tensor]:
        """Return the tensors as they are."""
        del name, op
        return list(tensors)

    def alltoall(self, tensor: Tensor, *, name: str) -> Tensor:
        """Return the tensor as it is."""
        del name
        return tensor

    def subset(self, ranks: Sequence[int]) -> SingleCollective:
        """Return itself: the only subset of one rank."""
        self._check_subset(ranks)
        return self

    def broadcast_array(self, array: Array, *, root: int = 0) -> Array:
        """Return the array as it is."""
        del root
        return array

    def gather_objects(self, value: object) -> list[Any]:
        """Return `[value]`."""
        return [value]

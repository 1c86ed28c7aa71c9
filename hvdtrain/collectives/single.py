"""`SingleCollective`: one process, no communication, the same interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.collectives.base import Array, Collective, ReduceOp, Tensor
from hvdtrain.errors import CollectiveError
from hvdtrain.horovod_check import HorovodCheck
from hvdtrain.world import World


class SingleCollective(Collective):
    """The collective of a single process: every operation is the identity."""

    name = "single"
    tells_waiting = True
    rank = 0
    size = 1

    @classmethod
    def automatic(cls, world: World, horovod: HorovodCheck) -> str | None:
        return "one rank" if world.size == 1 else None

    @classmethod
    def check_start(cls, world: World, horovod: HorovodCheck) -> None:
        if world.size > 1:
            raise CollectiveError(
                f"The collective `single` was asked for, but {world.starter} started {world.size} "
                "ranks: each would train alone. Use `auto`, or start one process.")

    def reduce(self, tensors: Sequence[Tensor], *, name: str, op: ReduceOp) -> list[Tensor]:
        return list(tensors)

    reduce_scatter = reduce

    def allgather(self, tensor: Tensor, *, name: str) -> Tensor:
        return tensor

    alltoall = allgather

    def _subset(self, members: list[int]) -> SingleCollective:
        return self

    def broadcast_array(self, array: Array, *, root: int = 0) -> Array:
        return array

    def gather_objects(self, value: object) -> list[Any]:
        return [value]

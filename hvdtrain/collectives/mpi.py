"""`MpiCollective`: mpi4py, for machines where Horovod cannot be built. CPU tensors only.

Operations run in order, since several MPI calls in flight crash. A private duplicate of
`COMM_WORLD` keeps the user's own messages apart.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.collectives.arrays import ArrayCollective
from hvdtrain.collectives.base import (
    MPI_OF_STARTER,
    Array,
    ReduceOp,
    Tensor,
    refuse_without_mpi,
)
from hvdtrain.errors import CollectiveError
from hvdtrain.horovod_check import HorovodCheck
from hvdtrain.optional import require
from hvdtrain.world import World


class MpiCollective(ArrayCollective):
    """All ranks must create it together: importing mpi4py calls `MPI_Init_thread`."""

    name = "mpi4py"

    def __init__(self) -> None:
        self._mpi = require("mpi4py.MPI", "the mpi4py collective")
        if self._mpi.Query_thread() < self._mpi.THREAD_SERIALIZED:
            raise CollectiveError(
                "This MPI was initialised without thread support (found level "
                f"{self._mpi.Query_thread()}, expected MPI_THREAD_SERIALIZED or more), but "
                "TensorFlow calls from its own threads. Do not set mpi4py.rc.threads = False.")
        self._op = {"average": self._mpi.SUM, "sum": self._mpi.SUM,
                    "min": self._mpi.MIN, "max": self._mpi.MAX}
        self._take(self._mpi.COMM_WORLD.Dup())

    def _take(self, communicator: Any) -> None:
        self._comm = communicator
        self.rank, self.size = int(communicator.Get_rank()), int(communicator.Get_size())

    @classmethod
    def automatic(cls, world: World, horovod: HorovodCheck) -> str | None:
        if world.size == 1 or world.rendezvous != "mpi":
            return None
        if not horovod.ok:
            return next(iter(horovod.problems), "Horovod is not installed")
        return (f"Horovod was built with {horovod.mpi_kind or 'no MPI'}, the starter is "
                f"{MPI_OF_STARTER.get(world.starter, '')}")

    @classmethod
    def check_start(cls, world: World, horovod: HorovodCheck) -> None:
        refuse_without_mpi(cls.name, world, horovod.mpi_kind)

    def _reduce_flat(self, arrays: Sequence[Array], op: ReduceOp, name: str) -> Array:
        flat = np.concatenate(arrays)
        self._comm.Allreduce(self._mpi.IN_PLACE, flat, self._op[op])
        if op == "average":
            flat *= flat.dtype.type(1.0 / self.size)
        return flat

    def _gather_flat(self, mine: Array, name: str) -> tuple[Array, Sequence[int]]:
        counts = np.empty(self.size, np.int64)  # mpi4py would pickle a Python object
        self._comm.Allgather(np.array([mine.size], np.int64), counts)
        flat = np.empty(counts.sum(), mine.dtype)
        self._comm.Allgatherv(mine, (flat, counts.tolist()))
        return flat, counts.tolist()

    def reduce_scatter(self, tensors: Sequence[Tensor], *, name: str,
                       op: ReduceOp) -> list[Tensor]:
        def reduced(array: Array) -> Array:
            part = np.empty((len(array) // self.size, *array.shape[1:]), array.dtype)
            self._comm.Reduce_scatter_block(np.ascontiguousarray(array), part, self._op[op])
            return part * part.dtype.type(1.0 / self.size) if op == "average" else part
        return self._in_order(lambda *arrays: list(map(reduced, arrays)), tensors,
                              [self.part_shape(t) for t in tensors])

    def _exchange(self, array: Array, name: str) -> Array:
        received = np.empty_like(array)
        self._comm.Alltoall(array, received)
        return received

    def _subset(self, members: list[int]) -> MpiCollective | None:
        among = self.rank in members
        communicator = self._comm.Split(0 if among else self._mpi.UNDEFINED, self.rank)
        if not among:
            return None
        part = copy.copy(self)
        part._take(communicator)
        return part

    def _broadcast_bytes(self, part: Array, root: int) -> Array:
        received = part.copy()
        self._comm.Bcast(received, root)
        return received

    def close(self) -> None:
        self._comm.Free()  # MPI itself ends with the process

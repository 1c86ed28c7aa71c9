"""`MpiCollective`: mpi4py, for machines where Horovod cannot be built. CPU tensors only.

Each tensor operation is one `tf.numpy_function`: TensorFlow runs stateful functions of one graph
in order, so that never two MPI calls are in flight (several unordered ones crash). A private
duplicate of `COMM_WORLD` keeps the user's own messages apart.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.collectives.base import Array, Collective, ReduceOp, Tensor
from hvdtrain.collectives.plain import decode, encode
from hvdtrain.errors import CollectiveError
from hvdtrain.optional import require

CHUNK_BYTES = 1 << 28


class MpiCollective(Collective):
    """All ranks must create it together: importing mpi4py calls `MPI_Init_thread`."""

    name = "mpi4py"

    def __init__(self) -> None:
        self._tf = require("tensorflow", "training")
        self._mpi = require("mpi4py.MPI", "the mpi4py collective")
        if self._mpi.Query_thread() < self._mpi.THREAD_SERIALIZED:
            raise CollectiveError(
                "This MPI was initialised without thread support (found level "
                f"{self._mpi.Query_thread()}, expected MPI_THREAD_SERIALIZED or more), but "
                "TensorFlow calls from its own threads. Do not set mpi4py.rc.threads = False.")
        self._comm = self._mpi.COMM_WORLD.Dup()
        self.rank = int(self._comm.Get_rank())
        self.size = int(self._comm.Get_size())
        self._op = {"average": self._mpi.SUM, "sum": self._mpi.SUM,
                    "min": self._mpi.MIN, "max": self._mpi.MAX}
        self._buffers: dict[tuple[str, int], Array] = {}

    def reduce(self, tensors: Sequence[Tensor], *, name: str, op: ReduceOp) -> list[Tensor]:
        """One `MPI_Allreduce` for the whole list. See `Collective.reduce`.

        MPI has no half precision: float16 is summed in float32.
        """
        del name
        half = tensors[0].dtype == self._tf.float16
        sent = [self._tf.cast(t, self._tf.float32) for t in tensors] if half else list(tensors)
        dtype = sent[0].dtype
        out = self._tf.numpy_function(
            lambda *arrays: self._reduce_arrays(arrays, op), sent, [dtype] * len(sent))
        out = list(out) if isinstance(out, (list, tuple)) else [out]
        for reduced, tensor in zip(out, sent, strict=True):
            reduced.set_shape(tensor.shape)
        return [self._tf.cast(t, self._tf.float16) for t in out] if half else out

    def _reduce_arrays(self, arrays: Sequence[Array],
                       op: ReduceOp) -> list[Array]:
        sizes = [a.size for a in arrays]
        flat = self._buffer(arrays[0].dtype, sum(sizes))
        ends = np.cumsum(sizes)
        for array, size, end in zip(arrays, sizes, ends, strict=True):
            flat[end - size:end] = array.reshape(-1)
        self._comm.Allreduce(self._mpi.IN_PLACE, flat, self._op[op])
        if op == "average":
            flat *= flat.dtype.type(1.0 / self.size)
        return [flat[end - a.size:end].reshape(a.shape).copy()
                for a, end in zip(arrays, ends, strict=True)]

    def _buffer(self, dtype: np.dtype[Any], size: int) -> Array:
        key = (dtype.str, size)
        if key not in self._buffers:
            self._buffers[key] = np.empty(size, dtype)
        return self._buffers[key]

    def allgather(self, tensor: Tensor, *, name: str) -> Tensor:
        """One `MPI_Allgatherv`. See `Collective.allgather`."""
        del name
        out = self._tf.numpy_function(self._allgather_array, [tensor], tensor.dtype)
        out.set_shape([None, *tensor.shape[1:]])
        return out

    def _allgather_array(self, array: Array) -> Array:
        counts = self._counts(array.size)
        flat = np.empty(sum(counts), array.dtype)
        self._comm.Allgatherv(np.ascontiguousarray(array).reshape(-1), (flat, counts))
        return flat.reshape((-1, *array.shape[1:]))

    def _counts(self, mine: int) -> list[int]:
        """The number of every rank, as an array: mpi4py would pickle a Python object."""
        counts = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([mine], np.int64), counts)
        return [int(count) for count in counts]

    def reduce_scatter(self, tensors: Sequence[Tensor], *, name: str,
                       op: ReduceOp) -> list[Tensor]:
        """One `MPI_Reduce_scatter_block` per tensor. See `Collective.reduce_scatter`."""
        del name
        half = tensors[0].dtype == self._tf.float16
        sent = [self._tf.cast(t, self._tf.float32) for t in tensors] if half else list(tensors)
        out = self._tf.numpy_function(
            lambda *arrays: [self._reduce_scatter_array(a, op) for a in arrays], sent,
            [sent[0].dtype] * len(sent))
        out = list(out) if isinstance(out, (list, tuple)) else [out]
        for part, tensor in zip(out, sent, strict=True):
            part.set_shape([tensor.shape[0] // self.size, *tensor.shape[1:]])
        return [self._tf.cast(t, self._tf.float16) for t in out] if half else out

    def _reduce_scatter_array(self, array: Array, op: ReduceOp) -> Array:
        part = np.empty((len(array) // self.size, *array.shape[1:]), array.dtype)
        self._comm.Reduce_scatter_block(np.ascontiguousarray(array), part, self._op[op])
        if op == "average":
            part *= part.dtype.type(1.0 / self.size)
        return part

    def alltoall(self, tensor: Tensor, *, name: str) -> Tensor:
        """One `MPI_Alltoall`. See `Collective.alltoall`."""
        del name
        out = self._tf.numpy_function(self._alltoall_array, [tensor], tensor.dtype)
        out.set_shape(tensor.shape)
        return out

    def _alltoall_array(self, array: Array) -> Array:
        received = np.empty_like(array, order="C")
        self._comm.Alltoall(np.ascontiguousarray(array), received)
        return received

    def subset(self, ranks: Sequence[int]) -> MpiCollective | None:
        """A communicator of its own. See `Collective.subset`."""
        members = self._check_subset(ranks)
        among = self.rank in members
        communicator = self._comm.Split(0 if among else self._mpi.UNDEFINED, self.rank)
        if not among:
            return None
        part = copy.copy(self)
        part._comm, part._buffers = communicator, {}
        part.rank, part.size = int(communicator.Get_rank()), int(communicator.Get_size())
        return part

    def broadcast_array(self, array: Array, *, root: int = 0) -> Array:
        """Broadcast through bytes. See `Collective.broadcast_array`."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
        for start in range(0, flat.size, CHUNK_BYTES):
            self._comm.Bcast(flat[start:start + CHUNK_BYTES], root)
        received: Array = flat.view(array.dtype).reshape(array.shape)
        return received

    def gather_objects(self, value: object) -> list[Any]:
        """Gather values as bytes. See `Collective.gather_objects`."""
        mine = np.frombuffer(encode(value), np.uint8)
        sizes = self._counts(mine.size)
        joined = np.empty(sum(sizes), np.uint8)
        self._comm.Allgatherv(mine, (joined, sizes))
        ends = np.cumsum(sizes)
        return [decode(joined[end - size:end].tobytes())
                for end, size in zip(ends, sizes, strict=True)]

    def close(self) -> None:
        """Free the communicator. All ranks. MPI itself ends with the process."""
        self._comm.Free()

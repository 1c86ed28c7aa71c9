"""`HorovodCollective`: Horovod's TensorFlow operations over Gloo, MPI or NCCL.

Reads nothing from the environment itself; Horovod reads `HOROVOD_*`, which the starter or
`runtime.bootstrap` has set. Only Horovod's collectives are used, never its optimizer wrapper,
callbacks or launcher.
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
"""One broadcast carries at most this much: MPI counts elements in a 32-bit integer."""
_LARGE = 1 << 14
"""Elements of a tensor that is not copied only to tie it."""


class HorovodCollective(Collective):
    """All ranks must create it together: the constructor calls `hvd.init()`.

    Args:
        transport: String, `"gloo"` or `"mpi"`: what carries CPU tensors (GPU tensors go through
            NCCL where Horovod was built with it). For the name and messages only; Horovod
            follows `HOROVOD_CONTROLLER` and `HOROVOD_CPU_OPERATIONS`.
    """

    def __init__(self, transport: str) -> None:
        self._tf = require("tensorflow", "training")
        self._hvd = require("horovod.tensorflow", "the Horovod collective")
        self._ops = require("horovod.tensorflow.mpi_ops", "the Horovod collective")
        self._hvd.init()
        self.name = f"horovod-{transport}"
        self.rank = int(self._hvd.rank())
        self.size = int(self._hvd.size())
        self._op = {
            "average": self._hvd.Average, "sum": self._hvd.Sum,
            "min": self._hvd.Min, "max": self._hvd.Max, "adasum": self._hvd.Adasum,
        }
        self._zeros: dict[str, Any] = {}
        self._own_scatter = transport == "mpi" or bool(self._hvd.nccl_built())
        self._process_set = self._ops.global_process_set
        self._process_sets: dict[tuple[int, ...], Any] = {}
        self._members = list(range(self.size))
        """Ranks of Horovod, by rank of this collective; they differ in a subset."""

    def reduce(self, tensors: Sequence[Tensor], *, name: str, op: ReduceOp) -> list[Tensor]:
        """Reduce over ranks; one fused operation for the whole list. See `Collective.reduce`."""
        tied = self._tie(list(tensors))
        if len(tied) == 1:
            one = self._ops._allreduce(
                tied[0], name=name, op=self._op[op], ignore_name_scope=True,
                process_set=self._process_set)
            return [one]
        return list(self._ops._grouped_allreduce(
            tied, name=name, op=self._op[op], ignore_name_scope=True,
            process_set=self._process_set))

    def refusal(self, op: ReduceOp) -> str | None:
        """Adasum needs Horovod's MPI operations and a power of two. See `Collective.refusal`."""
        if op != "adasum" or self.size == 1:
            return None
        if not self._hvd.mpi_enabled():
            return ("Horovod has Adasum over MPI only, and these ranks met over Gloo. Start them "
                    "with: hvdtrain launch --starter mpirun --collective horovod-mpi ...")
        if self.size & (self.size - 1):
            return f"Horovod's Adasum needs 2, 4, 8, ... ranks; these are {self.size}."
        if self._process_set is not self._ops.global_process_set:
            return "Horovod has Adasum for all ranks together only, not for a subset."
        return None

    def allgather(self, tensor: Tensor, *, name: str) -> Tensor:
        """Concatenate over ranks. See `Collective.allgather`."""
        return self._hvd.allgather(self._tie([tensor])[0], name=name, ignore_name_scope=True,
                                   process_set=self._process_set)

    def reduce_scatter(self, tensors: Sequence[Tensor], *, name: str,
                       op: ReduceOp) -> list[Tensor]:
        """Horovod's own, or an exchange of parts. See `Collective.reduce_scatter`.

        Gloo's reduce-scatter takes twice as long as its allreduce. Where it would be used, ranks
        send each other their parts, which are as many bytes, and each sums those it gets.
        """
        if not self._own_scatter:
            return [self._exchange_and_sum(t, f"{name}.{i}", op) for i, t in enumerate(tensors)]
        tied = self._tie_shape(list(tensors))
        if len(tied) == 1:
            parts = [self._ops._reducescatter(
                tied[0], name=name, op=self._op[op], ignore_name_scope=True,
                process_set=self._process_set)]
        else:
            parts = list(self._ops._grouped_reducescatter(
                tied, name=name, op=self._op[op], ignore_name_scope=True,
                process_set=self._process_set))
        for part, tensor in zip(parts, tensors, strict=True):
            part.set_shape([tensor.shape[0] // self.size, *tensor.shape[1:]])
        return parts

    def _exchange_and_sum(self, tensor: Tensor, name: str, op: ReduceOp) -> Tensor:
        received = self.alltoall(tensor, name=name)
        shape = [self.size, tensor.shape[0] // self.size, *tensor.shape[1:]]
        if tensor.dtype == self._tf.float16:
            received = self._tf.cast(received, self._tf.float32)
        total = self._tf.reduce_sum(self._tf.reshape(received, shape), 0)
        if op == "average":
            total = total / self.size
        return self._tf.cast(total, tensor.dtype)

    def alltoall(self, tensor: Tensor, *, name: str) -> Tensor:
        """Exchange equal parts. See `Collective.alltoall`."""
        part = self._tf.fill([self.size], self._tf.shape(tensor)[0] // self.size)
        received, _ = self._hvd.alltoall(
            tensor, splits=self._tie([part])[0], name=name, ignore_name_scope=True,
            process_set=self._process_set)
        received.set_shape(tensor.shape)
        return received

    def subset(self, ranks: Sequence[int]) -> HorovodCollective | None:
        """A process set of Horovod. See `Collective.subset`.

        Raises:
            CollectiveError: Also where Horovod was started without dynamic process sets.
        """
        members = tuple(self._members[r] for r in self._check_subset(ranks))
        if list(members) == self._members:
            return self
        if members not in self._process_sets:
            self._process_sets[members] = self._add_process_set(members)
        if self._members[self.rank] not in members:
            return None
        part = copy.copy(self)
        part._process_set = self._process_sets[members]
        part._members = list(members)
        part.size = len(members)
        part.rank = members.index(self._members[self.rank])
        return part

    def _add_process_set(self, members: Sequence[int]) -> Any:
        if self._process_set is not self._ops.global_process_set:
            raise CollectiveError("A subset of a subset cannot be made: all ranks must take part. "
                                  "Call subset() of the collective of all ranks.")
        try:
            return self._hvd.add_process_set(list(members))
        except ValueError as error:
            if "HOROVOD_DYNAMIC_PROCESS_SETS" not in str(error):
                raise
            raise CollectiveError(
                "Horovod was started without dynamic process sets, which a subset of ranks "
                "needs. Set HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment of all ranks before "
                "hvdtrain.init().") from None

    def broadcast_array(self, array: Array, *, root: int = 0) -> Array:
        """Broadcast through bytes: every dtype, bit for bit (Horovod itself has no bfloat16)."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts = [
            self._hvd.broadcast(
                self._tf.constant(flat[start:start + CHUNK_BYTES]), self._members[root],
                name=f"hvdtrain.broadcast.{start}", ignore_name_scope=True,
                process_set=self._process_set).numpy()
            for start in range(0, flat.size, CHUNK_BYTES)
        ]
        joined: Array = np.concatenate(parts) if parts else flat
        received: Array = joined.view(array.dtype).reshape(array.shape)
        return received

    def gather_objects(self, value: object) -> list[Any]:
        """Gather values as bytes. See `Collective.gather_objects`."""
        data = np.frombuffer(encode(value), dtype=np.uint8)
        with self._tf.device("CPU:0"):
            sizes = self._hvd.allgather(
                self._tf.constant([data.size], self._tf.int64), name="hvdtrain.gather.sizes",
                ignore_name_scope=True, process_set=self._process_set).numpy()
            joined = self._hvd.allgather(
                self._tf.constant(data), name="hvdtrain.gather.bytes",
                ignore_name_scope=True, process_set=self._process_set).numpy()
        ends = np.cumsum(sizes)
        return [decode(joined[end - size:end].tobytes())
                for end, size in zip(ends, sizes, strict=True)]

    def close(self) -> None:
        """Shut Horovod down; a subset has nothing to close. All ranks."""
        if self._process_set is self._ops.global_process_set:
            self._hvd.shutdown()

    def _tie(self, tensors: list[Tensor]) -> list[Tensor]:
        """Make one tensor of the group depend on a variable, inside a graph.

        Horovod registers its operations as stateless, so TensorFlow folds a collective whose
        inputs are all constants: it runs once and later calls return the old value or hang. A
        variable among the inputs prevents it (a control dependency does not). The smallest
        tensor is taken: adding a zero to it costs nothing, unless it is large.
        """
        if self._tf.executing_eagerly():
            return tensors
        sizes = [t.shape.num_elements() or 1 << 62 for t in tensors]
        smallest = sizes.index(min(sizes))
        tensor = tensors[smallest]
        if _LARGE < sizes[smallest] < 1 << 62:
            tensors[smallest] = self._with_tied_shape(tensor)
        else:
            tensors[smallest] = tensor + self._zero(tensor.dtype)
        return tensors

    def _tie_shape(self, tensors: list[Tensor]) -> list[Tensor]:
        """As `_tie`, never by a sum."""
        if self._tf.executing_eagerly():
            return tensors
        tensors[0] = self._with_tied_shape(tensors[0])
        return tensors

    def _with_tied_shape(self, tensor: Tensor) -> Tensor:
        """The same tensor, not copied: the variable is in its shape."""
        with self._tf.device("CPU:0"):
            shape = self._tf.constant(tensor.shape.as_list()) + self._zero(self._tf.int32)
        tied = self._tf.reshape(tensor, shape)
        tied.set_shape(tensor.shape)
        return tied

    def _zero(self, dtype: Any) -> Tensor:
        if dtype.name not in self._zeros:
            # Shapes are computed on the CPU, beside a GPU too.
            where = "CPU:0" if dtype.is_integer else None
            with self._tf.init_scope(), self._tf.device(where):
                self._zeros[dtype.name] = self._tf.Variable(
                    self._tf.zeros([], dtype), trainable=False, name="hvdtrain_zero")
        return self._zeros[dtype.name].read_value()

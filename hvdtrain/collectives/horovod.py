"""`HorovodCollective`: Horovod's TensorFlow operations over Gloo, MPI or NCCL.

Reads nothing from the environment itself; Horovod reads `HOROVOD_*`, which the starter or
`runtime.bootstrap` has set. Only Horovod's collectives are used, never its optimizer wrapper,
callbacks or launcher.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.collectives.base import Array, Collective, ReduceOp, Tensor
from hvdtrain.optional import require

CHUNK_BYTES = 1 << 28
"""One broadcast carries at most this much: MPI counts elements in a 32-bit integer."""


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
            "min": self._hvd.Min, "max": self._hvd.Max,
        }
        self._zeros: dict[str, Any] = {}

    def reduce(self, tensors: Sequence[Tensor], *, name: str, op: ReduceOp) -> list[Tensor]:
        """Reduce over ranks; one fused operation for the whole list. See `Collective.reduce`."""
        tied = self._tie(list(tensors))
        if len(tied) == 1:
            one = self._ops._allreduce(
                tied[0], name=name, op=self._op[op], ignore_name_scope=True)
            return [one]
        return list(self._ops._grouped_allreduce(
            tied, name=name, op=self._op[op], ignore_name_scope=True))

    def allgather(self, tensor: Tensor, *, name: str) -> Tensor:
        """Concatenate over ranks. See `Collective.allgather`."""
        return self._hvd.allgather(self._tie([tensor])[0], name=name, ignore_name_scope=True)

    def broadcast_array(self, array: Array, *, root: int = 0) -> Array:
        """Broadcast through bytes: every dtype, bit for bit (Horovod itself has no bfloat16)."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts = [
            self._hvd.broadcast(
                self._tf.constant(flat[start:start + CHUNK_BYTES]), root,
                name=f"hvdtrain.broadcast.{start}", ignore_name_scope=True).numpy()
            for start in range(0, flat.size, CHUNK_BYTES)
        ]
        joined: Array = np.concatenate(parts) if parts else flat
        received: Array = joined.view(array.dtype).reshape(array.shape)
        return received

    def gather_objects(self, value: object) -> list[Any]:
        """Gather pickled objects. See `Collective.gather_objects`."""
        data = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        with self._tf.device("CPU:0"):
            sizes = self._hvd.allgather(
                self._tf.constant([data.size], self._tf.int64), name="hvdtrain.gather.sizes",
                ignore_name_scope=True).numpy()
            joined = self._hvd.allgather(
                self._tf.constant(data), name="hvdtrain.gather.bytes",
                ignore_name_scope=True).numpy()
        ends = np.cumsum(sizes)
        return [pickle.loads(joined[end - size:end].tobytes())  # noqa: S301 - from our own ranks
                for end, size in zip(ends, sizes, strict=True)]

    def close(self) -> None:
        """Shut Horovod down. All ranks."""
        self._hvd.shutdown()

    def _tie(self, tensors: list[Tensor]) -> list[Tensor]:
        """Make one tensor of the group depend on a variable, inside a graph.

        Horovod registers its operations as stateless, so TensorFlow folds a collective whose
        inputs are all constants: it runs once and later calls return the old value or hang. A
        variable among the inputs prevents it (a control dependency does not). The smallest
        tensor is taken: adding a zero to it costs nothing.
        """
        if self._tf.executing_eagerly():
            return tensors
        sizes = [t.shape.num_elements() or 1 << 62 for t in tensors]
        smallest = sizes.index(min(sizes))
        tensor = tensors[smallest]
        tensors[smallest] = tensor + self._zero(tensor.dtype)
        return tensors

    def _zero(self, dtype: Any) -> Tensor:
        if dtype.name not in self._zeros:
            with self._tf.init_scope():
                self._zeros[dtype.name] = self._tf.Variable(
                    self._tf.zeros([], dtype), trainable=False, name="hvdtrain_zero")
        return self._zeros[dtype.name].read_value()

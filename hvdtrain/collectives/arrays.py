"""`ArrayCollective`: tensor operations of collectives that move numpy arrays of the host.

Each is one `tf.numpy_function`: TensorFlow runs stateful functions of one graph in order, so two of
them are never in flight.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.collectives.base import Array, Collective, ReduceOp, Tensor
from hvdtrain.optional import require


class ArrayCollective(Collective):
    """CPU tensors only; float16 goes as float32, which MPI and numpy add faster and nearer."""

    def _in_order(self, function: Callable[..., list[Array]], tensors: Sequence[Tensor],
                  shapes: Sequence[Any]) -> list[Tensor]:
        """Call a function of arrays from TensorFlow."""
        tf = require("tensorflow", "training")
        dtype = tensors[0].dtype
        half = dtype == tf.float16
        sent = [tf.cast(t, tf.float32) for t in tensors] if half else list(tensors)

        def timed(*arrays: Array) -> list[Array]:
            begin = time.perf_counter()
            try:
                return function(*arrays)
            finally:
                self.spent_s += time.perf_counter() - begin
        out = tf.numpy_function(timed, sent, [sent[0].dtype] * len(sent))
        out = list(out) if isinstance(out, (list, tuple)) else [out]
        for tensor, shape in zip(out, shapes, strict=True):
            tensor.set_shape(shape)
        return [tf.cast(t, dtype) for t in out] if half else out

    def reduce(self, tensors: Sequence[Tensor], *, name: str, op: ReduceOp) -> list[Tensor]:
        def reduced(*arrays: Array) -> list[Array]:
            flat = self._reduce_flat([np.ascontiguousarray(a).reshape(-1) for a in arrays], op,
                                     name)
            parts = np.split(flat, np.cumsum([array.size for array in arrays])[:-1])
            return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]
        return self._in_order(reduced, tensors, [t.shape for t in tensors])

    @abstractmethod
    def _reduce_flat(self, arrays: Sequence[Array], op: ReduceOp, name: str) -> Array:
        """Reduce flat arrays of one dtype over the ranks; a new array with all of them."""

    def allgather(self, tensor: Tensor, *, name: str) -> Tensor:
        def gathered(array: Array) -> list[Array]:
            flat, _ = self._gather_flat(np.ascontiguousarray(array).reshape(-1), name)
            return [flat.reshape((-1, *array.shape[1:]))]
        return self._in_order(gathered, [tensor], [[None, *tensor.shape[1:]]])[0]

    @abstractmethod
    def _gather_flat(self, mine: Array, name: str) -> tuple[Array, Sequence[int]]:
        """As `_gather_bytes`, for a flat array of any dtype."""

    def _gather_bytes(self, mine: Array) -> tuple[Array, Sequence[int]]:
        return self._gather_flat(mine, "values")

    def alltoall(self, tensor: Tensor, *, name: str) -> Tensor:
        def exchanged(array: Array) -> list[Array]:
            return [self._exchange(np.ascontiguousarray(array), name).reshape(array.shape)]
        return self._in_order(exchanged, [tensor], [tensor.shape])[0]

    @abstractmethod
    def _exchange(self, array: Array, name: str) -> Array:
        """`alltoall` of a contiguous array; as many elements in any shape."""

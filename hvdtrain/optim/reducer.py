"""`GradientReducer`: averages one list of gradients over all ranks, in buckets.

Names are our own, stable across ranks and unique among the operations in flight: they never
contain a layer's name (one layer more on one rank would hang the stock names).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.errors import ConfigError, OptimizerError
from hvdtrain.optim import keras_seam

_NATIVE = (tf.float16, tf.float32, tf.float64)


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """How gradients are reduced."""

    bucket_bytes: int = 32 << 20
    """Gradients are fused into groups of about this size, last layer first, so that the first
    group can travel while the backward pass goes on."""
    sparse: Literal["gather", "dense"] = "gather"
    """IndexedSlices (embeddings): `gather` sends the rows used, `dense` the whole table. Rows
    that occur twice are merged either way, which Keras itself does not do."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes must be positive. Received: {self.bucket_bytes}")
        if self.sparse not in ("gather", "dense"):
            raise ConfigError(
                f"sparse must be 'gather' or 'dense'. Received: sparse={self.sparse!r}")


class GradientReducer:
    """Averages gradients over the ranks of a collective.

    Args:
        collective: The collective to use.
        name: String, unique to the optimizer, equal on all ranks.
        options: How to reduce.
    """

    def __init__(self, collective: Collective, name: str, options: ReducerOptions) -> None:
        self._collective = collective
        self._name = name
        self._options = options
        self._calls: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()

    def __call__(self, gradients: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        """Average `gradients` over all ranks. All ranks must call it with the same structure.

        Args:
            gradients: Sequence of tensors, `IndexedSlices` or None, in build order.
            indices: Sequence of integers, the build index of each gradient's variable.

        Returns:
            A list in the same order: dense tensors of the same shape and dtype, merged
            `IndexedSlices` for sparse gradients, None for None.
        """
        self._refuse_xla()
        out = [merge_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        if self._collective.size == 1:
            return out
        name = self._call_name(indices)
        dense: list[tuple[int, Any]] = []
        for position, gradient in enumerate(out):
            if gradient is None:
                continue
            if not isinstance(gradient, tf.IndexedSlices) or self._options.sparse == "dense":
                dense.append((position, tf.convert_to_tensor(gradient)))
            else:
                out[position] = self._gather_rows(gradient, f"{name}.s{position}")
        for number, bucket in enumerate(self._buckets(dense)):
            wire = [_to_wire(gradient) for _, gradient in bucket]
            reduced = self._average(wire, f"{name}.b{number}")
            for (position, gradient), result in zip(bucket, reduced, strict=True):
                result.set_shape(gradient.shape)
                out[position] = tf.cast(result, gradient.dtype)
        return out

    def _average(self, wire: list[Any], name: str) -> list[Any]:
        """Average over ranks. float16 is divided first: the sum of N could overflow."""
        if wire[0].dtype != tf.float16:
            return self._collective.reduce(wire, name=name, op="average")
        scale = tf.constant(1.0 / self._collective.size, tf.float16)
        return self._collective.reduce([w * scale for w in wire], name=name, op="sum")

    def _buckets(self, dense: list[tuple[int, Any]]) -> list[list[tuple[int, Any]]]:
        """Group by dtype and size, in the order in which the backward pass makes them."""
        done: list[list[tuple[int, Any]]] = []
        open_buckets: dict[Any, tuple[list[tuple[int, Any]], int]] = {}
        for position, gradient in reversed(dense):
            bucket, size = open_buckets.get(gradient.dtype, ([], 0))
            bucket.append((position, gradient))
            size += (gradient.shape.num_elements() or 0) * gradient.dtype.size
            if size >= self._options.bucket_bytes:
                done.append(bucket)
                bucket, size = [], 0
            open_buckets[gradient.dtype] = (bucket, size)
        return done + [bucket for bucket, _ in open_buckets.values() if bucket]

    def _gather_rows(self, gradient: Any, name: str) -> Any:
        """Send the rows used, average them where several ranks used the same."""
        values = self._collective.allgather(_to_wire(gradient.values), name=f"{name}.values")
        rows = self._collective.allgather(gradient.indices, name=f"{name}.rows")
        values = tf.cast(values, gradient.values.dtype) / self._collective.size
        return merge_rows(tf.IndexedSlices(values, rows, gradient.dense_shape))

    def _call_name(self, indices: Sequence[int]) -> str:
        """Equal on all ranks, and unique among calls that can be in flight together."""
        signature = zlib.crc32(repr(list(indices)).encode())
        call = 0
        if not tf.executing_eagerly():
            counts = self._calls.setdefault(keras_seam.outermost_graph(), {})
            call = counts.get(signature, 0)
            counts[signature] = call + 1
        return f"{self._name}.{signature:08x}.{call}"

    @staticmethod
    def _refuse_xla() -> None:
        if keras_seam.inside_xla():
            raise OptimizerError(
                "The whole train step is being compiled by XLA (jit_compile=True), but the "
                "collectives have no XLA kernel. Call model.compile(..., jit_compile=False); "
                "to keep XLA, compile only the function that computes the gradients.")


def _to_wire(tensor: Any) -> Any:
    """Cast dtypes that no collective takes (bfloat16, float8) to float32."""
    return tensor if tensor.dtype in _NATIVE else tf.cast(tensor, tf.float32)


def merge_rows(gradient: Any) -> Any:
    """Sum the rows that occur more than once.

    Adaptive optimizers and clipping of Keras 3 treat each occurrence as a gradient of its own,
    which differs from the dense gradient (by up to 2e-1 after four steps of RMSprop).
    """
    rows, position = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, position, tf.shape(rows)[0])
    return tf.IndexedSlices(values, rows, gradient.dense_shape)

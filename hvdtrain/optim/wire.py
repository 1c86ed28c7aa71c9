"""`Wire`: one way to average tensors over the ranks; and the plain one, an allreduce.

Whatever a wire loses on the way, it gives bitwise the same result on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.optim.kept_back import VariableKey
from hvdtrain.optim.options import ReducerOptions

NATIVE = (tf.float16, tf.float32, tf.float64)
"""What every collective can sum."""
HALF_BYTES = 2
BYTES_SHARE = 0.04
"""Where gradients are sent in part, at most this share of the bytes of an allreduce; of small
tensors it may be more."""


class Wire(ABC):
    """One way to average tensors over the ranks.

    Args:
        collective: The collective to use.
        options: How to reduce.
    """

    def __init__(self, collective: Collective, options: ReducerOptions) -> None:
        self._collective = collective
        self._options = options

    @abstractmethod
    def average(self, tensors: Sequence[Any], keys: Sequence[VariableKey], *,
                name: str) -> list[Any]:
        """Average over all ranks, or add up where the options say so. All ranks.

        Args:
            tensors: Sequence of dense tensors with static shapes, of one dtype.
            keys: Sequence of `VariableKey`, one for each.
            name: String, begins the names of the collectives.

        Returns:
            A list of tensors of the same shapes and dtype.
        """

    def dense_bytes(self, shape: Sequence[int], itemsize: int) -> float:
        """Bytes that a rank sends for a tensor of numbers of `itemsize` bytes each."""
        ranks = self._collective.size
        return 2 * (ranks - 1) / ranks * prod(shape) * self.itemsize(itemsize)

    def itemsize(self, itemsize: int) -> int:
        """Bytes on the wire of a number of `itemsize` bytes."""
        return itemsize

    @property
    def factor(self) -> float:
        """What a sum over all ranks is multiplied by."""
        return 1.0 if self._options.op == "sum" else 1.0 / self._collective.size


class PlainWire(Wire):
    """One allreduce of the whole group.

    Args:
        collective: The collective to use.
        options: How to reduce.
        half: Boolean, send float16 instead of wider floats.
    """

    def __init__(self, collective: Collective, options: ReducerOptions, *,
                 half: bool = False) -> None:
        super().__init__(collective, options)
        self._half = half

    def average(self, tensors: Sequence[Any], keys: Sequence[VariableKey], *,
                name: str) -> list[Any]:
        """See `Wire.average`. float16 is divided first: the sum of N could overflow."""
        del keys
        dtype, op, before = tensors[0].dtype, self._options.op, self._options.predivide
        wire = tf.float16 if self._half else dtype if dtype in NATIVE else tf.float32
        if op == "average" and before == 1 and wire == tf.float16:
            before = float(self._collective.size)
        if op != "average" or before == 1:
            out = self._collective.reduce([tf.cast(t, wire) for t in tensors], name=name, op=op)
            return [tf.cast(t, dtype) for t in out]
        sent = [multiplied(t, 1 / before, wire) for t in tensors]
        sums = self._collective.reduce(sent, name=name, op="sum")
        return [multiplied(t, before / self._collective.size, dtype) for t in sums]

    def itemsize(self, itemsize: int) -> int:
        """See `Wire.itemsize`."""
        return HALF_BYTES if self._half else itemsize


def multiplied(tensor: Any, factor: float, dtype: Any) -> Any:
    """`tensor * factor` as `dtype`, multiplied in float32 or wider."""
    if factor == 1:
        return tf.cast(tensor, dtype)
    wide = tensor.dtype if tensor.dtype in (tf.float32, tf.float64) else tf.float32
    return tf.cast(tf.cast(tensor, wide) * tf.constant(factor, wide), dtype)


def size_of(tensor: Any) -> int:
    """Number of elements; the shape is static."""
    return prod(tensor.shape.as_list())


def pack_bfloat16(tensor: Any) -> Any:
    """Round to bfloat16, as bits that every collective can carry."""
    return tf.bitcast(tf.cast(tensor, tf.bfloat16), tf.uint16)


def unpack_bfloat16(bits: Any) -> Any:
    """What `pack_bfloat16` made, as float32."""
    return tf.cast(tf.bitcast(bits, tf.bfloat16), tf.float32)


def joined(tensors: Sequence[Any]) -> Any:
    """All elements of all tensors, as one float32 vector."""
    flat = [tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)


def apart(flat: Any, like: Sequence[Any]) -> list[Any]:
    """Cut a vector into tensors of the shapes and dtypes of others."""
    parts = tf.split(flat, [size_of(t) for t in like])
    return [tf.cast(tf.reshape(part, t.shape), t.dtype)
            for part, t in zip(parts, like, strict=True)]


def number_bytes(dtype: Any) -> int:
    """Bytes of one number, as collectives take it."""
    return int(dtype.size) if dtype in NATIVE else int(tf.float32.size)

"""Gradients in half the bytes, or in part; and which gradient takes which wire.

Which wire a gradient takes depends on its dtype and static shape only, so it is the same on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.optim.wire import (
    HALF_BYTES,
    NATIVE,
    PlainWire,
    Wire,
    apart,
    joined,
    number_bytes,
    pack_bfloat16,
    size_of,
    unpack_bfloat16,
)

TOPK_SMALLEST = 512
"""Tensors of fewer elements travel whole: they are few bytes."""
TOPK_BYTES_SHARE = 0.04
"""At most this share of the bytes of an allreduce is sent, whatever `topk_ratio` says: each
rank receives what all others send, so the bytes grow with the number of ranks."""
_BLOCK = 1 << 16
"""The largest elements are looked for in each block of a gradient, so that an index within it
takes two bytes."""
_ENTRY_BYTES = 4
"""An element that is sent: its index in its block, its value as bfloat16."""


class TwoShotWire(Wire):
    """bfloat16 on the wire, sums in float32: as many bytes as an allreduce in half precision.

    Each rank gets the same part of the tensors of all ranks, sums it in float32, and sends the
    sum to all. So each number is rounded twice, however many ranks there are.
    """

    def average(self, tensors: Sequence[Any], keys: Sequence[Hashable], *, name: str) -> list[Any]:
        """See `Wire.average`."""
        del keys
        ranks, size = self._collective.size, sum(size_of(t) for t in tensors)
        part = -(-size // ranks)
        flat = tf.pad(joined(tensors), [[0, part * ranks - size]])
        received = self._collective.alltoall(pack_bfloat16(flat), name=f"{name}.parts")
        parts = unpack_bfloat16(tf.reshape(received, [ranks, part]))
        # Multiplied first: a sum of N could overflow where their mean does not.
        total = tf.reduce_sum(parts * self.factor, axis=0)
        sums = self._collective.allgather(pack_bfloat16(total), name=f"{name}.sums")
        return apart(unpack_bfloat16(sums)[:size], tensors)

    def itemsize(self, itemsize: int) -> int:
        """See `Wire.itemsize`."""
        del itemsize
        return HALF_BYTES


class TopKWire(Wire):
    """The largest elements of each tensor; the rest is added to the next gradient.

    What is kept back, the residual, is a variable for each variable, in float32. It holds what
    one rank has not sent yet, differs between ranks, and is not saved.

    Args:
        collective: The collective to use.
        options: How to reduce.
        loss_scale: Callable that gives the factor that gradients carry now, or None. Residuals
            do not carry it, since it changes.
    """

    def __init__(self, collective: Collective, options: ReducerOptions,
                 loss_scale: Callable[[], Any] | None) -> None:
        super().__init__(collective, options)
        self._loss_scale = loss_scale
        self._residuals: dict[Hashable, Any] = {}

    def kept(self, count: int) -> int:
        """How many of `count` elements are sent; as many of each block."""
        allowed = TOPK_BYTES_SHARE * 2 * tf.float32.size / (_ENTRY_BYTES * self._collective.size)
        blocks = _blocks(count)
        share = min(self._options.topk_ratio, allowed) * count / blocks
        return blocks * max(1, int(share))

    def average(self, tensors: Sequence[Any], keys: Sequence[Hashable], *, name: str) -> list[Any]:
        """See `Wire.average`. A gradient that is not finite is not finite on all ranks."""
        scale = 1.0 if self._loss_scale is None else tf.cast(self._loss_scale(), tf.float32)
        entries, rests = [], []
        for tensor, key in zip(tensors, keys, strict=True):
            residual = self._residual(key, size_of(tensor))
            packed, rest = self._largest(joined([tensor]) + residual * scale)
            entries.append(packed)
            rests.append((residual, rest / scale))
        sent = tf.concat(entries, axis=0)
        received = self._collective.allgather(sent, name=f"{name}.top")
        parts = tf.split(tf.reshape(received, [self._collective.size, *sent.shape]),
                         [entry.shape[0] for entry in entries], axis=1)
        finite = tf.reduce_all(tf.math.is_finite(unpack_bfloat16(received[:, 1])))
        for residual, rest in rests:
            # Where all skip the update, this step leaves no trace in what is sent later.
            residual.assign(tf.where(finite, rest, residual))
        return [tf.cast(tf.reshape(self._average_of(part, size_of(t)), t.shape), t.dtype)
                for part, t in zip(parts, tensors, strict=True)]

    def _largest(self, found: Any) -> tuple[Any, Any]:
        """The largest elements, as pairs of index and value, and what remains without them."""
        size, blocks = size_of(found), _blocks(size_of(found))
        width = -(-size // blocks)
        rows = tf.reshape(tf.pad(found, [[0, blocks * width - size]]), [blocks, width])
        _, at = tf.math.top_k(tf.abs(rows), self.kept(size) // blocks, sorted=False)
        values = tf.gather(rows, at, batch_dims=1)
        # No order finds a NaN: one value that is not finite must reach all ranks.
        all_finite = tf.reduce_all(tf.math.is_finite(found))
        packed = pack_bfloat16(tf.where(all_finite, values, float("nan")))
        rest = tf.tensor_scatter_nd_sub(
            rows, _coordinates(at), tf.reshape(unpack_bfloat16(packed), [-1]))
        pairs = tf.stack([tf.cast(at, tf.uint16), packed], axis=-1)
        return tf.reshape(pairs, [-1, 2]), tf.reshape(rest, [-1])[:size]

    def _average_of(self, received: Any, size: int) -> Any:
        """The average of one tensor, from the pairs of all ranks.

        Rank after rank: the elements of one are distinct, so the order of every addition is the
        same on all ranks, on a GPU too.
        """
        blocks = _blocks(size)
        total = tf.zeros([blocks, -(-size // blocks)])
        for pairs in tf.unstack(received):
            at = tf.reshape(tf.cast(pairs[:, 0], tf.int32), [blocks, -1])
            total = tf.tensor_scatter_nd_add(
                total, _coordinates(at), unpack_bfloat16(pairs[:, 1]) * self.factor)
        return tf.reshape(total, [-1])[:size]

    def _residual(self, key: Hashable, size: int) -> Any:
        if key not in self._residuals:
            with tf.init_scope():
                self._residuals[key] = tf.Variable(
                    tf.zeros([size]), trainable=False, name="hvdtrain_residual")
        return self._residuals[key]

    def dense_bytes(self, count: int, itemsize: int) -> float:
        """See `Wire.dense_bytes`."""
        del itemsize
        return (self._collective.size - 1) * self.kept(count) * _ENTRY_BYTES


def _blocks(count: int) -> int:
    return max(1, -(-count // _BLOCK))


def _coordinates(at: Any) -> Any:
    """From the indices within each block, one row each, to coordinates `(block, index)`."""
    blocks, kept = at.shape
    block = tf.repeat(tf.range(blocks), kept)
    return tf.stack([block, tf.reshape(at, [-1])], axis=1)


class Wires:
    """The wires of one reducer, and which gradient takes which.

    Args:
        collective: The collective to use.
        options: How to reduce.
        loss_scale: See `TopKWire`.
    """

    def __init__(self, collective: Collective, options: ReducerOptions,
                 loss_scale: Callable[[], Any] | None = None) -> None:
        self._collective = collective
        self._compression = options.compression
        self._plain = PlainWire(collective, options)
        made: dict[str, Callable[[], Wire]] = {
            "none": lambda: self._plain,
            "fp16": lambda: PlainWire(collective, options, half=True),
            "bf16": lambda: TwoShotWire(collective, options),
            "topk": lambda: TopKWire(collective, options, loss_scale),
        }
        self._short = made[options.compression]()

    def of(self, dtype: Any, shape: Sequence[int | None]) -> Wire:
        """The wire of a dense gradient."""
        if dtype == tf.float16 and self._compression in ("fp16", "bf16"):
            return self._plain
        if self._compression == "topk" and prod(n or 0 for n in shape) < TOPK_SMALLEST:
            return self._plain
        return self._short

    def value_bytes(self, dtype: Any) -> int:
        """Bytes of one number of a gathered row."""
        return number_bytes(dtype) if self._compression == "none" else HALF_BYTES

    @property
    def factor(self) -> float:
        """What a sum over all ranks is multiplied by."""
        return self._plain.factor

    def gather_values(self, values: Any, *, name: str) -> Any:
        """The rows of all ranks, one below the other, with what the wire keeps of each number.

        `topk` sends all rows, as bfloat16: of a sparse gradient most is left out already.
        """
        dtype = values.dtype
        if self._compression == "none":
            wire = values if dtype in NATIVE else tf.cast(values, tf.float32)
            return tf.cast(self._collective.allgather(wire, name=name), dtype)
        half = tf.float16 if self._compression == "fp16" else tf.bfloat16
        packed = tf.bitcast(tf.cast(values, half), tf.uint16)
        received = self._collective.allgather(packed, name=name)
        return tf.cast(tf.bitcast(received, half), dtype)

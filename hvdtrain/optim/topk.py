"""`TopKWire`: of each gradient the largest elements only."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.optim.kept_back import KeptBack, VariableKey
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.optim.wire import BYTES_SHARE, Wire, joined, pack_bfloat16, size_of, unpack_bfloat16

_BLOCK = 1 << 16
"""The largest elements are looked for in each block of a gradient, so that an index within it
takes two bytes."""
_ENTRY_BYTES = 4
"""An element that is sent: its index in its block, its value as bfloat16."""


class TopKWire(Wire):
    """The largest elements of each tensor; the rest is added to the next gradient.

    Args:
        collective: The collective to use.
        options: How to reduce.
        kept_back: Holds what was not sent.
    """

    def __init__(self, collective: Collective, options: ReducerOptions,
                 kept_back: KeptBack) -> None:
        super().__init__(collective, options)
        self._kept_back = kept_back

    def kept(self, count: int) -> int:
        """How many of `count` elements are sent; as many of each block.

        Each rank receives what all others send, so the share falls with the number of ranks.
        """
        allowed = BYTES_SHARE * 2 * tf.float32.size / (_ENTRY_BYTES * self._collective.size)
        blocks = _blocks(count)
        share = min(self._options.topk_ratio, allowed) * count / blocks
        return blocks * max(1, int(share))

    def average(self, tensors: Sequence[Any], keys: Sequence[VariableKey], *,
                name: str) -> list[Any]:
        """See `Wire.average`. A gradient that is not finite is not finite on all ranks."""
        scale = self._kept_back.factor()
        entries = []
        for tensor, key in zip(tensors, keys, strict=True):
            residual = self._kept_back.residual(key, size_of(tensor))
            packed, rest = self._largest(joined([tensor]) + residual * scale)
            entries.append(packed)
            self._kept_back.note(residual, rest / scale)
        sent = tf.concat(entries, axis=0)
        received = self._collective.allgather(sent, name=f"{name}.top")
        parts = tf.split(tf.reshape(received, [self._collective.size, *sent.shape]),
                         [entry.shape[0] for entry in entries], axis=1)
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

    def dense_bytes(self, shape: Sequence[int], itemsize: int) -> float:
        """See `Wire.dense_bytes`."""
        del itemsize
        return (self._collective.size - 1) * self.kept(prod(shape)) * _ENTRY_BYTES


def _blocks(count: int) -> int:
    return max(1, -(-count // _BLOCK))


def _coordinates(at: Any) -> Any:
    """From the indices within each block, one row each, to coordinates `(block, index)`."""
    blocks, kept = at.shape
    block = tf.repeat(tf.range(blocks), kept)
    return tf.stack([block, tf.reshape(at, [-1])], axis=1)

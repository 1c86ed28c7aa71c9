"""Means over ranks with eight bits for a number, in float32 in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.optim.wire import pack_bfloat16, unpack_bfloat16

BLOCK = 64
"""Numbers that are rounded to multiples of the same unit."""
BYTES_PER_NUMBER = (BLOCK + 2) / BLOCK
"""A byte for each number, and the unit of a block as bfloat16."""
_LARGEST = 127


def rounded_means(collective: Collective, vectors: Sequence[Any], *,
                  name: str) -> tuple[list[Any], list[Any]]:
    """The means over all ranks of some vectors. All ranks must call it.

    Each rank gets the same part of the vectors of all ranks, averages it in float32 and sends it
    to all; two ranks get everything, which is as many bytes. Each time it is sent, a number is
    rounded to 1/127 of the largest of its block.

    Args:
        collective: The collective to use.
        vectors: Sequence of tensors of shapes `(n,)`, float32; n is known and the same on all
            ranks.
        name: String, begins the names of the collectives.

    Returns:
        Their means, of the same shapes, bitwise equal on all ranks, and NaN throughout where a
        number is not finite; and what rounding has taken from this rank, likewise. The means over
        all ranks of the latter, added to the former, are the exact means.
    """
    counts = [-(-int(v.shape[0]) // BLOCK) for v in vectors]
    blocks = tf.concat([tf.reshape(tf.pad(v, [[0, count * BLOCK - v.shape[0]]]), [count, BLOCK])
                        for v, count in zip(vectors, counts, strict=True)], axis=0)
    means, taken = (_both if collective.size == 2 else _by_parts)(collective, blocks, name)

    def cut(found: Any) -> list[Any]:
        return [tf.reshape(part, [-1])[:v.shape[0]]
                for part, v in zip(tf.split(found, counts), vectors, strict=True)]
    return cut(means), cut(taken)


def _both(collective: Collective, blocks: Any, name: str) -> tuple[Any, Any]:
    """The mean of two ranks, and what this one has not sent."""
    sent = _pack(blocks)
    received = _unpack(collective.allgather(sent, name=f"{name}.both"))
    return tf.reduce_mean(tf.reshape(received, [2, *blocks.shape]), axis=0), blocks - _unpack(sent)


def _by_parts(collective: Collective, blocks: Any, name: str) -> tuple[Any, Any]:
    """The mean over all ranks, and what this one has not sent or lost in its part of the mean."""
    count, ranks = blocks.shape[0], collective.size
    part = -(-count // ranks)
    blocks = tf.pad(blocks, [[0, part * ranks - count], [0, 0]])
    sent = _pack(blocks)
    received = _unpack(collective.alltoall(sent, name=f"{name}.parts"))
    mean = tf.reduce_sum(tf.reshape(received, [ranks, part, BLOCK]) * (1 / ranks), axis=0)
    rounded = _pack(mean)
    means = _unpack(collective.allgather(rounded, name=f"{name}.means"))
    # What is lost here is lost once, and counts for all ranks.
    before = collective.rank * part
    lost = tf.pad((mean - _unpack(rounded)) * ranks,
                  [[before, (ranks - 1) * part - before], [0, 0]])
    return means[:count], (blocks - _unpack(sent) + lost)[:count]


def _pack(blocks: Any) -> Any:
    """From numbers `(blocks, BLOCK)` to bytes `(blocks, BLOCK + 2)`."""
    unit = tf.reduce_max(tf.abs(blocks), axis=1, keepdims=True) / _LARGEST
    # No order finds a NaN: one number that is not finite must reach all ranks.
    finite = tf.reduce_all(tf.math.is_finite(blocks))
    bits = pack_bfloat16(tf.where(finite, unit, float("nan")))
    unit = unpack_bfloat16(bits)
    steps = tf.where(finite & (unit > 0), tf.math.round(blocks / unit), 0.0)
    steps = tf.clip_by_value(steps, -_LARGEST, _LARGEST)  # where the unit was rounded down
    return tf.concat([tf.bitcast(tf.cast(steps, tf.int8), tf.uint8),
                      tf.reshape(tf.bitcast(bits, tf.uint8), [-1, 2])], axis=1)


def _unpack(packed: Any) -> Any:
    """What `_pack` made, as float32 `(blocks, BLOCK)`."""
    steps = tf.cast(tf.bitcast(packed[:, :BLOCK], tf.int8), tf.float32)
    unit = unpack_bfloat16(tf.bitcast(packed[:, BLOCK:], tf.uint16))
    return steps * unit[:, tf.newaxis]

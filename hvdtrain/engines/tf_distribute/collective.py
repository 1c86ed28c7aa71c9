"""`StrategyCollective`: what processes tell each other, through the collectives of the strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Array, Collective, ReduceOp, Tensor
from hvdtrain.collectives.plain import decode, encode
from hvdtrain.errors import CollectiveError

_WORD = 4
"""Bytes of an int32, which every collective of TensorFlow can carry."""


class StrategyCollective(Collective):
    """The processes of a `MultiWorkerMirroredStrategy` with one replica each. Eager only.

    Args:
        strategy: The strategy.
        rank: Integer, this process.
    """

    name = "tf.distribute"

    def __init__(self, strategy: Any, rank: int) -> None:
        self._strategy = strategy
        self.rank = rank
        self.size = int(strategy.num_replicas_in_sync)

    def reduce(self, tensors: Sequence[Tensor], *, name: str, op: ReduceOp) -> list[Tensor]:
        """See `Collective.reduce`; `average` and `sum` only."""
        del name
        kinds = {"average": tf.distribute.ReduceOp.MEAN, "sum": tf.distribute.ReduceOp.SUM}
        if op not in kinds:
            raise CollectiveError(f"tf.distribute reduces by average or sum. Received: op={op!r}")
        return [self._strategy.reduce(kinds[op], tensor, axis=None) for tensor in tensors]

    def allgather(self, tensor: Tensor, *, name: str) -> Tensor:
        """See `Collective.allgather`.

        A sum over tables in which each process fills its own rows: `Strategy.gather` traces a
        graph anew at every call, which takes ten times as long.
        """
        array = np.asarray(tensor)
        lengths = np.zeros(self.size, np.int32)
        lengths[self.rank] = len(array)
        lengths = self.reduce([tf.constant(lengths)], name=name, op="sum")[0].numpy()
        start = int(lengths[:self.rank].sum())
        table = np.zeros((int(lengths.sum()), *array.shape[1:]), array.dtype)
        table[start:start + len(array)] = array
        return self.reduce([tf.constant(table)], name=name, op="sum")[0]

    def broadcast_array(self, array: Array, *, root: int = 0) -> Array:
        """See `Collective.broadcast_array`: a sum to which only the root adds its bits."""
        words = _as_words(array.tobytes())
        if self.rank != root:
            words = np.zeros_like(words)
        summed = self.reduce([tf.constant(words)], name="broadcast", op="sum")[0].numpy()
        received = summed.tobytes()[:array.nbytes]
        return np.frombuffer(received, array.dtype).reshape(array.shape).copy()

    def gather_objects(self, value: object) -> list[Any]:
        """See `Collective.gather_objects`."""
        mine = _as_words(encode(value))
        sizes = self.allgather(tf.constant([len(mine)], tf.int32), name="sizes").numpy()
        words = self.allgather(tf.constant(mine), name="objects").numpy()
        ends = np.cumsum(sizes)
        return [decode(words[end - size:end].tobytes())
                for size, end in zip(sizes, ends, strict=True)]


def _as_words(data: bytes) -> Array:
    """Bytes as int32, with zeros at the end."""
    return np.frombuffer(data + bytes(-len(data) % _WORD), np.int32)

"""The data on the workers: each reads its own from the job's source, in its own process.

The chief's closures call functions there, which workers register, to read batches by number. So any
`Source` works, no sample crosses the network, and a batch computed again, anywhere, is the same.
"""

from __future__ import annotations

import dataclasses
import functools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config import TrainConfig
from hvdtrain.data.pipeline import named_errors
from hvdtrain.data.plans import ShardPlan
from hvdtrain.data.source import ArraySource, DataSplits, Source
from hvdtrain.engines.parameter_server import tf_seam
from hvdtrain.errors import DataError

Rows = np.ndarray[Any, Any]
_Key = tuple[int, int, int]


def shard_plan(source: Source, config: TrainConfig, replicas: int) -> ShardPlan:
    """Which samples belong to which batch: the plan of `replicas` ranks of allreduce."""
    if len(source) < replicas:
        raise DataError(
            f"There are {len(source)} training samples for {replicas} gradients per update; each "
            f"needs at least one. Give at most --ps-replicas {len(source)}, fewer workers, or "
            "more data.")
    return ShardPlan(samples=len(source), rank=0, size=replicas,
                     batch_per_rank=config.rank_batch(replicas), seed=config.seed or 0,
                     shuffle=config.shuffle, remainder=config.remainder_as("pad"))


class Reader:
    """Reads batches by number, in a worker's process; the last one registered is used."""

    def __init__(self, splits: DataSplits, config: TrainConfig, replicas: int) -> None:
        self._splits = splits
        self._batch = config.rank_batch(replicas)
        plan = shard_plan(splits.train, config, replicas)
        self._order = functools.lru_cache(maxsize=2 * replicas)(
            lambda epoch, replica: dataclasses.replace(plan, rank=replica).order(epoch))
        # Arrays in memory are gathered faster than handed to another thread.
        in_memory = isinstance(splits.train, ArraySource) and splits.train.arrays is not None
        self._ahead = None if in_memory else ThreadPoolExecutor(1, "hvdtrain-read")
        self._next: dict[_Key, Future[list[Rows]]] = {}

    def register(self) -> None:
        """Let this process' closures read through this."""
        for method in (self.train, self.validation):
            tf_seam.register_function(f"hvdtrain.{method.__name__}", method)

    def train(self, epoch: Any, step: Any, replica: Any, end: Any) -> list[Rows]:
        """The batch of one replica in a step of an epoch; it will read on up to step `end`."""
        key = (int(epoch), int(step), int(replica))
        with named_errors(self._splits.train.name):
            waiting = self._next.pop(key, None)
            batch = self._read(key) if waiting is None else waiting.result()
            if self._ahead is not None and key[1] + 1 < int(end):
                following = (key[0], key[1] + 1, key[2])
                # Of a closure that was given up only the last batch may be left over.
                self._next = {following: self._ahead.submit(self._read, following)}
            return batch

    def validation(self, number: Any) -> list[Rows]:
        """A batch of the validation data."""
        source = self._splits.validation
        if source is None:
            raise ValueError("there is no validation data")
        begin = int(number) * self._batch
        with named_errors(source.name):
            return _flat(source.read(np.arange(begin, min(begin + self._batch, len(source)))))

    def _read(self, key: _Key) -> list[Rows]:
        epoch, step, replica = key
        rows = self._order(epoch, replica)[step * self._batch:(step + 1) * self._batch]
        return _flat(self._splits.train.read(rows))


def read_batch(method: str, source: Any, *arguments: Any) -> Any:
    """On the chief, the op in a closure that calls this method of the worker's `Reader`.

    Gives tensors `(batch, ...)` in the structure of the data.
    """
    specs = tf.nest.flatten(source.signature)
    tensors = tf_seam.call_function(
        f"hvdtrain.{method}", arguments, [spec.dtype for spec in specs])
    for tensor, spec in zip(tensors, specs, strict=True):
        tensor.set_shape([None, *spec.shape])
    return tf.nest.pack_sequence_as(source.signature, tensors)


def _flat(structure: Any) -> list[Rows]:
    return [np.ascontiguousarray(array) for array in tf.nest.flatten(structure)]

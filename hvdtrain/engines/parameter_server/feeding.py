"""The data on the workers: each reads its own, from the job's source, in its own process.

A worker registers functions that read batches by number; the closures that the chief sends call
them there. So any `Source` works, no sample crosses the network, and which samples a batch has is
decided by its number alone: a batch that is done again, by whichever worker, is the same one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config import TrainConfig
from hvdtrain.data.failures import named_errors
from hvdtrain.data.shard import ShardPlan
from hvdtrain.data.source import ArraySource, DataSplits, Source
from hvdtrain.engines.parameter_server import tf_seam
from hvdtrain.errors import DataError

Rows = np.ndarray[Any, Any]


def shard_plan(source: Source, config: TrainConfig, replicas: int) -> ShardPlan:
    """Which samples belong to which batch: the plan of `replicas` ranks of allreduce.

    Raises:
        DataError: Fewer samples than gradients per update.
    """
    if len(source) < replicas:
        raise DataError(
            f"There are {len(source)} training samples for {replicas} gradients per update; each "
            f"needs at least one. Give at most --ps-replicas {len(source)}, fewer workers, or "
            "more data.")
    return ShardPlan(samples=len(source), rank=0, size=replicas,
                     batch_per_rank=config.rank_batch(replicas), seed=config.seed or 0,
                     shuffle=config.shuffle, remainder=config.remainder_as("pad"))


class Reader:
    """Reads batches by number. In a worker's process.

    Args:
        splits: The data.
        config: Batch, seed, order.
        replicas: Integer, batches per update.
    """

    def __init__(self, splits: DataSplits, config: TrainConfig, replicas: int) -> None:
        self._splits = splits
        self._batch = config.rank_batch(replicas)
        plans = [shard_plan(splits.train, config, replicas)]
        plans += [_of_rank(plans[0], rank) for rank in range(1, replicas)]
        self._order = functools.lru_cache(maxsize=2 * replicas)(
            lambda epoch, replica: plans[replica].order(epoch))
        # Arrays in memory are gathered faster than handed to another thread.
        in_memory = isinstance(splits.train, ArraySource) and splits.train.arrays is not None
        self._ahead = None if in_memory else _ReadAhead(self._rows_of, self._splits.train)

    def train(self, epoch: Any, step: Any, replica: Any, end: Any) -> list[Rows]:
        """The batch of one replica in one step of an epoch.

        Args:
            epoch: Integer.
            step: Integer.
            replica: Integer.
            end: Integer, up to which step the caller will ask on.
        """
        key = (int(epoch), int(step), int(replica))
        with named_errors(self._splits.train.name):
            if self._ahead is not None:
                return self._ahead.read(key, int(end))
            return _flat(self._splits.train.read(self._rows_of(key)))

    def validation(self, number: Any) -> list[Rows]:
        """A batch of the validation data."""
        source = self._splits.validation
        if source is None:
            raise ValueError("there is no validation data")
        begin = int(number) * self._batch
        with named_errors(source.name):
            return _flat(source.read(np.arange(begin, min(begin + self._batch, len(source)))))

    def register(self, name: str) -> None:
        """Let closures of this process read through this."""
        tf_seam.register_function(f"{name}.train", self.train)
        tf_seam.register_function(f"{name}.validation", self.validation)

    def _rows_of(self, key: tuple[int, int, int]) -> Rows:
        epoch, step, replica = key
        rows: Rows = self._order(epoch, replica)[step * self._batch:(step + 1) * self._batch]
        return rows


class _ReadAhead:
    """Reads the next batch of a closure while one is being trained on."""

    def __init__(self, rows_of: Callable[[Any], Rows], source: Source) -> None:
        self._rows_of, self._source = rows_of, source
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hvdtrain-read")
        self._next: dict[tuple[int, int, int], Future[list[Rows]]] = {}

    def read(self, key: tuple[int, int, int], end: int) -> list[Rows]:
        waiting = self._next.pop(key, None)
        batch = self._read(key) if waiting is None else waiting.result()
        epoch, step, replica = key
        if step + 1 < end:
            following = (epoch, step + 1, replica)
            # Of a closure that was given up only the last batch may be left over.
            self._next = {following: self._pool.submit(self._read, following)}
        return batch

    def _read(self, key: tuple[int, int, int]) -> list[Rows]:
        return _flat(self._source.read(self._rows_of(key)))


class Feed:
    """The chief's side: the ops in a closure that get a batch on the worker.

    Args:
        name: String, as `Reader.register` was given.
        splits: The data, for its signature.
    """

    def __init__(self, name: str, splits: DataSplits) -> None:
        self._name = name
        self._train = splits.train.signature
        self._validation = splits.validation.signature if splits.validation else None

    def train(self, epoch: Any, step: Any, replica: Any, end: Any) -> Any:
        """As `Reader.train`, as tensors `(batch, ...)` in the structure of the data."""
        return self._call("train", self._train, [epoch, step, replica, end])

    def validation(self, number: Any) -> Any:
        """As `Reader.validation`, as tensors."""
        return self._call("validation", self._validation, [number])

    def _call(self, what: str, signature: Any, arguments: list[Any]) -> Any:
        specs = tf.nest.flatten(signature)
        tensors = tf_seam.call_function(f"{self._name}.{what}", arguments,
                                        [spec.dtype for spec in specs])
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape([None, *spec.shape])
        return tf.nest.pack_sequence_as(signature, tensors)


def _of_rank(plan: ShardPlan, rank: int) -> ShardPlan:
    return ShardPlan(samples=plan.samples, rank=rank, size=plan.size,
                     batch_per_rank=plan.batch_per_rank, seed=plan.seed, shuffle=plan.shuffle,
                     remainder=plan.remainder)


def _flat(structure: Any) -> list[Rows]:
    return [np.ascontiguousarray(array) for array in tf.nest.flatten(structure)]

"""What each replica is fed. TensorFlow shards nothing here: every batch is placed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.data.pipeline import evaluation_dataset, training_dataset
from hvdtrain.data.shard import ShardPlan, evaluation_rows
from hvdtrain.data.source import Source
from hvdtrain.errors import DataError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationInput:
    """One pass over this process' share of the validation data."""

    dataset: Any
    """A distributed dataset of exactly `steps` steps, again and again."""
    steps: int
    """0 where the share is empty."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessPlan(ShardPlan):
    """The samples of a process: in each step those of its replicas, one after the other.

    `rank` and `size` are those of the process, `batch_per_rank` is the batch of all its replicas.
    """

    replicas: int

    @property
    def last_batch_per_rank(self) -> int:
        """Samples of the process in the last, smaller step: equal on its replicas."""
        left, everyone = self.samples % self.global_batch, self.size * self.replicas
        each = -(-left // everyone) if self.remainder == "pad" else left // everyone
        return each * self.replicas


def training_input(strategy: Any, source: Source, shards: ShardPlan, *, first_replica: int,
                   replicas_here: int, first_epoch: int, first_step: int) -> Any:
    """The training batches of this process, epoch after epoch without end.

    Args:
        strategy: The strategy.
        source: Where samples are read.
        shards: The plan of all replicas.
        first_replica: Integer, the first replica of this process among all.
        replicas_here: Integer, replicas in this process.
        first_epoch: Integer, the epoch to begin with.
        first_step: Integer, the step of that epoch to begin with.

    Returns:
        A distributed dataset; each step holds one batch for every replica of this process.
    """
    together = ProcessPlan(
        samples=shards.samples, rank=first_replica // replicas_here,
        size=shards.size // replicas_here, batch_per_rank=shards.batch_per_rank * replicas_here,
        seed=shards.seed, shuffle=shards.shuffle, remainder=shards.remainder,
        replicas=replicas_here)
    in_turn = training_dataset(source, together, first_epoch=first_epoch, first_step=first_step)
    if replicas_here > 1:
        in_turn = in_turn.map(_cutter(replicas_here)).unbatch().prefetch(replicas_here)
    # Otherwise all workers would agree at each step whether there is another batch.
    endless = in_turn.apply(tf.data.experimental.assert_cardinality(
        tf.data.INFINITE_CARDINALITY))
    return strategy.distribute_datasets_from_function(lambda context: endless)


def evaluation_input(strategy: Any, source: Source, *, process: int, processes: int,
                     replicas_here: int, batch: int) -> EvaluationInput:
    """This process' share of the validation data: each sample once, whatever their number.

    The batches differ by one sample at most, so that no replica is ever fed an empty one.

    Args:
        strategy: The strategy.
        source: Where samples are read.
        process: Integer, this process.
        processes: Integer, their number.
        replicas_here: Integer, replicas in this process.
        batch: Integer, samples of a replica per step.

    Raises:
        DataError: Fewer samples than replicas in this process.
    """
    rows = evaluation_rows(len(source), process, processes)
    if len(rows) == 0:
        return EvaluationInput(dataset=None, steps=0)
    if len(rows) < replicas_here:
        raise DataError(
            f"There are {len(rows)} validation samples for {replicas_here} replicas; every "
            f"replica needs at least one. Give at least {replicas_here} validation samples.")
    steps = min(-(-len(rows) // (batch * replicas_here)), len(rows) // replicas_here)
    size, larger = divmod(len(rows), steps * replicas_here)
    cut = larger * (size + 1)
    parts = [evaluation_dataset(source, part, length)
             for part, length in ((rows[:cut], size + 1), (rows[cut:], size)) if len(part)]
    dataset = parts[0] if len(parts) == 1 else parts[0].concatenate(parts[1])
    repeated = dataset.repeat()
    return EvaluationInput(
        dataset=strategy.distribute_datasets_from_function(lambda context: repeated), steps=steps)


def _cutter(replicas: int) -> Callable[..., Any]:
    """Cuts a batch of a process into one for each of its replicas, along a new first axis."""
    def cut(tensor: Any) -> Any:
        each = None if tensor.shape[0] is None else tensor.shape[0] // replicas
        parts = tf.reshape(tensor, tf.concat([[replicas, -1], tf.shape(tensor)[1:]], axis=0))
        parts.set_shape([replicas, each, *tensor.shape[1:]])
        return parts
    # `map` hands over the elements of a tuple, and anything else alone.
    return lambda *batch: tf.nest.map_structure(cut, batch[0] if len(batch) == 1 else batch)

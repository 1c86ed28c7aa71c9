"""`tf.data` pipelines over a source: endless training batches, one pass of evaluation batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.failures import named_errors
from hvdtrain.data.shard import ShardPlan
from hvdtrain.data.source import ArraySource, Source

_AHEAD = 2
"""Batches that are ready before they are asked for."""


def training_dataset(source: Source, plan: ShardPlan, *, first_epoch: int = 0,
                     first_step: int = 0, epochs: int | None = None) -> Any:
    """This rank's batches, epoch after epoch without end.

    It never ends on purpose: Keras takes `plan.steps` batches per epoch, and runs no phantom
    step at an end of data that never comes.

    Args:
        source: Where samples are read.
        plan: Which ones, in which order.
        first_epoch: Integer, the epoch to begin with (a resumed run).
        first_step: Integer, the step of that epoch to begin with, up to `plan.steps`.
        epochs: Integer, end after so many; None for never.

    Returns:
        A `tf.data.Dataset` of batches of shape `(batch, ...)`; the batch axis is static where
        all batches are full. Where `plan.uneven`, of pairs `(weight, batch)`, the weight being
        a float32 scalar: `plan.full_weight`, or `plan.last_weight` in the last step.
    """
    fetch = fetcher(source)
    batch = plan.own_batch
    static = batch if plan.last_batch_per_rank == 0 else None

    def one_epoch(epoch: Any) -> Any:
        order = tf.numpy_function(plan.order, [epoch], tf.int64, stateful=False)
        order.set_shape([plan.samples_per_rank])
        begin = tf.where(tf.equal(epoch, first_epoch), tf.constant(first_step, tf.int64), 0)
        batches = tf.data.Dataset.range(begin, plan.steps)
        if plan.uneven:
            return batches.map(lambda step: (
                tf.where(step < plan.full_steps, plan.full_weight, plan.last_weight),
                _shaped(fetch(order[step * batch:(step + 1) * batch]), static)))
        return batches.map(
            lambda step: _shaped(fetch(order[step * batch:(step + 1) * batch]), static))

    return ready(numbers_of(first_epoch, epochs).flat_map(one_epoch))


def numbers_of(first_epoch: int, epochs: int | None) -> Any:
    """The numbers of the epochs, without end for None."""
    if epochs is None:
        return tf.data.Dataset.counter(first_epoch)
    return tf.data.Dataset.range(first_epoch, first_epoch + epochs)


def evaluation_dataset(source: Source, rows: np.ndarray[Any, Any], batch: int) -> Any:
    """Batches over the given samples, once.

    Args:
        source: Where samples are read.
        rows: int64 array, which samples, not empty.
        batch: Integer, samples per batch; the last one may be smaller.
    """
    fetch = fetcher(source)
    rows_t = tf.constant(rows)
    steps = -(-len(rows) // batch)
    dataset = tf.data.Dataset.range(steps).map(
        lambda step: _shaped(fetch(rows_t[step * batch:(step + 1) * batch]), None))
    return ready(dataset.apply(tf.data.experimental.assert_cardinality(steps)))


def ready(dataset: Any, *, autotune: bool = False) -> Any:
    """Batches that are made while the step before them runs.

    Args:
        dataset: Of batches.
        autotune: Boolean, something in it is tuned while it runs. Deleting an iterator then waits
            for the thread that does so: seconds, at random.
    """
    options = tf.data.Options()
    options.autotune.enabled = autotune
    return dataset.prefetch(_AHEAD).with_options(options)


def fetcher(source: Source) -> Callable[[Any], Any]:
    """A graph function from row numbers to a structure of batches."""
    arrays = source.arrays if isinstance(source, ArraySource) else None
    if arrays is not None:
        with tf.device("CPU:0"):
            tensors = tf.nest.map_structure(tf.convert_to_tensor, arrays)
        return lambda rows: tf.nest.map_structure(lambda t: tf.gather(t, rows), tensors)
    signature = source.signature
    dtypes = [spec.dtype for spec in tf.nest.flatten(signature)]

    def read_flat(rows: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        with named_errors(source.name):
            return [np.ascontiguousarray(a) for a in tf.nest.flatten(source.read(rows))]

    def fetch(rows: Any) -> Any:
        flat = tf.numpy_function(read_flat, [rows], dtypes, stateful=False)
        for tensor, spec in zip(flat, tf.nest.flatten(signature), strict=True):
            tensor.set_shape([None, *spec.shape])
        return tf.nest.pack_sequence_as(signature, flat)
    return fetch


def _shaped(structure: Any, batch: int | None) -> Any:
    for tensor in tf.nest.flatten(structure):
        tensor.set_shape([batch, *tensor.shape[1:]])
    return structure

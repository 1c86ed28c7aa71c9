"""`tf.data` pipelines over a source: endless training batches, one pass of evaluation batches."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from hvdtrain.data.plans import ShardPlan, StreamPlan
from hvdtrain.data.source import ArraySource, Source
from hvdtrain.errors import DataError

Call = TypeVar("Call", bound=Callable[..., Any])
_AHEAD = 2
_READ_AT_ONCE = 2
"""Batches that are read at the same time: while one waits for a disk, another is parsed."""
_MARK = "hvdtrain cannot read "


def training_dataset(source: Source, plan: ShardPlan | StreamPlan, *, first_epoch: int = 0,
                     first_step: int = 0, epochs: int | None = None) -> Any:
    """This rank's batches, epoch after epoch without end, or `epochs` times.

    As the data never ends, Keras runs no extra step at an end. With a `StreamPlan` the source is
    this rank's share, and after its end a batch is one sample of weight 0. The batch axis is static
    where all are full; where `plan.uneven`, elements are pairs `(float32 weight, batch)`.
    """
    batch, samples = plan.own_batch, plan.samples_per_rank
    fetch = _fetcher(source, batch if samples == plan.steps * batch else None)
    weights = tf.constant(plan.weights())

    @as_it_is
    def one_epoch(epoch: Any) -> Any:
        order = tf.numpy_function(plan.order, [epoch], tf.int64, stateful=False)
        order.set_shape([samples])

        def rows(step: Any) -> Any:
            begin = tf.minimum(step * batch, samples - 1)
            return order[begin:begin + batch]
        steps = tf.data.Dataset.range(first_of_epoch(epoch, first_epoch, first_step), plan.steps)
        batches = fetch(steps, rows)
        if not plan.uneven:
            return batches
        return tf.data.Dataset.zip((steps.map(lambda step: weights[step]), batches))
    return ready(numbers_of(first_epoch, epochs).flat_map(one_epoch))


def numbers_of(first_epoch: int, epochs: int | None) -> Any:
    """The epoch numbers, infinite for None."""
    if epochs is None:
        return tf.data.Dataset.counter(first_epoch)
    return tf.data.Dataset.range(first_epoch, first_epoch + epochs)


def first_of_epoch(epoch: Any, first_epoch: int, first_step: int) -> Any:
    """The first step of an epoch, where a run is resumed within `first_epoch`."""
    return tf.where(tf.equal(epoch, first_epoch), tf.constant(first_step, tf.int64), 0)


def evaluation_dataset(source: Source, rows: np.ndarray[Any, Any], batch: int) -> Any:
    """Batches over the given samples (at least one), once; the last one may be smaller."""
    rows_t, steps = tf.constant(rows), -(-len(rows) // batch)
    dataset = _fetcher(source, None)(
        tf.data.Dataset.range(steps), lambda step: rows_t[step * batch:(step + 1) * batch])
    return ready(dataset.apply(tf.data.experimental.assert_cardinality(steps)))


def ready(dataset: Any, *, autotune: bool = False) -> Any:
    """Batches that are prepared during the step before."""
    # With `autotune` something in it is tuned while it runs. Deleting an iterator then waits for
    # the thread that does so: seconds, at random.
    options = tf.data.Options()
    options.autotune.enabled = autotune
    return dataset.prefetch(_AHEAD).with_options(options)


def _fetcher(source: Source, static: int | None) -> Callable[[Any, Callable[[Any], Any]], Any]:
    specs = tf.nest.flatten(source.signature)
    arrays = source.arrays if isinstance(source, ArraySource) else None
    calls: dict[str, Any] = {}
    if arrays is None:
        calls = {"num_parallel_calls": _READ_AT_ONCE, "deterministic": True}
    else:
        with tf.device("CPU:0"):
            tensors = [tf.convert_to_tensor(array) for array in tf.nest.flatten(arrays)]

    def read_flat(rows: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        with named_errors(source.name):
            return [np.ascontiguousarray(a) for a in tf.nest.flatten(source.read(rows))]

    def fetch(rows: Any) -> Any:
        if arrays is None:
            flat = tf.numpy_function(
                read_flat, [rows], [spec.dtype for spec in specs], stateful=False)
        else:
            flat = [tf.gather(tensor, rows) for tensor in tensors]
        for tensor, spec in zip(flat, specs, strict=True):
            tensor.set_shape([static, *spec.shape])
        return tf.nest.pack_sequence_as(source.signature, flat)
    return lambda steps, rows: steps.map(as_it_is(lambda step: fetch(rows(step))), **calls)


def as_it_is(function: Call) -> Call:
    """Exclude a function from AutoGraph, which takes long: it is written for graphs."""
    made: Call = tf.autograph.experimental.do_not_convert(function)
    return made


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Put a source's name into errors of reading it, in one line: TensorFlow keeps only that."""
    # An error that is no `DataError` is printed in full first.
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, DataError) else f"{type(error).__name__}: "
        if kind:  # one write: another thread may fail at the same time
            sys.stderr.write(traceback.format_exc())
        raise RuntimeError(f"{_MARK}{name}: {kind}{error}\n") from error


def reading_error(error: BaseException) -> str | None:
    """The source's error message, if a TensorFlow error contains one."""
    _, found, rest = str(error).partition(_MARK)
    return rest.splitlines()[0] if found else None

"""`evaluate` and `predict` on all ranks: the figures and predictions of one process.

Each rank takes a share of the samples; none is repeated or left out, however they divide. States
 of metrics are merged before a result is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.pipeline import evaluation_dataset, ready
from hvdtrain.data.shard import evaluation_rows, evaluation_rows_by_step
from hvdtrain.data.source import Source, as_source, check_source
from hvdtrain.data.stream import StreamSource, one_sample
from hvdtrain.data.stream_order import is_tuned
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.optim.state import check_same_model
from hvdtrain.session import Session, init
from hvdtrain.train.metrics import merged_logs, refuse_unmergeable

_WIRE = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_TRACED = "_hvdtrain_traced"
"""The test function that was traced while losses were weighted by samples."""


def evaluate(model: Any, data: Source | StreamSource | Any, *, batch_per_rank: int = 32,
             callbacks: Sequence[Any] = (), session: Session | None = None) -> dict[str, Any]:
    """Evaluate a compiled model on all ranks. Every rank must call it, with the same data.

    Args:
        model: A compiled `keras.Model`, the same on all ranks.
        data: A `Source`, a `StreamSource`, what `by_file` returns, or arrays `(x, y)` or
            `(x, y, sample_weight)`.
        batch_per_rank: Integer, samples per batch on each rank.
        callbacks: Keras callbacks, called on every rank; `on_test_end` has the figures of all.
        session: Defaults to that of `hvdtrain.init()`.

    Returns:
        Names and values of the loss and the metrics, over all samples; equal on all ranks.

    Raises:
        DataError: The data cannot be used.
        TrainingError: A metric cannot be merged over ranks, or the ranks hold different models.
    """
    session = session or init()
    collective = session.collective
    source = as_source(data, "evaluation")
    check_source(source, streams=True)
    if isinstance(source, StreamSource):
        source.count_everywhere(collective)
    if not keras_model.metrics_are_built(model):
        keras_model.build_metrics(model, one_sample(source))
    with session.progress.phase("evaluating"):
        check_same_model(collective, model)
        refuse_unmergeable(collective, model)
        share = share_of(model, source, session, batch_per_rank)
        given = keras.callbacks.CallbackList(list(callbacks), model=model, verbose=0, epochs=1,
                                             steps=None)
        results = model._get_metrics_result_or_logs
        keras_seam.set_on_instance(model, "_get_metrics_result_or_logs",
                                   lambda logs: merged_logs(collective, model, logs))
        try:
            with losses_by_samples(model):
                return evaluate_share(model, share, given)
        finally:
            keras_seam.restore_method(model, "_get_metrics_result_or_logs", results)


def share_of(model: Any, source: Source | StreamSource, session: Session,
             batch: int) -> Any | None:
    """Batches of this rank's share of the samples; None where it has none."""
    rank, size = session.world.rank, session.world.size
    if isinstance(source, StreamSource):
        return _stream_share(source, rank, size, batch)
    rows = rows_of(model, len(source), rank, size, batch)
    return evaluation_dataset(source, rows, batch) if len(rows) else None


def _stream_share(source: StreamSource, rank: int, size: int, batch: int) -> Any | None:
    steps = -(-source.count(rank, size) // batch)
    if not steps:
        return None
    dataset = source.batches(rank, size, batch)
    counted = dataset.apply(tf.data.experimental.assert_cardinality(steps))
    return ready(counted, autotune=is_tuned(dataset))


def rows_of(model: Any, samples: int, rank: int, size: int, batch: int) -> np.ndarray[Any, Any]:
    """The samples of one rank, in order.

    Of a stateful model those that follow the ones of the batch before, as in one process with
    the batches of all ranks; else a contiguous share.
    """
    stateful = any(getattr(layer, "stateful", False) for layer in model._flatten_layers())
    return (evaluation_rows_by_step(samples, rank, size, batch) if stateful
            else evaluation_rows(samples, rank, size))


def evaluate_share(model: Any, share: Any | None, callbacks: Any) -> dict[str, Any]:
    """Evaluate this rank's share as Keras does; of a rank that has none, its calls. Every rank.

    Args:
        model: A compiled model.
        share: Its batches, or None.
        callbacks: A `keras.callbacks.CallbackList`.
    """
    if share is not None:
        return dict(model.evaluate(share, verbose=0, callbacks=callbacks, return_dict=True))
    callbacks.on_test_begin()
    model.reset_metrics()
    logs = keras_model.pythonify_logs(model._get_metrics_result_or_logs({}))
    callbacks.on_test_end(logs)
    return logs


@contextmanager
def losses_by_samples(model: Any) -> Iterator[None]:
    """While it is entered, losses of single outputs are means over samples, not over batches.

    Keras weights a batch by its samples only where their number is known before it runs.
    """
    compiled = getattr(model, "_compile_loss", None)
    if compiled is None:
        yield
        return
    if model.test_function is not compiled.__dict__.get(_TRACED):
        model.test_function = None
    undo = keras_model.weight_losses_by_samples(compiled)
    try:
        yield
    finally:
        undo()
        keras_seam.set_on_instance(compiled, _TRACED, model.test_function)


def predict(model: Any, data: Source | StreamSource | Any, *, batch_per_rank: int = 32,
            callbacks: Sequence[Any] = (), session: Session | None = None) -> Any:
    """Predict on all ranks. Every rank must call it, with the same data.

    Args:
        model: A `keras.Model`, the same on all ranks.
        data: A `Source`, a `StreamSource`, what `by_file` returns, or arrays `x`, `(x,)` or
            `(x, y)`; a list is that of a model with several inputs.
        batch_per_rank: Integer, samples per batch on each rank.
        callbacks: Keras callbacks, called on every rank.
        session: Defaults to that of `hvdtrain.init()`.

    Returns:
        What `model.predict` gives: numpy arrays of shape `(samples, ...)` in the order of the
        data, on every rank. Of files, and of a stream that is made for each rank, the shares of
        the ranks follow each other.

    Raises:
        DataError: The data cannot be used.
        TrainingError: The ranks hold different models.
    """
    session = session or init()
    rank, size = session.world.rank, session.world.size
    source = as_source((data,) if isinstance(data, list) else data, "prediction")
    check_source(source, streams=True)
    if isinstance(source, StreamSource):
        source.count_everywhere(session.collective)
        own = source.count(rank, size)
        share = _stream_share(source, rank, size, batch_per_rank)
        if share is None:
            share = tf.data.Dataset.from_tensors(source.first())
        everyone = [source.numbers(r, size) for r in range(size)]
    else:
        everyone = [rows_of(model, len(source), r, size, batch_per_rank) for r in range(size)]
        own = len(everyone[rank])
        # A rank without samples computes one, to know the shapes, and sends none of it.
        share = evaluation_dataset(source, everyone[rank] if own else np.zeros(1, np.int64),
                                   batch_per_rank)
    order = np.argsort(np.concatenate(everyone), kind="stable")
    with session.progress.phase("predicting"):
        check_same_model(session.collective, model)
        mine = model.predict(share, verbose=0, callbacks=list(callbacks))
        flat = [_everyone(np.asarray(part)[:own], f"hvdtrain.predict.{number}", session)[order]
                for number, part in enumerate(tf.nest.flatten(mine))]
    return tf.nest.pack_sequence_as(mine, flat)


def _everyone(part: np.ndarray[Any, Any], name: str, session: Session) -> np.ndarray[Any, Any]:
    if session.collective.size == 1:
        return part
    tensor = tf.convert_to_tensor(part)
    wire = tensor if tensor.dtype in _WIRE else tf.cast(tensor, tf.float32)
    gathered = session.collective.allgather(wire, name=name)
    return np.asarray(tf.cast(gathered, tensor.dtype))

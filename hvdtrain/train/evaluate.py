"""Evaluation and prediction on all ranks: the figures and predictions of one process.

Each rank takes a share of the samples; none is repeated or left out, however they divide. States
of metrics are merged before a result is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.pipeline import evaluation_dataset, ready
from hvdtrain.data.shard import evaluation_rows, evaluation_rows_by_step
from hvdtrain.data.source import Source
from hvdtrain.data.stream import StreamSource
from hvdtrain.data.stream_order import is_tuned
from hvdtrain.errors import DataError
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.optim.keras_seam import Hidden
from hvdtrain.optim.shares import share_evaluation, share_losses
from hvdtrain.optim.state import check_same_model
from hvdtrain.session import Session
from hvdtrain.train.feed import Feed
from hvdtrain.train.metrics import merged_logs, refuse_unmergeable

_WIRE = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_TRACED = "_hvdtrain_traced"
"""The test function of all ranks, and what it was traced for."""
_PREDICTED = "_hvdtrain_predicted"
"""The predict function of all ranks, and what it was traced for."""


class Evaluation:
    """This rank's part of an evaluation, as often as it is run. Every rank.

    Args:
        model: A compiled model.
        feed: The data.
        session: This rank.
    """

    def __init__(self, model: Any, feed: Feed, session: Session) -> None:
        self._model = model
        self._collective = session.collective
        self.data = feed.evaluation()
        """This rank's batches, for Keras' `evaluate`."""
        self._weighted = feed.weighted
        self._one_sample = feed.one_sample

    def build_metrics(self) -> None:
        """Create the states of the compiled metrics, unless they are there."""
        if not keras_model.metrics_are_built(self._model):
            keras_model.build_metrics(self._model, self._one_sample())

    @contextmanager
    def traced(self) -> Iterator[None]:
        """The test function of all ranks in the place of Keras' own, which is kept."""
        model = self._model
        self.build_metrics()
        compiled = (getattr(model, "_loss_tracker", None), self._weighted, self._collective)
        with _function_kept(model, "test_function", _TRACED, compiled), ExitStack() as undo:
            share = share_losses(model, self._collective)
            undo.callback(share_evaluation(model, share, weighted=self._weighted))
            undo.enter_context(losses_by_samples(model))
            yield


@contextmanager
def _function_kept(model: Any, name: str, kept: str, traced_for: tuple[Any, ...]
                   ) -> Iterator[None]:
    """A function of Keras that is traced for all ranks, and found again the next time."""
    known = model.__dict__.get(kept)
    theirs = getattr(model, name)
    setattr(model, name, None)
    if known is not None and known.value[0] == traced_for:
        setattr(model, name, known.value[1])
    try:
        yield
    finally:
        keras_seam.set_on_instance(model, kept, Hidden((traced_for, getattr(model, name))))
        setattr(model, name, theirs)


def evaluate(model: Any, feed: Feed, session: Session, arguments: Mapping[str, Any]) -> Any:
    """Evaluate a compiled model on all ranks. Every rank, with the same data.

    Args:
        model: A compiled model, the same on all ranks.
        feed: The data.
        session: This rank.
        arguments: Those of Keras' `evaluate` beside the data.

    Returns:
        What Keras' `evaluate` returns, over all samples; equal on all ranks.

    Raises:
        TrainingError: A metric cannot be merged over ranks, or the ranks hold different models.
    """
    collective = session.collective
    with session.progress.phase("evaluating"):
        evaluation = Evaluation(model, feed, session)
        evaluation.build_metrics()
        check_same_model(collective, model)
        refuse_unmergeable(collective, model)
        results = model._get_metrics_result_or_logs

        def figures(logs: Any) -> dict[str, Any]:
            session.progress.advance("the end of the evaluation")
            return merged_logs(collective, model, logs)
        keras_seam.set_on_instance(model, "_get_metrics_result_or_logs", figures)
        try:
            with evaluation.traced():
                return keras.Model.evaluate(model, evaluation.data, **arguments)
        finally:
            keras_seam.restore_method(model, "_get_metrics_result_or_logs", results)


@contextmanager
def losses_by_samples(model: Any) -> Iterator[None]:
    """While it is entered, losses of single outputs are means over samples, not over batches.

    Keras weights a batch by its samples only where their number is known before it runs.
    """
    compiled = getattr(model, "_compile_loss", None)
    if compiled is None:
        yield
        return
    undo = keras_model.weight_losses_by_samples(compiled)
    try:
        yield
    finally:
        undo()


def predict(model: Any, feed: Feed, session: Session, arguments: Mapping[str, Any]) -> Any:
    """Predict with what was given to Keras' `predict`, on all ranks. Every rank, same data.

    Args:
        model: A model, the same on all ranks.
        feed: The data.
        session: This rank.
        arguments: Those of Keras' `predict` beside the data.

    Returns:
        What Keras' `predict` returns, on every rank.

    Raises:
        TrainingError: The ranks hold different models.
    """
    with session.progress.phase("predicting"):
        check_same_model(session.collective, model)
        data = feed.evaluation()
        sizes: list[Any] = []
        with (_function_kept(model, "predict_function", _PREDICTED,
                             (feed.weighted, session.collective)),
              _counted(model, sizes, weighted=feed.weighted)):
            mine = keras.Model.predict(model, data, **arguments)
        own = np.concatenate([np.asarray(part) for part in sizes])
        counts = np.stack(session.collective.gather_objects(own))
        # Batch after batch the parts of all ranks: where each rank's samples are among all.
        ranks = np.repeat(np.tile(np.arange(len(counts)), counts.shape[1]), counts.T.reshape(-1))
        places = np.concatenate([np.flatnonzero(ranks == rank) for rank in range(len(counts))])
        # Where a rank had no sample in a batch it made a prediction, which does not count.
        kept = np.repeat(own > 0, np.maximum(own, 1))
        return _together(mine, np.argsort(places), session, kept)


@contextmanager
def _counted(model: Any, sizes: list[Any], *, weighted: bool) -> Iterator[None]:
    """A predict function that is given pairs `(weight, batch)` and notes the samples of each."""
    original = model.predict_step

    def predict_step(data: Any) -> Any:
        weight, batch = data if weighted else (None, data)
        first = next(v for v in tf.nest.flatten(batch) if v is not None)
        count = tf.shape(first, tf.int64)[0]
        if weighted:
            count = tf.where(tf.convert_to_tensor(weight) > 0, count, 0)
        return {"outputs": original(batch), "count": count[None]}

    keras_seam.set_on_instance(model, "predict_step", predict_step)
    try:
        model.make_predict_function()
        traced: Callable[[Any], Any] = model.predict_function

        def outputs_alone(data: Any) -> Any:
            found = traced(data)
            sizes.append(found["count"])
            return found["outputs"]
        model.predict_function = outputs_alone
        try:
            yield
        finally:
            model.predict_function = traced
    finally:
        keras_seam.restore_method(model, "predict_step", original)


def predict_source(model: Any, source: Source | StreamSource, batch_per_rank: int,
                   session: Session, arguments: Mapping[str, Any]) -> Any:
    """Predict with samples that hvdtrain reads, on all ranks. Every rank, with the same source.

    Args:
        model: A model, the same on all ranks.
        source: The data.
        batch_per_rank: Integer, samples per batch on each rank.
        session: This rank.
        arguments: Those of Keras' `predict` beside the data.

    Returns:
        What `model.predict` gives: numpy arrays of shape `(samples, ...)` in the order of the
        data, on every rank. Of files, and of a stream that is made for each rank, the shares of
        the ranks follow each other.
    """
    rank, size = session.world.rank, session.world.size
    if isinstance(source, StreamSource):
        source.count_everywhere(session.collective)
        own = source.count(rank, size)
        dataset = (source.batches(rank, size, batch_per_rank) if own
                   else tf.data.Dataset.from_tensors(source.first()))
        share = ready(dataset.apply(tf.data.experimental.assert_cardinality(
            max(1, -(-own // batch_per_rank)))), autotune=is_tuned(dataset))
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
        mine = keras.Model.predict(model, share, **arguments)
        made = max(1, own)
        return _together(mine, order, session, np.arange(made) < own)


def rows_of(model: Any, samples: int, rank: int, size: int, batch: int) -> np.ndarray[Any, Any]:
    """The samples of one rank, in order.

    Of a stateful model those that follow the ones of the batch before, as in one process with
    the batches of all ranks; else a contiguous share.
    """
    stateful = any(getattr(layer, "stateful", False) for layer in model._flatten_layers())
    return (evaluation_rows_by_step(samples, rank, size, batch) if stateful
            else evaluation_rows(samples, rank, size))


def _together(mine: Any, order: np.ndarray[Any, Any], session: Session,
              kept: np.ndarray[Any, Any]) -> Any:
    """The predictions of all ranks in the order of the data. All ranks.

    Args:
        mine: What Keras' `predict` has given on this rank.
        order: int64 array, where each sample of all is among those of rank 0, 1, ...
        session: This rank.
        kept: Boolean array, which of this rank's count.
    """
    if any(len(np.shape(part)) == 0 or len(part) != len(kept) for part in tf.nest.flatten(mine)):
        raise DataError(
            "The model predicts something else than a row for each sample, which cannot be put "
            "together over ranks. Predict on one rank: with hvdtrain.alone(): "
            "keras.Model.predict(model, x).")
    flat = [_everyone(np.asarray(part)[kept], f"hvdtrain.predict.{number}", session)[order]
            for number, part in enumerate(tf.nest.flatten(mine))]
    return tf.nest.pack_sequence_as(mine, flat)


def _everyone(part: np.ndarray[Any, Any], name: str, session: Session) -> np.ndarray[Any, Any]:
    if session.collective.size == 1:
        return part
    tensor = tf.convert_to_tensor(part)
    wire = tensor if tensor.dtype in _WIRE else tf.cast(tensor, tf.float32)
    gathered = session.collective.allgather(wire, name=name)
    return np.asarray(tf.cast(gathered, tensor.dtype))

"""`evaluate` and `predict` on all ranks: the figures and predictions of one process.

Each rank takes a share of the samples; none is repeated or left out, however they divide. States
 of metrics are merged before a result is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.file_shares import FileShares, share_dataset
from hvdtrain.data.pipeline import evaluation_dataset, ready, training_dataset
from hvdtrain.data.shard import ShardPlan, evaluation_rows, evaluation_rows_by_step
from hvdtrain.data.source import Source, as_source, check_source
from hvdtrain.data.stream import StreamSource, one_sample, stream_dataset
from hvdtrain.data.stream_order import is_tuned
from hvdtrain.data.stream_plan import StreamPlan
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.optim.keras_seam import Hidden
from hvdtrain.optim.shares import share_evaluation, share_losses
from hvdtrain.optim.state import check_same_model
from hvdtrain.session import Session, init
from hvdtrain.train.metrics import merged_logs, refuse_unmergeable

_WIRE = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_TRACED = "_hvdtrain_traced"
"""The test function of all ranks, and what it was traced for."""


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
        evaluation = Evaluation(model, source, session, batch_per_rank)
        given = keras.callbacks.CallbackList(list(callbacks), model=model, verbose=0, epochs=1,
                                             steps=evaluation.steps)
        results = model._get_metrics_result_or_logs

        def figures(logs: Any) -> dict[str, Any]:
            session.progress.advance("the end of the evaluation")
            return merged_logs(collective, model, logs)
        keras_seam.set_on_instance(model, "_get_metrics_result_or_logs", figures)
        try:
            return evaluation.run(given)
        finally:
            keras_seam.restore_method(model, "_get_metrics_result_or_logs", results)


class Evaluation:
    """This rank's part of an evaluation, as often as it is run. Every rank.

    The ranks take the same steps, in each of which they have the samples of one batch of one
    process. A rank that has none in the last one goes on with a sample that does not count.

    Args:
        model: A compiled model, whose metrics are built.
        source: The data. A stream has been counted.
        session: This rank.
        batch: Integer, samples per batch on each rank.
    """

    def __init__(self, model: Any, source: Source | StreamSource, session: Session,
                 batch: int) -> None:
        self._model = model
        self._collective = session.collective
        rank, size = session.world.rank, session.world.size
        if isinstance(source, StreamSource):
            plan = StreamPlan(counts=source.counts, rank=rank, batch_per_rank=batch,
                              growth=1)
            self.steps, self._weighted = plan.steps, plan.uneven
            dataset = (share_dataset(source.share(rank, size), plan, epochs=1)
                       if isinstance(source, FileShares) else
                       stream_dataset(source, plan, epochs=1))
        else:
            shards = ShardPlan(samples=len(source), rank=rank, size=size, batch_per_rank=batch,
                               shuffle=False, remainder="join", for_evaluation=True)
            self.steps, self._weighted = shards.steps, shards.uneven
            dataset = training_dataset(source, shards, epochs=1)
        self._dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.steps))

    def run(self, callbacks: Any) -> dict[str, Any]:
        """Evaluate as Keras does, with its calls of callbacks; the figures of all ranks.

        Args:
            callbacks: A `keras.callbacks.CallbackList`.
        """
        with self._traced():
            return dict(self._model.evaluate(self._dataset, verbose=0, callbacks=callbacks,
                                             return_dict=True))

    @contextmanager
    def _traced(self) -> Iterator[None]:
        """The test function of all ranks in the place of Keras' own, which is kept."""
        model = self._model
        compiled = (getattr(model, "_loss_tracker", None), self._weighted)
        known = model.__dict__.get(_TRACED)
        theirs, model.test_function = model.test_function, None
        if known is not None and known.value[0] == compiled:
            model.test_function = known.value[1]
        share = share_losses(model, self._collective)
        with ExitStack() as undo:
            undo.callback(share_evaluation(model, share, weighted=self._weighted))
            undo.enter_context(losses_by_samples(model))
            try:
                yield
            finally:
                keras_seam.set_on_instance(
                    model, _TRACED, Hidden((compiled, model.test_function)))
                model.test_function = theirs


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


def rows_of(model: Any, samples: int, rank: int, size: int, batch: int) -> np.ndarray[Any, Any]:
    """The samples of one rank, in order.

    Of a stateful model those that follow the ones of the batch before, as in one process with
    the batches of all ranks; else a contiguous share.
    """
    stateful = any(getattr(layer, "stateful", False) for layer in model._flatten_layers())
    return (evaluation_rows_by_step(samples, rank, size, batch) if stateful
            else evaluation_rows(samples, rank, size))


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

"""`evaluate` and `predict` on all ranks: the figures and predictions of one process.

Each rank takes a contiguous share of the samples; none is repeated or left out, however they
divide. States of metrics are merged before a result is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.pipeline import evaluation_dataset
from hvdtrain.data.shard import evaluation_rows
from hvdtrain.data.source import Source, as_source, check_source
from hvdtrain.data.stream import StreamSource, one_sample
from hvdtrain.optim import keras_seam
from hvdtrain.session import Session, init
from hvdtrain.train.metrics import merged_results, refuse_unmergeable

_WIRE = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def evaluate(model: Any, data: Source | StreamSource | Any, *, batch_per_rank: int = 32,
             session: Session | None = None) -> dict[str, float]:
    """Evaluate a compiled model on all ranks. Every rank must call it, with the same data.

    Args:
        model: A compiled `keras.Model`, the same on all ranks.
        data: A `Source`, a `StreamSource`, what `by_file` returns, or arrays `(x, y)` or
            `(x, y, sample_weight)`.
        batch_per_rank: Integer, samples per batch on each rank.
        session: Defaults to that of `hvdtrain.init()`.

    Returns:
        Names and values of the loss and the metrics, over all samples; equal on all ranks.

    Raises:
        DataError: The data cannot be used.
        TrainingError: A metric cannot be merged over ranks.
    """
    session = session or init()
    source = as_source(data, "evaluation")
    check_source(source, streams=True)
    if isinstance(source, StreamSource):
        source.count_everywhere(session.collective)
    if not keras_seam.metrics_are_built(model):
        keras_seam.build_metrics(model, one_sample(source))
    with session.progress.phase("evaluating"):
        evaluate_share(model, share_of(source, session, batch_per_rank))
        refuse_unmergeable(session.collective, model)
        return merged_results(session.collective, model)


def share_of(source: Source | StreamSource, session: Session, batch: int) -> Any | None:
    """Batches of this rank's share of the samples; None where it has none."""
    rank, size = session.world.rank, session.world.size
    if isinstance(source, StreamSource):
        steps = -(-source.count(rank, size) // batch)
        dataset = source.batches(rank, size, batch)
        return dataset.apply(tf.data.experimental.assert_cardinality(steps)) if steps else None
    rows = evaluation_rows(len(source), rank, size)
    return evaluation_dataset(source, rows, batch) if len(rows) else None


def evaluate_share(model: Any, share: Any | None) -> None:
    """Leave this rank's share of the samples in the states of the metrics. Every rank."""
    if share is None:
        model.reset_metrics()
    else:
        model.evaluate(share, verbose=0)


def predict(model: Any, data: Source | Any, *, batch_per_rank: int = 32,
            session: Session | None = None) -> Any:
    """Predict on all ranks. Every rank must call it, with the same data.

    Args:
        model: A `keras.Model`, the same on all ranks.
        data: A `Source`, or arrays `x`, `(x,)` or `(x, y)`.
        batch_per_rank: Integer, samples per batch on each rank.
        session: Defaults to that of `hvdtrain.init()`.

    Returns:
        What `model.predict` gives: numpy arrays of shape `(samples, ...)` in the order of the
        data, on every rank.

    Raises:
        DataError: The data cannot be used.
    """
    session = session or init()
    source = as_source(data, "prediction")
    check_source(source)
    rows = evaluation_rows(len(source), session.world.rank, session.world.size)
    # A rank without samples computes one, to know the shapes, and sends none of it.
    used = rows if len(rows) else np.zeros(1, np.int64)
    with session.progress.phase("predicting"):
        mine = model.predict(evaluation_dataset(source, used, batch_per_rank), verbose=0)
        flat = [_everyone(np.asarray(part)[:len(rows)], f"hvdtrain.predict.{number}", session)
                for number, part in enumerate(tf.nest.flatten(mine))]
    return tf.nest.pack_sequence_as(mine, flat)


def _everyone(part: np.ndarray[Any, Any], name: str, session: Session) -> np.ndarray[Any, Any]:
    if session.collective.size == 1:
        return part
    tensor = tf.convert_to_tensor(part)
    wire = tensor if tensor.dtype in _WIRE else tf.cast(tensor, tf.float32)
    gathered = session.collective.allgather(wire, name=name)
    return np.asarray(tf.cast(gathered, tensor.dtype))

"""Metrics, evaluation and prediction on all ranks, with the results of one process.

Each rank has a share, no sample repeated or left out. States of metrics are summed, then computed
once. This holds for states that are sums (means, accuracies, AUC, confusion matrices, ...). A
metric with another state defines how it is merged:

    class Largest(keras.metrics.Metric):
        def merge_states(self, states):
            # for each rank a list with the value of each of `self.variables`
            return [np.max([own[0] for own in states], axis=0)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Array, Collective
from hvdtrain.errors import DataError, RanksDifferError, TrainingError
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.optim.keras_seam import Hidden, hooked
from hvdtrain.optim.sample_weights import weigh_evaluation, weigh_losses
from hvdtrain.optim.state import check_same_model
from hvdtrain.session import Session
from hvdtrain.train.feed import Feed

States = tuple[tuple[float, ...], ...]
_WIRE = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def build_metrics(model: Any, feed: Feed) -> None:
    """Create the states of the compiled metrics, if absent."""
    if not keras_model.metrics_are_built(model):
        keras_model.build_metrics(model, feed.one_sample())


@contextmanager
def evaluating(model: Any, feed: Feed, collective: Collective) -> Iterator[None]:
    """While entered, the test function of all ranks replaces Keras' own, which is kept."""
    build_metrics(model, feed)
    compiled = (getattr(model, "_loss_tracker", None), feed.weighted, collective,
                keras_model.weights_key(model))
    with (_function_kept(model, "test_function", compiled),
          weigh_evaluation(model, weigh_losses(model, collective), weighted=feed.weighted),
          keras_model.losses_by_samples(model)):
        yield


@contextmanager
def _function_kept(model: Any, name: str, traced_for: tuple[Any, ...]) -> Iterator[None]:
    """Trace one of Keras' functions for all ranks, and reuse it for the same `traced_for`."""
    kept, theirs = f"_hvdtrain_{name}", getattr(model, name)
    known = model.__dict__.get(kept)
    setattr(model, name, known.value[1] if known and known.value[0] == traced_for else None)
    try:
        yield
    finally:
        keras_seam.set_on_instance(model, kept, Hidden((traced_for, getattr(model, name))))
        setattr(model, name, theirs)


def evaluate(model: Any, feed: Feed, session: Session, arguments: Mapping[str, Any]) -> Any:
    """Keras' `evaluate` with these arguments, over the samples of all ranks. All ranks."""
    collective = session.collective

    def figures(_: Any, logs: Any) -> dict[str, Any]:
        session.progress.advance("the end of the evaluation")
        return merged_logs(collective, model, logs)
    with session.progress.phase("evaluating"):
        data = feed.evaluation()
        build_metrics(model, feed)
        check_same_model(collective, model)
        refuse_unmergeable(collective, model)
        with (hooked(model, _get_metrics_result_or_logs=figures),
              evaluating(model, feed, collective)):
            return keras.Model.evaluate(model, data, **arguments)


def predict(model: Any, feed: Feed, session: Session, arguments: Mapping[str, Any]) -> Any:
    """Keras' `predict` with these arguments, in the order of the data. All ranks."""
    with session.progress.phase("predicting"):
        check_same_model(session.collective, model)
        data = feed.evaluation()
        sizes: list[Any] = []
        with (_function_kept(model, "predict_function", (
                feed.weighted, session.collective, keras_model.weights_key(model))),
              _counted(model, sizes, weighted=feed.weighted)):
            mine = keras.Model.predict(model, data, **arguments)
        own = np.concatenate([np.asarray(part) for part in sizes])
        places = feed.places(np.stack(session.collective.gather_objects(own)))
        # A rank without a sample in a batch made a prediction, which does not count.
        kept = np.repeat(own > 0, np.maximum(own, 1))
        return _together(mine, np.argsort(places, kind="stable"), kept, session.collective)


@contextmanager
def _counted(model: Any, sizes: list[Any], *, weighted: bool) -> Iterator[None]:
    """A predict function that is given pairs `(weight, batch)` and notes each batch's samples."""
    def predict_step(original: Any, data: Any) -> Any:
        weight, batch = data if weighted else (None, data)
        first = next(v for v in tf.nest.flatten(batch) if v is not None)
        count = tf.shape(first, tf.int64)[0]
        if weighted:
            count = tf.where(tf.convert_to_tensor(weight) > 0, count, 0)
        return {"outputs": original(batch), "count": count[None]}

    with hooked(model, predict_step=predict_step):
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


def _together(mine: Any, order: Array, kept: Array,
              collective: Collective) -> Any:
    """All ranks' predictions that count (`kept`), rank after rank, then put in `order`."""
    flat = tf.nest.flatten(mine)
    if any(len(np.shape(part)) == 0 or len(part) != len(kept) for part in flat):
        raise DataError(
            "The model predicts something else than a row for each sample, which cannot be put "
            "together over ranks. Predict on one rank: with hvdtrain.alone(): "
            "keras.Model.predict(model, x).")
    return tf.nest.pack_sequence_as(mine, [
        _everyone(np.asarray(part)[kept], f"hvdtrain.predict.{number}", collective)[order]
        for number, part in enumerate(flat)])


def _everyone(part: Array, name: str, collective: Collective) -> Array:
    if collective.size == 1:
        return part
    tensor = tf.convert_to_tensor(part)
    wire = tensor if tensor.dtype in _WIRE else tf.cast(tensor, tf.float32)
    return np.asarray(tf.cast(collective.allgather(wire, name=name), tensor.dtype))


def _variables(model: Any) -> list[Any]:
    return list({id(v): v for metric in model.metrics for v in metric.variables}.values())


def _says_how(metric: Any) -> bool:
    return callable(getattr(metric, "merge_states", None))


def _values(metric: Any) -> list[Array]:
    return [np.asarray(v.numpy()) for v in metric.variables]


def refuse_unmergeable(collective: Collective, model: Any) -> None:
    """Refuse a metric whose state is no sum and that has no `merge_states`. All ranks."""
    # A state that is a sum is zero after `reset_state`. The states are left as they are.
    for metric in keras_model.leaf_metrics(model) if collective.size > 1 else ():
        if _says_how(metric):
            continue
        held = _values(metric)
        metric.reset_state()
        begins = _values(metric)
        for variable, value in zip(metric.variables, held, strict=True):
            variable.assign(value)
        if any(np.any(value != 0) for value in begins):
            raise TrainingError(
                f"The metric `{metric.name}` ({type(metric).__name__}) cannot be summed over "
                f"ranks: its state begins with {begins[0].reshape(-1)[0]}, not with zeros. Give "
                "it a method merge_states(self, states) that merges the states of all ranks "
                "(docs/training.md tells how).")


def merged_logs(collective: Collective, model: Any, logs: Any, *,
                metrics: Collective | None = None) -> dict[str, Any]:
    """Replace the logs of this rank's last step by the figures of all ranks. All ranks.

    Metrics are over all samples if the step returns them; other figures of a `train_step` or
    `test_step` are means over the ranks that have them. `logs` is empty on a
    rank without a step; `metrics` sums the metrics if `collective` does not.
    """
    figures = as_figures(logs or {})
    # A step may return a loss under a metric's name without updating the metric. As Keras: the
    # metrics if the names are the same, else what the step returns.
    own = as_figures(model.get_metrics_result()) if keras_model.has_own_step(model) else figures
    by_itself = [name for name, value in figures.items()
                 if name not in own or not np.allclose(value, own[name], 1e-4, 1e-6, True)]
    summing, mine = metrics or collective, (figures, by_itself)
    states, everyone = _merged(summing, model, mine) if summing.size > 1 else ([], [mine])
    with keras.StatelessScope(state_mapping=states):
        # Within the scope: a metric may give its variable as it is.
        merged = as_figures(tf.nest.map_structure(
            lambda value: value.value if keras_seam.is_variable(value) else value,
            model.get_metrics_result()))
    if summing is not collective:
        everyone = collective.gather_objects(mine)
    names = list(dict.fromkeys(name for theirs, _ in everyone for name in theirs))
    computed = [name for name in names if set(names) != set(merged)
                and all(name in odd for theirs, odd in everyone if name in theirs)]
    found = {name: value for name, value in merged.items()
             if (name in names and name not in computed) or not names}
    return found | {
        name: mean_of([theirs[name] for theirs, _ in everyone if name in theirs])
        for name in names if name not in found}


def result_of_all(collective: Collective, metric: Any, result: Callable[[], Any]) -> Any:
    """What `result()` of one metric gives with the states of all ranks. All ranks."""
    alone = SimpleNamespace(metrics=[metric])
    refuse_unmergeable(collective, alone)
    with keras.StatelessScope(state_mapping=_merged(collective, alone)[0]):
        return tf.nest.map_structure(tf.convert_to_tensor, result())


def mean_of(values: Sequence[Any]) -> Any:
    """The mean of numbers; of anything else the first rank's value."""
    return float(np.mean(values)) if all(isinstance(v, float) for v in values) else values[0]


def as_figures(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results of metrics as Keras passes them to callbacks: floats, and arrays of some metrics."""
    return {name: value if isinstance(value, (float, str)) else np.asarray(value)
            for name, value in keras_model.pythonify_logs(results).items()}


def merged_states(collective: Collective, model: Any) -> States:
    """The states of the metrics, summed over all ranks and equal on them. All ranks."""
    states = (_merged(collective, model)[0] if collective.size > 1 else
              [(v, v.numpy()) for v in _variables(model)])
    return tuple(tuple(np.asarray(value, np.float64).reshape(-1)) for _, value in states)


def restore_states(model: Any, states: Sequence[Sequence[float]], *, is_chief: bool) -> bool:
    """Continue from `merged_states`, on the chief; False if the model has other metrics."""
    variables = _variables(model)
    if [len(state) for state in states] != [int(np.prod(v.shape)) for v in variables]:
        return False
    if is_chief:
        for variable, values in zip(variables, states, strict=True):
            variable.assign(np.asarray(values).reshape(variable.shape).astype(
                keras.backend.standardize_dtype(variable.dtype)))
    return True


def _merged(collective: Collective, model: Any,
            beside: Any = None) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """The variables of the metrics with their merged values, and `beside` of every rank."""
    merging = [metric for metric in keras_model.leaf_metrics(model) if _says_how(metric)]
    apart = {id(v) for metric in merging for v in metric.variables}
    variables = _variables(model)
    summed = [v for v in variables if id(v) not in apart]
    arrays = [np.asarray(v.numpy(), np.float64) for v in summed]
    sizes, states, besides = zip(*collective.gather_objects((
        [a.size for a in arrays], [_values(metric) for metric in merging], beside)), strict=True)
    odd = next((r for r, theirs in enumerate(sizes) if theirs != sizes[0]
                or len(states[r]) != len(merging)), None)
    if odd is not None:
        raise RanksDifferError(
            f"Rank {odd} has other metrics than rank 0 ({len(sizes[odd])} state variables, "
            f"rank 0 has {len(sizes[0])}). Compile the same metrics on all ranks.")
    joined = np.concatenate([np.zeros(0), *(array.reshape(-1) for array in arrays)])
    total = collective.reduce([tf.constant(joined)], name="hvdtrain.metrics", op="sum")[0].numpy()
    values = {id(v): tf.cast(value, v.dtype) for position, metric in enumerate(merging)
              for v, value in zip(metric.variables, metric.merge_states(
                  [theirs[position] for theirs in states]), strict=True)}
    for variable, array, part in zip(
            summed, arrays, np.split(total, np.cumsum(sizes[0])), strict=False):
        values[id(variable)] = tf.cast(part.reshape(array.shape), variable.dtype)
    return [(variable, values[id(variable)]) for variable in variables], list(besides)

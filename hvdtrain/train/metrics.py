"""Metrics over all ranks: states are summed, then the result is computed once.

So the figures are those of one process that saw all samples, weighted by samples. It holds for
every metric whose state is a sum (means, accuracies, AUC, confusion matrices, ...). A metric with
another state says how it is merged:

    class Largest(keras.metrics.Metric):
        def merge_states(self, states):
            # for each rank a list with the value of each of `self.variables`
            return [np.max([own[0] for own in states], axis=0)]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.errors import RanksDifferError, TrainingError
from hvdtrain.optim import keras_model


def metric_variables(model: Any) -> list[Any]:
    """The state of all metrics of a compiled model, without duplicates."""
    found: dict[int, Any] = {}
    for metric in model.metrics:
        for variable in metric.variables:
            found.setdefault(id(variable), variable)
    return list(found.values())


def refuse_unmergeable(collective: Collective, model: Any) -> None:
    """Refuse a metric whose state is no sum and that does not say how it is merged. All ranks.

    A state that is a sum is nothing after `reset_state`. The states are left as they are.

    Raises:
        TrainingError: Naming the metric.
    """
    if collective.size == 1:
        return
    for metric in keras_model.leaf_metrics(model):
        if callable(getattr(metric, "merge_states", None)):
            continue
        held = [np.asarray(v.numpy()) for v in metric.variables]
        metric.reset_state()
        begins = [np.asarray(v.numpy()) for v in metric.variables]
        for variable, value in zip(metric.variables, held, strict=True):
            variable.assign(value)
        if any(np.any(value != 0) for value in begins):
            raise TrainingError(
                f"The metric `{metric.name}` ({type(metric).__name__}) cannot be summed over "
                f"ranks: its state begins with {begins[0].reshape(-1)[0]}, not with zeros. Give "
                "it a method merge_states(self, states) that merges the states of all ranks "
                "(docs/training.md tells how).")


def merged_results(collective: Collective, model: Any) -> dict[str, Any]:
    """The results of the model's metrics over the samples of all ranks. All ranks.

    Returns:
        A dictionary of floats (arrays of metrics that give one), equal on all ranks, e.g.
        `{"loss": 0.3, "accuracy": 0.9}`.
    """
    scope_values = _merged(collective, model) if collective.size > 1 else []
    with keras.StatelessScope(state_mapping=scope_values):
        # Within the scope: a metric may give its variable as it is.
        results = tf.nest.map_structure(
            lambda value: value.value if isinstance(value, keras.Variable) else value,
            model.get_metrics_result())
    return as_figures(results)


def merged_logs(collective: Collective, model: Any, logs: Any, *,
                metrics: Collective | None = None) -> dict[str, Any]:
    """The figures of all ranks in place of those of this rank's last step. All ranks.

    Args:
        collective: The collective of the run.
        model: A model whose metrics hold this rank's states.
        logs: What its last step has given; nothing of a rank that had none.
        metrics: What sums the metrics; defaults to `collective`.

    Returns:
        A dictionary, equal on all ranks: results of metrics over all samples, where the step
        gives them; of other figures, which a `train_step` or `test_step` has computed, the mean
        over the ranks that have them.
    """
    figures = as_figures(logs or {})
    # A step may give a loss of its own by the name of a metric, which it does not tell it. Keras
    # takes the metrics where they have the same names, else what the step gives.
    own = as_figures(model.get_metrics_result()) if keras_model.has_own_step(model) else figures
    by_itself = [name for name, value in figures.items()
                 if name not in own or not np.allclose(value, own[name], 1e-4, 1e-6, True)]
    merged = merged_results(metrics or collective, model)
    everyone = collective.gather_objects((figures, by_itself))
    names = list(dict.fromkeys(name for theirs, _ in everyone for name in theirs))
    computed = [name for name in names if set(names) != set(merged)
                and all(name in odd for theirs, odd in everyone if name in theirs)]
    found = {name: value for name, value in merged.items()
             if (name in names and name not in computed) or not names}
    for name in names:
        if name not in found:
            found[name] = mean_of([theirs[name] for theirs, _ in everyone if name in theirs])
    return found


def mean_of(values: Sequence[Any]) -> Any:
    """One figure of several ranks: the mean of numbers; of anything else what the first has."""
    return float(np.mean(values)) if all(isinstance(v, float) for v in values) else values[0]


def as_figures(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results of metrics as Keras gives them to callbacks.

    Returns:
        Floats, and arrays of metrics that give one; those of a metric that gives a dictionary
        beside the others.
    """
    return {name: value if isinstance(value, (float, str)) else np.asarray(value)
            for name, value in keras_model.pythonify_logs(results).items()}


def merged_states(collective: Collective, model: Any) -> tuple[tuple[float, ...], ...]:
    """The states of the metrics, summed over all ranks; equal on all of them. All ranks."""
    if collective.size == 1:
        return tuple(tuple(np.asarray(v.numpy(), np.float64).reshape(-1))
                     for v in metric_variables(model))
    return tuple(tuple(np.asarray(value, np.float64).reshape(-1))
                 for _, value in _merged(collective, model))


def restore_states(model: Any, states: Sequence[Sequence[float]], *, is_chief: bool) -> bool:
    """Go on from merged states: the chief holds them, the others begin from nothing.

    Returns:
        False, and nothing is done, where the model has other metrics.
    """
    variables = metric_variables(model)
    if [len(state) for state in states] != [int(np.prod(v.shape)) for v in variables]:
        return False
    if is_chief:
        for variable, values in zip(variables, states, strict=True):
            variable.assign(np.asarray(values).reshape(variable.shape).astype(
                keras.backend.standardize_dtype(variable.dtype)))
    return True


def _merged(collective: Collective, model: Any) -> list[tuple[Any, Any]]:
    """Each variable of the metrics, and its value over all ranks; in the order of the model."""
    own = [m for m in keras_model.leaf_metrics(model)
           if callable(getattr(m, "merge_states", None))]
    theirs = {id(v) for metric in own for v in metric.variables}
    variables = metric_variables(model)
    values = {id(v): value for v, value in
              _summed(collective, [v for v in variables if id(v) not in theirs])}
    for metric in own:
        states = collective.gather_objects([np.asarray(v.numpy()) for v in metric.variables])
        for variable, value in zip(metric.variables, metric.merge_states(states), strict=True):
            values[id(variable)] = tf.cast(value, variable.dtype)
    return [(variable, values[id(variable)]) for variable in variables]


def _summed(collective: Collective, variables: list[Any]) -> list[tuple[Any, Any]]:
    flat = [np.asarray(v.numpy(), np.float64).reshape(-1) for v in variables]
    sizes = collective.gather_objects([a.size for a in flat])
    if any(theirs != sizes[0] for theirs in sizes):
        odd = next(r for r, theirs in enumerate(sizes) if theirs != sizes[0])
        raise RanksDifferError(
            f"Rank {odd} has other metrics than rank 0 ({len(sizes[odd])} state variables, "
            f"rank 0 has {len(sizes[0])}). Compile the same metrics on all ranks.")
    joined = np.concatenate(flat) if flat else np.zeros(0)
    total = collective.reduce(
        [tf.constant(joined)], name="hvdtrain.metrics", op="sum")[0].numpy()
    out, start = [], 0
    for variable, part in zip(variables, flat, strict=True):
        value = total[start:start + part.size].reshape(variable.shape)
        out.append((variable, tf.cast(value, variable.dtype)))
        start += part.size
    return out

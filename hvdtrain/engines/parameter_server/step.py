"""`WorkerStep`: one batch on a worker, from the servers' values to gradients for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.engines.parameter_server import tf_seam
from hvdtrain.engines.parameter_server.keras_parts import Redirection
from hvdtrain.engines.parameter_server.parameters import Array, ServerParameters
from hvdtrain.engines.parameter_server.probe import ModelParts, forward
from hvdtrain.errors import ConfigError
from hvdtrain.optim.reducer import merge_rows
from hvdtrain.train.metrics import as_figures

_MOST_CONSTANT_BYTES = 1 << 30
"""Constants travel inside the function, whose message may have 2 GiB."""


class StateVector:
    """What a step changes without a gradient, such as BatchNormalization's statistics.

    All of it is one float64 vector on the first server, to which workers add their changes: none
    is lost, and the sum of a former value and its change is exact.

    Args:
        strategy: The strategy.
        variables: Of the model.
    """

    def __init__(self, strategy: Any, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        self._vector: Any = None
        if self._variables:
            with tf_seam.on_server(strategy, 0):
                self._vector = tf.Variable(self._joined(), dtype=tf.float64, trainable=False)

    def read(self) -> list[tuple[Any, Any]]:
        """Pairs of a variable and its value. In a function that a worker runs."""
        if self._vector is None:
            return []
        return list(zip(self._variables, self._split(self._vector.read_value()), strict=True))

    def change(self, before: Sequence[tuple[Any, Any]], scope: Any) -> Any:
        """How a step changed the values, as a float64 vector."""
        changes = [tf.cast(scope.get_current_value(v), tf.float64) - tf.cast(value, tf.float64)
                   for v, value in before]
        return (tf.concat([tf.reshape(c, [-1]) for c in changes], 0) if changes
                else tf.zeros([0], tf.float64))

    def add(self, change: Any) -> None:
        """Add a change, on the server."""
        if self._vector is not None:
            self._vector.assign_add(change, read_value=False)

    def pull(self) -> None:
        """Copy the values into the model."""
        if self._vector is not None:
            values = self._split(tf.constant(self._vector.numpy()))
            for variable, value in zip(self._variables, values, strict=True):
                variable.assign(value)

    def push(self) -> None:
        """Copy the model's values to the server."""
        if self._vector is not None:
            self._vector.assign(self._joined())

    def _joined(self) -> Array:
        return np.concatenate([np.asarray(v.numpy(), np.float64).reshape(-1)
                               for v in self._variables])

    def _split(self, vector: Any) -> list[Any]:
        parts = tf.split(vector, [int(np.prod(v.shape)) for v in self._variables])
        return [tf.cast(tf.reshape(part, v.shape), keras.backend.standardize_dtype(v.dtype))
                for v, part in zip(self._variables, parts, strict=True)]


class MetricStates:
    """The states of the metrics, which closures begin anew and the chief adds up.

    Right for every metric whose state is a sum, as in engine allreduce.

    Args:
        model: A model whose metrics are built.
        variables: Their states.
    """

    def __init__(self, model: Any, variables: Sequence[Any]) -> None:
        self._model = model
        self._variables = list(variables)
        model.reset_metrics()
        self._begin = [np.asarray(v.numpy()) for v in self._variables]

    def begin(self) -> list[Any]:
        """The states before the first batch, as tensors."""
        return [tf.constant(value) for value in self._begin]

    def pairs(self, states: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Pairs of a variable and its state."""
        return list(zip(self._variables, states, strict=True))

    def after(self, scope: Any) -> list[Any]:
        """The states after a batch."""
        return [tf.cast(scope.get_current_value(v), keras.backend.standardize_dtype(v.dtype))
                for v in self._variables]

    def gained(self, states: Sequence[Any]) -> Any:
        """What states hold more than at the beginning, as a float64 vector."""
        gains = [tf.reshape(tf.cast(state, tf.float64) - tf.cast(begin, tf.float64), [-1])
                 for state, begin in zip(states, self._begin, strict=True)]
        return tf.concat(gains, 0) if gains else tf.zeros([0], tf.float64)

    def total(self, gained: Array) -> tuple[tuple[float, ...], ...]:
        """The states after a sum of gains, as plain numbers per variable."""
        ends = np.cumsum([value.size for value in self._begin])[:-1]
        return tuple(tuple((part + begin.reshape(-1).astype(np.float64)).tolist())
                     for part, begin in zip(np.split(gained, ends), self._begin, strict=True))

    def gained_by(self, states: Sequence[Sequence[float]]) -> Array | None:
        """The inverse of `total`; None where the states are those of other metrics."""
        if [len(state) for state in states] != [value.size for value in self._begin]:
            return None
        parts = [np.asarray(state, np.float64) - begin.reshape(-1)
                 for state, begin in zip(states, self._begin, strict=True)]
        return np.concatenate(parts) if parts else self.nothing()

    def nothing(self) -> Array:
        """The gain of no batch."""
        return np.zeros(sum(value.size for value in self._begin))

    def results(self, gained: Array) -> dict[str, float]:
        """The figures after a sum of gains, e.g. `{"loss": 0.3, "accuracy": 0.9}`."""
        for variable, values in zip(self._variables, self.total(gained), strict=True):
            variable.assign(np.asarray(values).reshape(variable.shape).astype(
                keras.backend.standardize_dtype(variable.dtype)))
        found = self._model.get_metrics_result()
        self._model.reset_metrics()
        return as_figures(found)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What one batch gives."""

    dense: list[Any]
    """In the order of `ServerParameters.dense`."""
    rows: list[tuple[Any, Any]]
    """For each table: rows, without duplicates, and their gradients."""
    state_change: Any
    metrics: list[Any]


class WorkerStep:
    """Computes on a worker. Its methods are traced on the chief.

    Args:
        model: The model.
        parts: Its variables.
        parameters: On the servers.
        state: On the servers.
        metrics: Of the model.
    """

    def __init__(self, model: Any, parts: ModelParts, parameters: ServerParameters,
                 state: StateVector, metrics: MetricStates) -> None:
        self._model, self._parts = model, parts
        self._parameters, self._state, self._metrics = parameters, state, metrics
        self._constants = [(v, np.asarray(v.numpy())) for v in parts.constant]
        size = sum(value.nbytes for _, value in self._constants)
        if size > _MOST_CONSTANT_BYTES:
            raise ConfigError(
                f"The model has {size:,} bytes of variables that are not trained. Engine ps sends "
                f"them to the workers inside the step and takes {_MOST_CONSTANT_BYTES:,}. Use the "
                "engine allreduce.")

    def gradients(self, data: Any, number: Any, metrics: Sequence[Any]) -> Gradients:
        """Train on a batch, but for the update.

        Args:
            data: The batch.
            number: int64 tensor, tells it from every other batch of the run.
            metrics: States of the metrics before it.
        """
        dense, state = self._parameters.read(), self._state.read()
        read: list[tuple[Any, Any, Any]] = []
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            def lookup(layer: Any, rows: Any) -> Any:
                values = self._parameters.read_rows(layer, rows)
                tape.watch(values)
                read.append((layer, rows, values))
                return values
            tape.watch([value for _, value in dense])
            loss, scope = self._forward([*dense, *state], data, number, metrics, lookup,
                                        training=True)
        found = tape.gradient(loss, [value for _, value in dense] + [v for *_, v in read])
        rows = []
        for layer in self._parts.tables:
            own = [(used, tf.convert_to_tensor(gradient)) for (reader, used, _), gradient in zip(
                read, found[len(dense):], strict=True) if reader is layer]
            merged = merge_rows(tf.IndexedSlices(tf.concat([g for _, g in own], 0),
                                                 tf.concat([used for used, _ in own], 0)))
            rows.append((merged.indices, merged.values))
        return Gradients(dense=[tf.convert_to_tensor(g) for g in found[:len(dense)]], rows=rows,
                         state_change=self._state.change(state, scope),
                         metrics=self._metrics.after(scope))

    def evaluate(self, data: Any, metrics: Sequence[Any]) -> list[Any]:
        """Evaluate a batch; gives the states of the metrics after it."""
        _, scope = self._forward(
            [*self._parameters.read(), *self._state.read()], data, tf.constant(0, tf.int64),
            metrics, self._parameters.read_rows, training=False)
        return self._metrics.after(scope)

    def _forward(self, values: list[tuple[Any, Any]], data: Any, number: Any,
                 metrics: Sequence[Any], lookup: Any, *, training: bool) -> tuple[Any, Any]:
        constants = [(v, tf.constant(value)) for v, value in self._constants]
        return forward(
            self._model, [*values, *constants, *self._metrics.pairs(metrics)], data,
            Redirection(step=number, lookup=lookup, layers=self._parts.tables),
            training=training)

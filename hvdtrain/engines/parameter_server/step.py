"""One batch: gradients computed on a worker from the servers' values, applied on the servers.

`ServerOptimizer` is a copy of the user's optimizer over the servers' parameters. Slots lie beside
them and updates run there: only gradients are sent. The chief's own optimizer stays plain Keras and
gets the slots for saved files. Clipping needs whole gradients, so `clip` does it instead of the
copy: on the worker for one gradient (async), or on the servers for the mean (sync).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.engines.parameter_server import tf_seam
from hvdtrain.engines.parameter_server.keras_parts import Pairs, forward
from hvdtrain.engines.parameter_server.parameters import Array, ServerParameters
from hvdtrain.errors import ConfigError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.reducer import merge_rows
from hvdtrain.train.evaluate import as_figures

_MOST_CONSTANT_BYTES = 1 << 30  # constants are in the function's message, at most 2 GiB
_NOT_IN_COPY = {"clipnorm": None, "global_clipnorm": None, "clipvalue": None,
                "loss_scale_factor": None}


class StateVector:
    """What a step changes without a gradient, such as BatchNormalization's statistics."""
    # One float64 vector on the first server, to which workers add changes: exact, and none is lost.

    def __init__(self, strategy: Any, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        self._vector: Any = None
        if self._variables:
            with tf_seam.on_server(strategy, 0):
                self._vector = tf.Variable(self._joined(), dtype=tf.float64, trainable=False)

    def read(self) -> Pairs:
        """Pairs of a variable and its value. In a worker's function."""
        return [] if self._vector is None else self._split(self._vector.read_value())

    def add(self, change: Any) -> None:
        """Add the change of a step, on the server."""
        if self._vector is not None:
            self._vector.assign_add(change, read_value=False)

    def pull(self) -> None:
        """Copy the values into the model."""
        if self._vector is not None:
            for variable, value in self._split(tf.constant(self._vector.numpy())):
                variable.assign(value)

    def push(self) -> None:
        """Copy the model's values to the server."""
        if self._vector is not None:
            self._vector.assign(self._joined())

    def _joined(self) -> Array:
        return np.concatenate([np.asarray(v.numpy(), np.float64).reshape(-1)
                               for v in self._variables])

    def _split(self, vector: Any) -> Pairs:
        parts = tf.split(vector, [int(np.prod(v.shape)) for v in self._variables])
        return [(v, tf.cast(tf.reshape(part, v.shape), _dtype(v)))
                for v, part in zip(self._variables, parts, strict=True)]


class MetricStates:
    """Metric states: closures start from the initial ones, and the chief adds their gains.

    A *gain*, a float64 vector, is the state minus the initial one: right for all sums.
    """

    def __init__(self, model: Any, variables: Sequence[Any]) -> None:
        self._model = model
        self.variables = list(variables)
        model.reset_metrics()
        self._begin = [np.asarray(v.numpy()) for v in self.variables]
        self._flat = [value.reshape(-1).astype(np.float64) for value in self._begin]
        self.nothing = np.zeros(sum(value.size for value in self._begin))

    def begin(self) -> list[Any]:
        """The states before the first batch, as tensors."""
        return [tf.constant(value) for value in self._begin]

    def after(self, scope: Any) -> list[Any]:
        """The states after a batch."""
        return [tf.cast(scope.get_current_value(v), _dtype(v)) for v in self.variables]

    def gained(self, states: Sequence[Any]) -> Any:
        """The gain of states, as a tensor."""
        return _changes(states, self._begin)

    def total(self, gained: Array) -> tuple[tuple[float, ...], ...]:
        """The states after a gain, as numbers per variable."""
        ends = np.cumsum([value.size for value in self._flat])[:-1]
        return tuple(tuple((part + begin).tolist()) for part, begin in zip(
            np.split(gained, ends), self._flat, strict=True))

    def gained_by(self, states: Sequence[Sequence[float]]) -> Array | None:
        """The inverse of `total`; None for the states of other metrics."""
        if [len(state) for state in states] != [value.size for value in self._flat]:
            return None
        return np.concatenate([self.nothing[:0], *(
            state - begin for state, begin in zip(states, self._flat, strict=True))])

    def results(self, gained: Array) -> dict[str, float]:
        """The figures after a gain, such as `{"loss": 0.3, "accuracy": 0.9}`."""
        for variable, values in zip(self.variables, self.total(gained), strict=True):
            variable.assign(np.reshape(values, variable.shape).astype(_dtype(variable)))
        found = self._model.get_metrics_result()
        self._model.reset_metrics()
        return as_figures(found)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """One batch: `dense` as `ServerParameters.read` orders, `rows` distinct slices by table."""

    dense: list[Any]
    rows: list[Any]
    state_change: Any
    metrics: list[Any]


class WorkerStep:
    """Computes on a worker. Its methods are traced on the chief."""

    def __init__(self, model: Any, parameters: ServerParameters, state: StateVector,
                 metrics: MetricStates) -> None:
        self._model, self._parts = model, parameters.parts
        self._parameters, self._state, self._metrics = parameters, state, metrics
        self._constants = [(v, np.asarray(v.numpy())) for v in self._parts.constant]
        size = sum(value.nbytes for _, value in self._constants)
        if size > _MOST_CONSTANT_BYTES:
            raise ConfigError(
                f"The model has {size:,} bytes of variables that are not trained. Engine ps sends "
                f"them to the workers inside the step and takes {_MOST_CONSTANT_BYTES:,}. Use the "
                "engine allreduce.")

    def gradients(self, data: Any, number: Any, metrics: Sequence[Any]) -> Gradients:
        """Train on a batch but for the update; `metrics` are states before, `number` is unique."""
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
            rows.append(merge_rows(tf.IndexedSlices(
                tf.concat([g for _, g in own], 0), tf.concat([used for used, _ in own], 0),
                tf.constant(tuple(layer._embeddings.shape), tf.int64))))
        change = _changes([scope.get_current_value(v) for v, _ in state], [v for _, v in state])
        return Gradients(dense=[tf.convert_to_tensor(g) for g in found[:len(dense)]], rows=rows,
                         state_change=change, metrics=self._metrics.after(scope))

    def evaluate(self, data: Any, metrics: Sequence[Any]) -> list[Any]:
        """Evaluate a batch; gives the metrics' states after it."""
        _, scope = self._forward(
            [*self._parameters.read(), *self._state.read()], data, tf.constant(0, tf.int64),
            metrics, self._parameters.read_rows, training=False)
        return self._metrics.after(scope)

    def _forward(self, values: Pairs, data: Any, number: Any, metrics: Sequence[Any],
                 lookup: Any, *, training: bool) -> tuple[Any, Any]:
        constants = [(v, tf.constant(value)) for v, value in self._constants]
        states = zip(self._metrics.variables, metrics, strict=True)
        return forward(
            self._model, [*values, *constants, *states], data, number=number, lookup=lookup,
            layers=self._parts.tables, training=training)


class ServerOptimizer:
    """The optimizer over the holders, on the chief; `multiplier(updates)` scales the rate."""

    def __init__(self, strategy: Any, parameters: ServerParameters, model: Any,
                 multiplier: Callable[[Any], Any] | None) -> None:
        self._parameters, self._own = parameters, model.optimizer
        with tf_seam.on_server(strategy, 0):
            self.keras = _copy_of(self._own, **_NOT_IN_COPY)
            # Weight decay is excluded by the names of the user's variables.
            names = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
            if any(getattr(self._own, name, None) for name in names):
                self.keras._exclude_from_weight_decay = {
                    self.keras._var_key(holder.variable) for holder in parameters.holders
                    if not self._own._use_weight_decay(
                        parameters.parts.trained[holder.pieces[0].parameter])}
            self.keras.build(parameters.variables)
        iterations = self.keras._iterations.value

        def count(value: Any) -> Any:
            # Keras reads and writes, which loses updates when several workers do.
            iterations.assign_add(tf.cast(value, iterations.dtype))
            return iterations
        keras_seam.set_on_instance(self.keras._iterations, "assign_add", count)
        # One replica per worker: there is nothing to sum, and it would go through the chief.
        keras_seam.set_on_instance(self.keras, "_all_reduce_sum_gradients", lambda pairs: pairs)
        if multiplier is not None:
            keras_seam.replace_method(
                self.keras, "_get_current_learning_rate",
                lambda original: lambda: original() * multiplier(iterations))
        self._singles, self._slots = self._match(model.trainable_variables)
        self.push()

    def apply(self, gradients: Sequence[Any]) -> None:
        """Update from clipped gradients of all holders. In a replica context."""
        self.keras.apply(list(gradients), self._parameters.variables)

    def clip(self, gradients: Sequence[Any], devices: Sequence[str] | None = None) -> list[Any]:
        """Clip whole gradients like the user's optimizer, on their devices (default: here)."""
        # The rows of `tf.IndexedSlices` are distinct.
        own = self._own
        where: Sequence[str | None] = devices or [None] * len(gradients)
        scale = self._global_scale(gradients, where) if own.global_clipnorm else None

        def clipped(gradient: Any) -> Any:
            if own.clipnorm:
                return tf.clip_by_norm(gradient, own.clipnorm)
            if scale is not None:
                return _map(lambda g: g * tf.cast(scale, g.dtype), gradient)
            if own.clipvalue:
                return _map(lambda g: tf.clip_by_value(g, -own.clipvalue, own.clipvalue), gradient)
            return gradient
        out = []
        for gradient, device in zip(gradients, where, strict=True):
            with tf.device(device):
                out.append(clipped(gradient))
        return out

    def _global_scale(self, gradients: Sequence[Any], devices: Sequence[str | None]) -> Any:
        squares = []
        for gradient, device in zip(gradients, devices, strict=True):
            with tf.device(device):
                values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
                squares.append(tf.reduce_sum(tf.square(values)))
        norm, limit = tf.sqrt(tf.add_n(squares)), self._own.global_clipnorm
        # The formula of keras.src.optimizers.base_optimizer.clip_by_global_norm.
        return limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)

    def pull(self) -> None:
        """Copy the optimizer's state from the servers into the user's optimizer."""
        for mine, theirs in self._singles:
            theirs.assign(mine.value.numpy())
        for held, whole in self._slots:
            self._parameters.copy_out(held, whole)

    def push(self) -> None:
        """Copy the state of the user's optimizer to the servers."""
        for mine, theirs in self._singles:
            mine.value.assign(theirs.numpy())
        for held, whole in self._slots:
            self._parameters.copy_in(whole, held)

    def _match(self, trainable: Sequence[Any]) -> tuple[Any, Any]:
        """Pairs of single variables, and of slots by holder and by parameter."""
        here, mine = _slots_of(self.keras, self._parameters.variables)
        there, theirs = _slots_of(self._own, trainable)
        if not here.keys() <= there.keys() or len(mine) != len(theirs):
            raise ConfigError(f"The state of {type(self._own).__name__} has another form than the "
                              "one of a new one. Compile the model with a new optimizer.")
        numbers = {id(v): number for number, v in enumerate(trainable)}
        own = [numbers[id(v)] for v in self._parameters.parts.trained]
        return list(zip(mine, theirs, strict=True)), [
            (held, {i: there[name][number] for i, number in enumerate(own)
                    if number in there[name]}) for name, held in here.items()]


def _slots_of(optimizer: Any, variables: Sequence[Any]
              ) -> tuple[dict[str, dict[int, Any]], list[Any]]:
    """The slots of a built optimizer by variable number, and the rest: a counter, the rate, ..."""
    slots = {name: {number: v for number, v in enumerate(values) if v is not None}
             for name, values in keras_seam.slots(optimizer, len(variables)).items()
             if all(v is None or v.shape == of.shape
                    for v, of in zip(values, variables, strict=True))}
    inside = {id(v) for values in slots.values() for v in values.values()}
    return slots, [v for v in optimizer.variables if id(v) not in inside]


def _copy_of(optimizer: Any, **changes: Any) -> Any:
    """A new, unbuilt optimizer with the same settings; ConfigError if the class refuses them."""
    try:
        return type(optimizer).from_config({**optimizer.get_config(), **changes})
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be made again from its get_config(): {error}. "
            "Engine ps makes one on the servers: give the class get_config() and "
            "from_config().") from error


def _dtype(variable: Any) -> str:
    return str(keras.backend.standardize_dtype(variable.dtype))


def _changes(after: Sequence[Any], before: Sequence[Any]) -> Any:
    parts = [tf.reshape(tf.cast(a, tf.float64) - tf.cast(b, tf.float64), [-1])
             for a, b in zip(after, before, strict=True)]
    return tf.concat(parts, 0) if parts else tf.zeros([0], tf.float64)


def _map(function: Callable[[Any], Any], gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices,
                                gradient.dense_shape)
    return function(gradient)

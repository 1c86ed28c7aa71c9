"""What one training step does to a model's variables, found by tracing one.

Nothing runs: the step is traced once with placeholders for all variables, and the graph tells
which parameters get a gradient, which tables are read only row by row, and which other variables
(BatchNormalization's statistics) a step changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.engines.parameter_server import keras_parts
from hvdtrain.errors import ConfigError

_SMALL = 1024
"""So many numbers are cheap enough to be read in every step."""


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """The variables of a model by how a step uses them."""

    trained: tuple[Any, ...]
    """Get a gradient; in the order of `model.trainable_variables`."""
    tables: tuple[Any, ...]
    """Layers whose table is read row by row; the tables are among `trained`."""
    state: tuple[Any, ...]
    """Not trained, but changed by a step, or small enough that a callback's change can count."""
    constant: tuple[Any, ...]
    """Neither."""
    metrics: tuple[Any, ...]
    """The states of the metrics."""

    def is_table(self, variable: Any) -> bool:
        """Whether a trained variable is the table of one of `tables`."""
        return _is_among(variable, [layer._embeddings for layer in self.tables])


def forward(model: Any, values: Sequence[tuple[Any, Any]], data: Any,
            redirection: keras_parts.Redirection, *, training: bool) -> tuple[Any, Any]:
    """Run a model on tensors in place of its variables, and its loss and metrics.

    Args:
        model: A built, compiled model.
        values: Pairs of a variable of the model and the tensor in its place.
        data: `x`, `(x, y)` or `(x, y, sample_weight)`, tensors.
        redirection: Of seeds and tables.
        training: Boolean, as for `model.__call__`.

    Returns:
        The loss, and the scope, which knows the values that variables got.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with keras_parts.redirected(redirection), keras.StatelessScope(
            state_mapping=list(values), collect_losses=True,
            initialize_variables=False) as scope:
        options = {"training": training} if model._call_has_training_arg else {}
        predicted = model(x, **options)
        loss = model._compute_loss(x=x, y=y, y_pred=predicted, sample_weight=sample_weight,
                                   training=training)
        first = next(i for i in tf.nest.flatten(x) if i is not None)
        model._loss_tracker.update_state(loss, sample_weight=tf.shape(first)[0])
        model.compute_metrics(x, y, predicted, sample_weight=sample_weight)
    return loss, scope


def take_apart(model: Any, signature: Any, *, sparse: bool) -> ModelParts:
    """Trace one step of a built, compiled model.

    Args:
        model: The model.
        signature: Structure of `tf.TensorSpec` of one sample, as `Source.signature`.
        sparse: Boolean; False treats embeddings as any other parameter.

    Raises:
        ConfigError: No variable gets a gradient.
    """
    trace = _Trace(model, signature)
    layers = keras_parts.embedding_layers(model) if sparse else []
    trace.run(layers)
    while len(left := [layer for layer in layers if trace.is_row_by_row(layer)]) < len(layers):
        layers = left
        trace.run(layers)
    tables = [layer._embeddings for layer in layers]
    trained = tuple(v for v, has in zip(trace.trainable, trace.has_gradient, strict=True)
                    if has or _is_among(v, tables))
    if not trained:
        raise ConfigError("No variable of the model gets a gradient from its loss. Check the loss "
                          "and which layers are trainable.")
    kept: dict[bool, list[Any]] = {False: [], True: []}
    unused = [v for v in trace.trainable if not _is_among(v, trained)]
    for variable, changed in [*((v, False) for v in unused),
                              *zip(trace.others, trace.changes, strict=True)]:
        kept[changed or math.prod(variable.shape) <= _SMALL].append(variable)
    return ModelParts(trained=trained, tables=tuple(layers), metrics=tuple(trace.metrics),
                      state=tuple(kept[True]), constant=tuple(kept[False]))


class _Trace:
    """One step with placeholders for all variables."""

    def __init__(self, model: Any, signature: Any) -> None:
        generators = [generator.state for generator in keras_parts.seed_generators(model)]
        self._model = model
        self._batch = tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), signature)
        self.trainable = list(model.trainable_variables)
        self.others = [v for v in model.non_trainable_variables if not _is_among(v, generators)]
        self.metrics = list(model.metrics_variables)
        self.has_gradient: list[bool] = []
        self.changes: list[bool] = []
        self._inputs: list[Any] = []
        self._rows: set[int] = set()
        self._layers: list[Any] = []

    def run(self, layers: list[Any]) -> None:
        """Trace, with the tables of `layers` read row by row."""
        self._layers, self._rows = layers, set()
        specs = [tf.TensorSpec(v.shape, keras.backend.standardize_dtype(v.dtype))
                 for v in [*self.trainable, *self.others, *self.metrics]]
        tf.function(self._step, autograph=False).get_concrete_function(specs, self._batch)

    def is_row_by_row(self, layer: Any) -> bool:
        """Whether the step used rows of the layer's table, and nothing else of it."""
        table = next((value for v, value in zip(self.trainable, self._inputs, strict=True)
                      if v is layer._embeddings), None)
        return table is not None and id(layer) in self._rows and not table.consumers()

    def _step(self, values: list[Any], data: Any) -> None:
        self._inputs = values[:len(self.trainable)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            def lookup(layer: Any, numbers: Any) -> Any:
                self._rows.add(id(layer))
                return tf.zeros([tf.size(numbers), layer.output_dim], layer.variable_dtype)
            tape.watch(self._inputs)
            everything = [*self.trainable, *self.others, *self.metrics]
            loss, scope = forward(
                self._model, list(zip(everything, values, strict=True)), data,
                keras_parts.Redirection(step=tf.constant(0, tf.int64), lookup=lookup,
                                        layers=self._layers), training=True)
        # Before the gradient, which reads the shapes of what it is asked for.
        unused = [not value.consumers() for value in self._inputs]
        self.has_gradient = [not u and g is not None for u, g in zip(
            unused, tape.gradient(loss, self._inputs), strict=True)]
        self._refuse_assignments(scope)
        others = values[len(self.trainable):len(self.trainable) + len(self.others)]
        self.changes = [scope.get_current_value(v) is not value
                        for v, value in zip(self.others, others, strict=True)]

    def _refuse_assignments(self, scope: Any) -> None:
        """What a layer assigns to a trained variable in a step is not a gradient."""
        for variable, value in zip(self.trainable, self._inputs, strict=True):
            if scope.get_current_value(variable) is not value:
                raise ConfigError(
                    f"A step assigns {variable.path}, which is trained (as SpectralNormalization "
                    "does). Engine ps moves gradients only. Use the engine allreduce "
                    "(--engine allreduce).")


def _is_among(variable: Any, variables: Sequence[Any]) -> bool:
    return any(variable is other for other in variables)

"""A model taken apart: what a step on a worker needs, with the private parts of Keras for it.

The model runs on tensors in place of its variables (`keras.StatelessScope`). What would still reach
the chief's variables is redirected while a step is traced: seed generators get a seed from the
step's number, so that no two batches share a mask, and a batch computed again has the same;
embeddings read only the rows that they use; an optimizer's counter is handled in `step`.

`take_apart` traces a step with placeholders and runs nothing: the graph shows which parameters get
a gradient, which tables are read by row, and which other variables (statistics) a step changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import ConfigError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.state import SEED_STRIDE

Pairs = Sequence[tuple[Any, Any]]  # variables, each with its tensor

_SMALL = 1024  # numbers that are cheap enough to read in every step
_INSTEAD = "Use the engine allreduce (--engine allreduce)."


def check_model(model: Any) -> None:
    """Refuse what a step on a worker cannot do as Keras does; the ConfigError names an engine."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ConfigError("The model is not compiled. Call model.compile(optimizer, loss) in the "
                          "function that makes it.")
    keras_seam.check_keras()
    for is_so, why in (
            (keras_seam.is_loss_scale(optimizer),
             "Engine ps does not scale losses (mixed_float16). Use mixed_bfloat16, which needs no "
             "scaling."),
            (keras_seam.is_multi(optimizer),
             "Engine ps takes one optimizer, not a MultiOptimizer."),
            (type(model).train_step is not keras.Model.train_step,
             f"{type(model).__name__} has a train_step of its own, which engine ps cannot take "
             "apart. Override compute_loss or compute_metrics."),
            (getattr(optimizer, "ema_overwrite_frequency", None),
             "Engine ps does not overwrite the weights by their average within the training "
             "(ema_overwrite_frequency). Leave it out: use_ema alone sets them at the end."),
            (getattr(optimizer, "gradient_accumulation_steps", None),
             "Engine ps does not accumulate gradients (gradient_accumulation_steps). Give a larger "
             "batch_per_rank, or more replicas in mode sync.")):
        if is_so:
            raise ConfigError(f"{why} {_INSTEAD}")


def is_elementwise(optimizer: Any) -> bool:
    """Whether parameters may be cut and joined under this optimizer with equal results."""
    excluded = (getattr(optimizer, "_exclude_from_weight_decay", None)
                or getattr(optimizer, "_exclude_from_weight_decay_pattern", None))
    return (type(optimizer).__module__.startswith("keras.")
            and type(optimizer).__name__ in keras_seam.ELEMENTWISE and not excluded)


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """The variables of a model by how a step uses them.

    `trained` get a gradient, in the order of `model.trainable_variables`; `tables` are layers whose
    only table is read by row. `state` is changed by a step, or small enough that a callback's
    change may matter; `constant` is the rest.
    """

    trained: tuple[Any, ...]
    tables: tuple[Any, ...]
    state: tuple[Any, ...]
    constant: tuple[Any, ...]
    metrics: tuple[Any, ...]

    def is_table(self, variable: Any) -> bool:
        """Whether a trained variable is the table of one of `tables`."""
        return any(layer._embeddings is variable for layer in self.tables)


def take_apart(model: Any, signature: Any, *, sparse: bool) -> ModelParts:
    """Trace one step of a built, compiled model; ConfigError if no variable gets a gradient.

    The data is as `Source.signature` says. Unless `sparse`, embeddings are ordinary parameters.
    """
    seeds = {id(generator.state) for layer in model._flatten_layers()
             for generator in getattr(layer, "_seed_generators", ())}
    weights = [*model.trainable_variables,
               *(v for v in model.non_trainable_variables if id(v) not in seeds)]
    layers = _embedding_layers(model) if sparse else []
    while True:
        by_row, learning, changed = _trace(model, signature, weights, layers)
        if all(id(layer) in by_row for layer in layers):
            break
        layers = [layer for layer in layers if id(layer) in by_row]
    learning |= {id(layer._embeddings) for layer in layers}
    if not learning:
        raise ConfigError("No variable of the model gets a gradient from its loss. Check the loss "
                          "and which layers are trainable.")
    others = [v for v in weights if id(v) not in learning]
    state = [v for v in others if id(v) in changed or math.prod(v.shape) <= _SMALL]
    return ModelParts(
        trained=tuple(v for v in weights if id(v) in learning), tables=tuple(layers),
        state=tuple(state), metrics=tuple(model.metrics_variables),
        constant=tuple(v for v in others if not any(v is kept for kept in state)))


def _embedding_layers(model: Any) -> list[Any]:
    """The layers whose tables may stay on the servers."""
    return list({
        id(layer): layer for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Embedding)
        and type(layer).call is keras.layers.Embedding.call
        and not getattr(layer, "quantization_mode", None)
        and not getattr(layer, "lora_enabled", False)
        and layer.trainable and layer.embeddings_constraint is None}.values())


def _trace(model: Any, signature: Any, weights: list[Any], layers: list[Any]
           ) -> tuple[set[int], set[int], set[int]]:
    """Trace a step with placeholders, with rows for the tables of `layers`.

    Gives ids: of the layers that use only these rows, of the variables that get a gradient, and of
    those that a step changes.
    """
    trainable, everything = model.trainable_variables, [*weights, *model.metrics_variables]
    found: list[set[int]] = []

    def step(values: list[Any], data: Any) -> None:
        looked_up: dict[int, Any] = {}

        def lookup(layer: Any, numbers: Any) -> Any:
            looked_up[id(layer)] = layer._embeddings
            return tf.zeros([tf.size(numbers), layer.output_dim], layer.variable_dtype)

        inputs = values[:len(trainable)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(inputs)
            loss, scope = forward(
                model, list(zip(everything, values, strict=True)), data, training=True,
                number=tf.constant(0, tf.int64), lookup=lookup, layers=layers)
        # Before the gradient, which reads the shapes of what it is asked for.
        unused = {id(v) for v, value in zip(trainable, inputs, strict=True)
                  if not value.consumers()}
        gradients = zip(trainable, tape.gradient(loss, inputs), strict=True)
        found[:] = (
            {key for key, table in looked_up.items() if id(table) in unused},
            {id(v) for v, gradient in gradients if id(v) not in unused and gradient is not None},
            {id(v) for v, value in zip(everything, values, strict=True)
             if scope.get_current_value(v) is not value})

    tf.function(step, autograph=False).get_concrete_function(
        [tf.TensorSpec(v.shape, keras.backend.standardize_dtype(v.dtype)) for v in everything],
        tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), signature))
    by_row, learning, changed = found
    for variable in trainable:
        if id(variable) in changed:
            raise ConfigError(
                f"A step assigns {variable.path}, which is trained (as SpectralNormalization "
                f"does). Engine ps moves gradients only. {_INSTEAD}")
    return by_row, learning, changed


def forward(model: Any, values: Pairs, data: Any, *, number: Any,
            lookup: Callable[[Any, Any], Any], layers: Sequence[Any],
            training: bool) -> tuple[Any, Any]:
    """Run a model on tensors in place of its variables; gives loss and scope, with new values.

    `values` is for all variables but seeds and the tables of `layers` (embeddings); `data` is `x`,
    `(x, y)` or `(x, y, sample_weight)`. `number` is an int64 tensor, unique to a batch in the run.
    `lookup` gives the rows of a layer's table by distinct numbers.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with _redirected(number, lookup, layers), keras.StatelessScope(
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


@contextmanager
def _redirected(number: Any, lookup: Callable[[Any, Any], Any],
                layers: Sequence[Any]) -> Iterator[None]:
    """Redirect seeds and tables in this block. One thread at a time, as tracing is."""
    embedding, generator = keras.layers.Embedding, keras.random.SeedGenerator
    original_call, original_next = embedding.call, generator.next
    redirected = {id(layer) for layer in layers}
    drawn = 0

    def call(layer: Any, inputs: Any) -> Any:
        if id(layer) not in redirected:
            return original_call(layer, inputs)
        numbers = tf.cast(inputs, tf.int64)
        used, position = tf.unique(tf.reshape(numbers, [-1]))
        out = tf.reshape(tf.gather(lookup(layer, used), position),
                         tf.concat([tf.shape(numbers), [layer.output_dim]], 0))
        out.set_shape([*numbers.shape, layer.output_dim])
        return tf.cast(out, layer.compute_dtype)

    def draw(self: Any, ordered: bool = True) -> Any:
        nonlocal drawn
        drawn += 1
        with tf.init_scope():
            own = int(self.state.value.numpy().reshape(-1)[0])
        first = tf.constant((own + SEED_STRIDE * drawn) % (1 << 31), tf.int64)
        return tf.cast(tf.stack([first, tf.cast(number, tf.int64)]),
                       keras.backend.standardize_dtype(self.state.dtype))

    embedding.call, generator.next = call, draw
    try:
        yield
    finally:
        embedding.call, generator.next = original_call, original_next

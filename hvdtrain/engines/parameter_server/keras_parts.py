"""The private parts of Keras that engine ps leans on, beside those of `optim/keras_seam.py`.

A model is run on tensors in place of its variables (`keras.StatelessScope`). Three things would
still reach the variables of the chief, and are redirected while a step is traced:

- seed generators: `next` counts in a variable; here a seed comes from the number of the step, so
  that no two batches share a mask and a batch that is done again has the same one;
- embeddings: the layer reads its whole table; here it asks for the rows that it uses;
- an optimizer's own counter: Keras adds to it by reading and writing, which loses updates when
  several workers do; here it adds in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import ConfigError
from hvdtrain.optim import keras_seam

_SEED_STRIDE = 7919
ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam",
               "Ftrl", "Lion")
"""Optimizers whose update of a number depends on nothing but that number's own history."""


def check_model(model: Any) -> None:
    """Refuse what a step on a worker cannot do as Keras would.

    Raises:
        ConfigError: Naming it, and the engine that can.
    """
    optimizer = getattr(model, "optimizer", None)
    instead = "Use the engine allreduce (--engine allreduce)."
    if optimizer is None:
        raise ConfigError("The model is not compiled. Call model.compile(optimizer, loss) in the "
                          "function that makes it.")
    keras_seam.check_keras()
    if keras_seam.is_loss_scale(optimizer):
        raise ConfigError("Engine ps does not scale losses (mixed_float16). Use mixed_bfloat16, "
                          f"which needs no scaling. {instead}")
    if keras_seam.is_multi(optimizer):
        raise ConfigError(f"Engine ps takes one optimizer, not a MultiOptimizer. {instead}")
    if type(model).train_step is not keras.Model.train_step:
        raise ConfigError(f"{type(model).__name__} has a train_step of its own, which engine ps "
                          "cannot take apart. Override compute_loss or compute_metrics. "
                          f"{instead}")
    if getattr(optimizer, "ema_overwrite_frequency", None):
        raise ConfigError("Engine ps does not overwrite the weights by their average within the "
                          "training (ema_overwrite_frequency). Leave it out: use_ema alone sets "
                          f"them at the end. {instead}")
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ConfigError("Engine ps does not accumulate gradients "
                          "(gradient_accumulation_steps). Give a larger batch_per_rank, or more "
                          f"replicas in mode sync. {instead}")


def is_elementwise(optimizer: Any) -> bool:
    """Whether parameters may be cut and joined under this optimizer without a difference."""
    excluded = (getattr(optimizer, "_exclude_from_weight_decay", None)
                or getattr(optimizer, "_exclude_from_weight_decay_pattern", None))
    return (type(optimizer).__module__.startswith("keras.")
            and type(optimizer).__name__ in ELEMENTWISE and not excluded)


def seed_generators(model: Any) -> list[Any]:
    """The seed generators of all layers, without duplicates."""
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for generator in getattr(layer, "_seed_generators", ()):
            found.setdefault(id(generator), generator)
    return list(found.values())


def embedding_layers(model: Any) -> list[Any]:
    """The layers whose tables may stay on the servers."""
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        if (isinstance(layer, keras.layers.Embedding)
                and type(layer).call is keras.layers.Embedding.call
                and not getattr(layer, "quantization_mode", None)
                and not getattr(layer, "lora_enabled", False)
                and layer.trainable and layer.embeddings_constraint is None):
            found.setdefault(id(layer), layer)
    return list(found.values())


@dataclass(kw_only=True)
class Redirection:
    """What replaces seeds and tables while one step is traced."""

    step: Any
    """Integer tensor, the number that tells this batch from every other one of the run."""
    lookup: Callable[[Any, Any], Any]
    """Called with a layer and the numbers of distinct rows; gives the rows."""
    layers: Sequence[Any]
    seeds_drawn: int = 0


@contextmanager
def redirected(redirection: Redirection) -> Iterator[None]:
    """Trace a step in this block. One thread at a time, as tracing is."""
    embedding, generator = keras.layers.Embedding, keras.random.SeedGenerator
    original_call, original_next = embedding.call, generator.next
    layers = {id(layer) for layer in redirection.layers}

    def call(layer: Any, inputs: Any) -> Any:
        return (_look_up(redirection, layer, inputs) if id(layer) in layers
                else original_call(layer, inputs))

    def draw(self: Any, ordered: bool = True) -> Any:
        del ordered
        redirection.seeds_drawn += 1
        with tf.init_scope():
            own = int(self.state.value.numpy().reshape(-1)[0])
        first = (own + _SEED_STRIDE * redirection.seeds_drawn) % (1 << 31)
        pair = tf.stack([tf.constant(first, tf.int64), tf.cast(redirection.step, tf.int64)])
        return tf.cast(pair, keras.backend.standardize_dtype(self.state.dtype))

    embedding.call, generator.next = call, draw
    try:
        yield
    finally:
        embedding.call, generator.next = original_call, original_next


def _look_up(redirection: Redirection, layer: Any, inputs: Any) -> Any:
    numbers = tf.cast(inputs, tf.int64)
    rows_used, position = tf.unique(tf.reshape(numbers, [-1]))
    rows = redirection.lookup(layer, rows_used)
    out = tf.reshape(tf.gather(rows, position),
                     tf.concat([tf.shape(numbers), [layer.output_dim]], 0))
    out.set_shape([*numbers.shape, layer.output_dim])
    return tf.cast(out, layer.compute_dtype)


def add_in_place(variable: Any) -> None:
    """Let `assign_add` of a Keras variable on a server be one operation there."""
    inner = variable.value

    def assign_add(value: Any) -> Any:
        inner.assign_add(tf.cast(value, inner.dtype))
        return inner

    keras_seam.set_on_instance(variable, "assign_add", assign_add)


def build_with_slots(optimizer: Any, variables: Sequence[Any]) -> list[tuple[str, int] | None]:
    """Build an optimizer and find out which of its variables belongs to which parameter.

    Args:
        optimizer: One that is not built.
        variables: The parameters.

    Returns:
        For each of `optimizer.variables`: the name of the slot and the number of the parameter,
        or None where it belongs to none (a counter, the learning rate).
    """
    made: dict[int, tuple[str, int]] = {}
    numbers = {id(variable): number for number, variable in enumerate(variables)}
    original = optimizer.add_variable_from_reference

    def recorded(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        variable = original(reference_variable, *args, **kwargs)
        name = kwargs.get("name") or (args[0] if args else "var")
        made[id(variable)] = (str(name), numbers[id(reference_variable)])
        return variable

    keras_seam.set_on_instance(optimizer, "add_variable_from_reference", recorded)
    try:
        optimizer.build(list(variables))
    finally:
        object.__delattr__(optimizer, "add_variable_from_reference")
    return [made.get(id(variable)) for variable in optimizer.variables]


def copy_of(optimizer: Any, **changes: Any) -> Any:
    """A new optimizer with the settings of another, unbuilt.

    Raises:
        ConfigError: The class cannot be made from its settings.
    """
    try:
        return type(optimizer).from_config({**optimizer.get_config(), **changes})
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be made again from its get_config(): {error}. "
            "Engine ps makes one on the servers: give the class get_config() and "
            "from_config().") from error

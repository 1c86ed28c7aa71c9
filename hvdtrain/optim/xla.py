"""XLA in a training step on several ranks: compiled gradients, compiled update, ranks between.

The collectives have no XLA kernel, so a step cannot be compiled as a whole. Its two halves can:
the forward and backward pass, up to the gradients, and the update, from the reduced gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import ConfigError
from hvdtrain.optim import keras_model, keras_seam


def split_step(model: Any) -> Callable[[], None]:
    """Compile the two halves of each training step. Every rank; before the function is made.

    Args:
        model: A compiled, built model with a distributed optimizer.

    Returns:
        A function that undoes it.

    Raises:
        ConfigError: The model has a `train_step` of its own.
    """
    if type(model).train_step is not keras.Model.train_step:
        raise ConfigError(
            f"xla=True compiles the train_step of Keras, but {type(model).__name__} has one of its "
            "own. Leave xla out, and decorate the parts of your train_step that hold no "
            "optimizer.apply with @tf.function(jit_compile=True).")
    original = model.train_step
    keras_seam.set_on_instance(model, "train_step", lambda data: _step(model, data))
    leaves = keras_seam.leaf_optimizers(model.optimizer)
    updates = [leaf._backend_update_step for leaf in leaves]
    for leaf, update in zip(leaves, updates, strict=True):
        keras_seam.set_on_instance(leaf, "_backend_update_step", _compiled(update))

    def undo() -> None:
        keras_seam.restore_method(model, "train_step", original)
        for leaf, update in zip(leaves, updates, strict=True):
            keras_seam.restore_method(leaf, "_backend_update_step", update)
        model.train_function = None
    return undo


def _compiled(update: Callable[..., None]) -> Callable[..., None]:
    def _backend_update_step(grads: Any, variables: Any, learning_rate: Any) -> None:
        # A function of its own for each trace: it captures tensors of the graph that is traced.
        @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
        def compiled(grads: Any, learning_rate: Any) -> None:
            update(grads, variables, learning_rate)
        compiled(list(grads), tf.convert_to_tensor(learning_rate))
    return _backend_update_step


def _step(model: Any, data: Any) -> Any:
    """`keras.Model.train_step`, with its gradients compiled."""
    optimizer, trained = model.optimizer, model.trainable_weights
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
    def compiled(x: Any, y: Any, sample_weight: Any) -> Any:
        with tf.GradientTape() as tape:
            y_pred = keras_model.call_in_training(model, x)
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight,
                                       training=True)
            scaled = optimizer.scale_loss(loss)
        return loss, y_pred, tape.gradient(scaled, trained)

    loss, y_pred, gradients = compiled(x, y, sample_weight)
    samples = tf.shape(next(i for i in tf.nest.flatten(x) if i is not None))[0]
    model._loss_tracker.update_state(loss, sample_weight=samples)
    optimizer.apply_gradients(zip(gradients, trained, strict=True))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

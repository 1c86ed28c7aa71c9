"""What comes before the first step: the optimizers distributed, the model built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import keras

from hvdtrain.config import TrainConfig
from hvdtrain.errors import OptimizerError
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.optim.as_set import distribute_as_set
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.session import Session


def prepare_optimizers(model: Any, session: Session, config: TrainConfig) -> None:
    """Let all optimizers of the model reduce their gradients as set. All ranks."""
    found = keras_seam.found_optimizers(model)
    if not found:
        raise OptimizerError("The model is not compiled. Call model.compile(optimizer, loss) "
                             "before training.")
    for optimizer in found:
        distribute_as_set(optimizer, session.collective, ReducerOptions.of(config),
                          zero=config.zero)
    keras_seam.self_test()
    if model.jit_compile:
        model.jit_compile = False
    model.train_function = None


def build_model(model: Any, one_sample: Callable[[], Any]) -> None:
    """Build model and optimizers now: what is built during tracing cannot be broadcast.

    Where a `train_step` of the model's own uses more than its `call`, that is traced once.

    Args:
        model: A compiled model.
        one_sample: Gives a sample to train on, with a first axis of length 1.
    """
    several = len(keras_seam.found_optimizers(model)) > 1
    sample = None if _is_built(model) and not several else one_sample()
    own_step = type(model).train_step is not keras.Model.train_step
    if not _is_built(model) and keras_model.has_call(model):
        inputs = sample[0] if isinstance(sample, tuple) else sample
        # A step of the model's own may call it with something else.
        with suppress(Exception) if own_step else nullcontext():
            model(keras_model.tensors_of(inputs))
    if several or not _is_built(model):
        keras_model.trace_train_step(model, sample)
    for optimizer in keras_seam.optimizers_of(model):
        if not optimizer.built:
            optimizer.build(model.trainable_variables)


def _is_built(model: Any) -> bool:
    return all(layer.built for layer in model._flatten_layers())


def fit_steps_per_execution(model: Any, session: Session, steps: int) -> None:
    """Keras runs whole executions: with 2 of them per 3 steps it would take a fourth step."""
    asked = model.steps_per_execution
    fitting = next(n for n in range(min(asked, steps), 0, -1) if steps % n == 0)
    if fitting == asked:
        return
    model.steps_per_execution = fitting
    if session.world.is_chief:
        get_logger().warning(
            "steps_per_execution is %d instead of %d: an epoch has %d steps, which is no "
            "multiple of it. The result is the same.", fitting, asked, steps)

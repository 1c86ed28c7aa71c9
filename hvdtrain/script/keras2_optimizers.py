"""Optimizers as Keras 2 had them: `lr`, `decay`, `variables()`, `minimize`, `legacy`."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import ConfigError

_DECAY = "_keras2_decay"
_WITHOUT_EFFECT = ("jit_compile", "is_legacy_optimizer")


def install(put: Callable[[Any, str, Any], None]) -> None:
    """Patch the base classes of all optimizers."""
    base: Any = next(kind for kind in keras.optimizers.Optimizer.__mro__
                     if kind.__name__ == "BaseOptimizer")
    put(base, "__init__", _init(base.__init__))
    put(base, "get_config", _get_config(base.get_config))
    put(base, "lr", property(lambda self: self.learning_rate, _set_rate))
    put(base, "decay", Computed(lambda self: getattr(self, _DECAY, 0.0)))
    put(base, "weights", Computed(lambda self: list(self.variables)))
    put(base, "get_weights", lambda self: [np.asarray(v) for v in self.variables])
    put(base, "minimize", minimize)
    put(base, "_decayed_lr", lambda self, dtype: tf.cast(_decayed(self, self.learning_rate), dtype))
    update = keras.optimizers.Optimizer._backend_update_step
    put(keras.optimizers.Optimizer, "_backend_update_step", functools.wraps(update)(
        lambda self, grads, trainable_variables, learning_rate: update(
            self, grads, trainable_variables, _decayed(self, learning_rate))))
    kinds = [kind for kind in vars(keras.optimizers).values() if isinstance(kind, type)]
    for kind in {base, *kinds}:
        if isinstance(vars(kind).get("variables"), property):
            put(kind, "variables", _variables(vars(kind)["variables"]))
    scaled = keras.optimizers.LossScaleOptimizer
    put(scaled, "set_weights", _set_weights)  # Keras 3 leaves out the inner optimizer
    put(scaled, "get_scaled_loss", _refused(
        "get_scaled_loss", "write loss = optimizer.scale_loss(loss) in its place"))
    put(scaled, "get_unscaled_gradients", _refused(
        "get_unscaled_gradients", "leave the line out: optimizer.apply_gradients divides the "
        "gradients by the loss scale itself, before it clips (Adam(global_clipnorm=...))"))


class Variables(list[Any]):
    """A list of variables that can be called: `optimizer.variables` and `optimizer.variables()`."""

    def __call__(self) -> Variables:
        """Itself."""
        return self


class Computed:
    """An attribute that is computed, unless an object of the user sets one of its name."""

    def __init__(self, get: Callable[[Any], Any]) -> None:
        self._get = get

    def __get__(self, owner: Any, _: Any = None) -> Any:
        return self if owner is None else self._get(owner)


def _variables(before: property) -> property:
    return property(lambda self: Variables(before.__get__(self)), doc=before.__doc__)


def _init(before: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(before)
    def __init__(self: Any, learning_rate: Any = None, *args: Any, **kwargs: Any) -> None:
        learning_rate = kwargs.pop("lr", learning_rate)
        decay = float(kwargs.pop("decay", None) or 0.0)
        if decay < 0.0:
            raise ConfigError(f"decay must be 0 or more: the rate is learning_rate / (1 + decay * "
                              f"iterations). Received: {decay}.")
        for name in _WITHOUT_EFFECT:
            kwargs.pop(name, None)
        if isinstance(learning_rate, numbers.Real):  # Keras 3 takes only Python's float
            learning_rate = float(learning_rate)
        before(self, learning_rate, *args, **kwargs)
        setattr(self, _DECAY, decay)
    return __init__


def _get_config(before: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(before)
    def get_config(self: Any) -> dict[str, Any]:
        decay = getattr(self, _DECAY, 0.0)
        # Keras 3 takes the key as well, and warns that it has no effect there.
        return before(self) | ({"decay": decay} if decay else {})
    return get_config


def _set_rate(optimizer: Any, value: Any) -> None:
    optimizer.learning_rate = value


def _decayed(optimizer: Any, learning_rate: Any) -> Any:
    """The rate of Keras 2: `iterations` counts the updates before this one."""
    decay = getattr(optimizer, _DECAY, 0.0)
    if not decay:
        return learning_rate
    rate = tf.convert_to_tensor(learning_rate)
    return rate / (1.0 + decay * tf.cast(optimizer.iterations, rate.dtype))


def _set_weights(self: Any, weights: Any) -> None:
    for variable, value in zip(self.variables, weights, strict=True):
        variable.assign(value)


def minimize(self: Any, loss: Any, var_list: Any, grad_loss: Any = None, name: str | None = None,
             tape: Any = None) -> Any:
    """`Optimizer.minimize` of Keras 2.

    Args:
        self: The optimizer.
        loss: A function without arguments, or, with `tape`, a tensor.
        var_list: A list of variables, or a function that returns one.
        grad_loss: The gradient of the loss, or None.
        name: Without effect.
        tape: The tape that has recorded `loss`.

    Returns:
        The number of updates.
    """
    if not callable(loss) and tape is None:
        raise ConfigError("optimizer.minimize was given a tensor without the tape that recorded "
                          "it. Write minimize(loss, variables, tape=tape), or give a function.")
    if callable(loss):
        with tape or tf.GradientTape() as tape:
            loss = loss()
    variables = var_list() if callable(var_list) and not isinstance(var_list, list) else var_list
    variables = tf.nest.flatten(variables)
    gradients = tape.gradient(loss, variables, grad_loss)
    return self.apply_gradients(list(zip(gradients, variables, strict=True)))


def _refused(name: str, do: str) -> Callable[..., Any]:
    def method(self: Any, *_: Any, **__: Any) -> Any:
        raise ConfigError(f"Keras 3 has no LossScaleOptimizer.{name}: {do}.")
    return method

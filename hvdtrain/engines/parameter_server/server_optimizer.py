"""`ServerOptimizer`: the user's optimizer, made again over the parameters on the servers.

Its slots lie beside the parameters, and an update is computed there: only gradients travel. The
chief's own optimizer stays the plain Keras one and gets the slots back for every saved file.

Clipping needs whole gradients, so it does not happen in the copy: `clip` does it, on the worker
for one gradient (async), or on the servers for the mean (sync).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.engine_config import PsConfig
from hvdtrain.engines.parameter_server import keras_parts, tf_seam
from hvdtrain.engines.parameter_server.parameters import Array, ServerParameters
from hvdtrain.errors import ConfigError
from hvdtrain.optim import keras_seam

_NOT_IN_COPY = {"clipnorm": None, "global_clipnorm": None, "clipvalue": None,
                "loss_scale_factor": None}


def layout(model: Any, config: PsConfig) -> tuple[bool, str]:
    """Whether parameters are fused, and how they are cut.

    Args:
        model: A compiled, built model.
        config: What was asked for.

    Returns:
        Fused, and the partitioner.

    Raises:
        ConfigError: What was asked for would give other results than Keras.
    """
    optimizer, why = model.optimizer, ""
    constrained = [v.path for v in model.trainable_variables if v.constraint is not None]
    if constrained and config.mode == "async":
        raise ConfigError(
            f"{constrained[0]} has a constraint, which needs the variable to itself between an "
            "update and the next. In mode async workers would undo each other's updates. Use "
            "--ps-mode sync.")
    if not keras_parts.is_elementwise(optimizer):
        why = (f"{type(optimizer).__name__} with these settings, which does not treat every "
               "number of a variable alike")
    elif config.mode == "sync" and optimizer.clipnorm is not None:
        why = "clipnorm, which takes the norm of each variable"
    elif constrained:
        why = f"the constraint of {constrained[0]}, which needs the whole variable"
    if why and (config.fused or config.partitioner != "none"):
        what = "--ps-fused" if config.fused else f"--ps-partitioner {config.partitioner}"
        raise ConfigError(f"{what} does not go with {why}. Leave it out: each variable then lies "
                          "whole on one server.")
    return (not why if config.fused is None else config.fused), config.partitioner


class ServerOptimizer:
    """The optimizer over the holders. On the chief.

    Args:
        strategy: The strategy of `parameters`.
        parameters: What it updates.
        model: The model, whose optimizer is the user's.
        multiplier: Callable from the number of updates to a factor on the learning rate, or None.
    """

    def __init__(self, strategy: Any, parameters: ServerParameters, model: Any,
                 multiplier: Callable[[Any], Any] | None) -> None:
        self._parameters = parameters
        self._own = model.optimizer
        with tf_seam.on_server(strategy, 0):
            self.keras = keras_parts.copy_of(self._own, **_NOT_IN_COPY)
            self._exclude_from_decay(self.keras)
            slots = keras_parts.build_with_slots(self.keras, parameters.variables)
        keras_parts.add_in_place(self.keras._iterations)
        # One replica per worker: there is nothing to add up, and the way would lead over the chief.
        keras_seam.set_on_instance(self.keras, "_all_reduce_sum_gradients", lambda pairs: pairs)
        if multiplier is not None:
            keras_seam.replace_method(
                self.keras, "_get_current_learning_rate",
                lambda original: lambda: original() * multiplier(self.keras._iterations.value))
        self._pairs, self._slots = self._match(model, slots)
        self.push()

    @property
    def iterations(self) -> Any:
        """The `tf.Variable` that counts updates, on a server."""
        return self.keras._iterations.value

    def apply(self, gradients: Sequence[Any]) -> None:
        """Update the parameters. In a replica context.

        Args:
            gradients: For each holder, already clipped.
        """
        self.keras.apply(list(gradients), self._parameters.variables)

    def clip(self, gradients: Sequence[Any], devices: Sequence[str] | None = None) -> list[Any]:
        """Clip as the user's optimizer does, on the devices where the gradients are.

        Args:
            gradients: Whole gradients, none of them None; `tf.IndexedSlices` without duplicates.
            devices: Their devices; by default that of the caller.
        """
        where = devices or [""] * len(gradients)
        own, clipped = self._own, []
        scale = self._global_scale(gradients, where) if own.global_clipnorm else None
        for gradient, device in zip(gradients, where, strict=True):
            with _device(device):
                if own.clipnorm:
                    clipped.append(tf.clip_by_norm(gradient, own.clipnorm))
                elif scale is not None:
                    clipped.append(_map(lambda g: g * tf.cast(scale, g.dtype), gradient))
                elif own.clipvalue:
                    clipped.append(_map(lambda g: tf.clip_by_value(
                        g, -own.clipvalue, own.clipvalue), gradient))
                else:
                    clipped.append(gradient)
        return clipped

    def _global_scale(self, gradients: Sequence[Any], devices: Sequence[str]) -> Any:
        squares = []
        for gradient, device in zip(gradients, devices, strict=True):
            with _device(device):
                squares.append(tf.reduce_sum(tf.square(_values(gradient))))
        norm, limit = tf.sqrt(tf.add_n(squares)), self._own.global_clipnorm
        # The formula of keras.src.optimizers.base_optimizer.clip_by_global_norm.
        return limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)

    def pull(self) -> None:
        """Copy the optimizer's state from the servers into the user's optimizer."""
        for mine, theirs in self._pairs:
            theirs.assign(mine.value.numpy())
        for mine, theirs in self._slots:
            values = self._parameters.assemble([np.asarray(v.value.numpy()) for v in mine])
            for variable, value in zip(theirs, values, strict=True):
                variable.assign(value)

    def push(self) -> None:
        """Copy the state of the user's optimizer to the servers."""
        for mine, theirs in self._pairs:
            mine.value.assign(theirs.numpy())
        for mine, theirs in self._slots:
            values: list[Array] = self._parameters.take_apart(
                [np.asarray(v.numpy()) for v in theirs])
            for variable, value in zip(mine, values, strict=True):
                variable.value.assign(value)

    def set_rate(self, rate: float) -> None:
        """Set a learning rate that is a number."""
        self.keras._learning_rate.value.assign(rate)

    def _exclude_from_decay(self, copied: Any) -> None:
        """Which variables have no weight decay is said by the names of the user's variables."""
        names = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
        if any(getattr(self._own, name, None) for name in names):
            copied._exclude_from_weight_decay = {
                copied._var_key(holder.variable) for holder in self._parameters.holders
                if not self._own._use_weight_decay(
                    self._parameters.parts.trained[holder.pieces[0].parameter])}

    def _match(self, model: Any, slots: list[tuple[str, int] | None]) -> tuple[Any, Any]:
        """Pairs of single variables, and pairs of lists: over the holders, over the parameters."""
        own, trained = self._own, self._parameters.parts.trained
        if not own.built:
            own_slots = keras_parts.build_with_slots(own, model.trainable_variables)
        else:
            own_slots = keras_parts.build_with_slots(
                keras_parts.copy_of(own), model.trainable_variables)
        if len(own_slots) != len(own.variables):
            raise ConfigError(f"The state of {type(own).__name__} has another form than the one "
                              "of a new one. Compile the model with a new optimizer.")
        numbers = {id(v): i for i, v in enumerate(model.trainable_variables)}
        theirs = {slot: v for slot, v in zip(own_slots, own.variables, strict=True) if slot}
        mine = {slot: v for slot, v in zip(slots, self.keras.variables, strict=True) if slot}
        singles = [[v for slot, v in zip(which, variables, strict=True) if not slot]
                   for which, variables in ((slots, self.keras.variables),
                                            (own_slots, own.variables))]
        pairs, lists = list(zip(*singles, strict=True)), []
        holders = self._parameters.holders
        for name in dict.fromkeys(name for name, _ in mine):
            has = [h for h in range(len(holders)) if (name, h) in mine]
            if len(has) == len(holders):
                lists.append(([mine[name, h] for h in has],
                              [theirs[name, numbers[id(v)]] for v in trained]))
            else:  # an optimizer that treats some variables in another way: none is cut or fused
                pairs += [(mine[name, h], theirs[name, numbers[id(
                    trained[holders[h].pieces[0].parameter])]]) for h in has]
        return pairs, lists


def _device(device: str) -> Any:
    return tf.device(device or None)


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _map(function: Callable[[Any], Any], gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices,
                                gradient.dense_shape)
    return function(gradient)

"""The learning rate on N ranks: scaled, with a warmup per step, before the user's own schedule.

Formula (Goyal et al., 2017, "Accurate, Large Minibatch SGD", section 2): with a global batch that
is k times that of one process the rate is `scale = k` times the base rate (`linear`), or sqrt(k)
(`sqrt`), reached after a gradual warmup from the base rate. k is the number of ranks where the
batch of each is given, and 1 where the global batch is:

    factor(step) = 1 + (scale - 1) * min(1, step / warmup_steps)

The rate of the optimizer, a number or a schedule, stays what the user made it: it is multiplied
at each update of `fit`. So callbacks read and set the rate of one process, files hold it, and a
second `fit`, a loaded model or another number of ranks scale it once.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.errors import ConfigError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.distributed import state_of


def scale_factor(size: int, rule: str) -> float:
    """The factor on the learning rate for a batch that is `size` times that of one process.

    Args:
        size: Integer, the number of ranks, or 1 where the global batch stays what it is.
        rule: String, `linear`, `sqrt`, `none`, or `module:function` with a function that is
            given `size`.

    Raises:
        ConfigError: There is no such function, or it gives no positive number.
    """
    known = {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}
    if rule in known:
        return known[rule]
    module, _, name = rule.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"lr_scaling is {rule!r}, but there is no such function: {error}. Expected linear, "
            "sqrt, none, or module:function of a module that can be imported.") from error
    factor = function(size)
    if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise ConfigError(f"lr_scaling: {rule} gave {factor!r} for {size} ranks. Expected a "
                          "positive number.")
    return float(factor)


@dataclass(frozen=True, kw_only=True)
class LrPlan:
    """The scaling of one run."""

    scale: float
    warmup_steps: int

    def factor(self, step: float) -> float:
        """The factor on the rate of the update after `step` steps."""
        if self.warmup_steps == 0 or step >= self.warmup_steps:
            return self.scale
        return 1 + (self.scale - 1) * step / self.warmup_steps

    def describe(self, base: str) -> str:
        """One line for the plan."""
        text = f"{base} x {self.scale:g}"
        return text + (f", warmup over {self.warmup_steps} steps" if self.warmup_steps else "")


def plan_learning_rate(size: int, rule: str, warmup_epochs: float,
                       steps_per_epoch: int | None) -> LrPlan:
    """Decide scale and warmup. Pure; equal on all ranks.

    Raises:
        ConfigError: There is a warmup over epochs whose steps are not known.
    """
    scale = scale_factor(size, rule)
    if steps_per_epoch is None:
        if warmup_epochs and scale != 1.0:
            raise ConfigError(
                f"warmup_epochs={warmup_epochs:g} needs the steps of an epoch, which are not known "
                "of this data set. Give steps_per_epoch=... to fit.")
        steps_per_epoch = 0
    steps = math.ceil(warmup_epochs * steps_per_epoch) if scale != 1.0 else 0
    return LrPlan(scale=scale, warmup_steps=steps)


def base_rate(optimizer: Any) -> str:
    """The learning rate of the user's optimizer in words, before scaling."""
    rates = []
    for leaf in keras_seam.leaf_optimizers(optimizer):
        number, rate = keras_seam.rate_variable(leaf), leaf._learning_rate
        rates.append(f"{float(number.numpy()):g}" if number is not None
                     else getattr(rate, "name", None) or type(rate).__name__)
    return ", ".join(rates)


def install(optimizer: Any, plan: LrPlan) -> None:
    """Multiply the rate of each update of a distributed optimizer, until `remove`. Every rank."""
    for leaf in keras_seam.leaf_optimizers(optimizer):
        state = state_of(leaf)
        if state is not None:
            state.learning_rate_multiplier = multiplier(plan)


def remove(optimizer: Any) -> None:
    """Undo `install`. Every rank; the train function must be traced anew."""
    for leaf in keras_seam.leaf_optimizers(optimizer):
        state = state_of(leaf)
        if state is not None:
            state.learning_rate_multiplier = None


def rescale(optimizer: Any, ratio: float) -> None:
    """Multiply rates that are numbers: version 0.1 has saved them scaled."""
    for leaf in keras_seam.leaf_optimizers(optimizer):
        number = keras_seam.rate_variable(leaf)
        if number is not None:
            number.assign(number * ratio)


def effective_rate(optimizer: Any, plan: LrPlan) -> float:
    """The rate of the next update of the first leaf, with scale and warmup."""
    leaf = keras_seam.leaf_optimizers(optimizer)[0]
    rate = float(tf.convert_to_tensor(leaf.learning_rate).numpy())
    return rate * plan.factor(int(leaf._iterations.numpy()))


def multiplier(plan: LrPlan) -> Callable[[Any], Any] | None:
    """The factor on the learning rate of an update, as a function of the updates before it.

    Returns:
        A callable from an integer tensor to a float tensor; None where the factor is always 1.
    """
    if plan.scale == 1.0:
        return None
    if plan.warmup_steps == 0:
        return lambda iteration: tf.constant(plan.scale)

    def factor(iteration: Any) -> Any:
        done = tf.minimum(1.0, tf.cast(iteration, tf.float32) / plan.warmup_steps)
        return 1.0 + (plan.scale - 1.0) * done
    return factor

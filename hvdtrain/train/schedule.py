"""The learning rate on N ranks: scaled, with a warmup per step, before the user's own schedule.

Goyal et al. (2017), "Accurate, Large Minibatch SGD", section 2: a global batch k times that of one
process trains, after a warmup, at `scale` times the base rate: k (`linear`) or sqrt(k) (`sqrt`).
k is the number of ranks if each rank's batch is given, 1 if the global batch is:

    factor(step) = 1 + (scale - 1) * min(1, step / warmup_steps)

`fit` multiplies the rate at each update and leaves the optimizer's own: callbacks and files have
the rate of one process, and a second `fit`, a loaded model or other ranks do not scale it twice.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import TrainConfig
from hvdtrain.data.plans import ShardPlan, StreamPlan
from hvdtrain.data.source import Source
from hvdtrain.data.stream import StreamSource
from hvdtrain.errors import ConfigError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.distributed import state_of
from hvdtrain.optional import require


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


def plan_learning_rate(shards: Any, config: TrainConfig) -> LrPlan:
    """Decide scale and warmup. Pure; equal on all ranks."""
    scale, warmup_epochs = scale_factor(shards.growth, config.lr_scaling), config.warmup_epochs
    if scale == 1.0 or not warmup_epochs:
        return LrPlan(scale=scale, warmup_steps=0)
    if shards.steps is None:
        raise ConfigError(
            f"warmup_epochs={warmup_epochs:g} needs the steps of an epoch, which are not known "
            "of this data set. Give steps_per_epoch=... to fit.")
    return LrPlan(scale=scale, warmup_steps=math.ceil(warmup_epochs * shards.steps))


def scale_factor(size: int, rule: str) -> float:
    """The factor for a batch that is `size` times that of one process: `TrainConfig.lr_scaling`."""
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


def base_rate(optimizer: Any) -> str:
    """The rate of the user's optimizer as text, before scaling."""
    rates = []
    for leaf in keras_seam.leaf_optimizers(optimizer):
        number, rate = keras_seam.rate_variable(leaf), leaf._learning_rate
        rates.append(f"{float(number.numpy()):g}" if number is not None
                     else getattr(rate, "name", None) or type(rate).__name__)
    return ", ".join(rates)


@contextmanager
def scaled(optimizer: Any, plan: LrPlan) -> Iterator[None]:
    """While entered, multiply each update's rate; trace within, and again after. All ranks."""
    hooked = [found for leaf in keras_seam.leaf_optimizers(optimizer)
              if (found := state_of(leaf)) is not None]
    for each in hooked:
        each.learning_rate_multiplier = multiplier(plan)
    try:
        yield
    finally:
        for each in hooked:
            each.learning_rate_multiplier = None


def rescale(optimizer: Any, ratio: float) -> None:
    """Multiply rates that are numbers: version 0.1 saved them scaled."""
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
    """The factor as a function of a tensor, the updates so far; None: always 1."""
    if plan.scale == 1.0:
        return None

    def factor(iteration: Any) -> Any:
        if plan.warmup_steps == 0:
            return tf.constant(plan.scale)
        done = tf.minimum(1.0, tf.cast(iteration, tf.float32) / plan.warmup_steps)
        return 1.0 + (plan.scale - 1.0) * done
    return factor


@dataclass(frozen=True, kw_only=True)
class LrCurve:
    """The learning rate of each step of a run; base rate, factor and warmup as text."""

    steps_per_epoch: int
    description: str
    rates: tuple[float, ...]

    def points(self, most: int) -> list[int]:
        """Steps to show: the first, the last, and evenly between."""
        last = len(self.rates) - 1
        even = {round(i * last / max(1, most - 1)) for i in range(most)}
        return sorted(even | {0, last})

    def draw(self, path: Path, title: str) -> None:
        """Plot to a file, in the format of its suffix (png, svg, pdf)."""
        require("matplotlib", "the plot of the learning rate")
        from matplotlib.figure import Figure
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.subplots()
        axes.plot([step / self.steps_per_epoch for step in range(len(self.rates))], self.rates)
        axes.set(xlabel="epoch", ylabel="learning rate", title=title)
        axes.grid(alpha=0.3)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def learning_rates(model: Any, train: Source | StreamSource, config: TrainConfig, *, size: int,
                   base: str, callbacks: Sequence[Any] = ()) -> LrCurve:
    """Compute the rate of each step on `size` ranks, without training. One process.

    `LearningRateScheduler` callbacks are called; rates that depend on results (`ReduceLROnPlateau`)
    stay constant. `base` is the optimizer's rate as text.
    """
    shards: ShardPlan | StreamPlan
    batch, batch_global = config.rank_batch(size), config.batch_global
    if isinstance(train, StreamSource):
        shards = StreamPlan(counts=tuple(train.count(rank, size) for rank in range(size)), rank=0,
                            batch_per_rank=batch, growth=1 if batch_global else size)
    else:
        shards = ShardPlan(samples=len(train), rank=0, size=size, batch_per_rank=batch,
                           batch_global=batch_global, shuffle=False,
                           remainder=config.remainder_as("join"))
    plan = plan_learning_rate(shards, config)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    leaf = keras_seam.leaf_optimizers(model.optimizer)[0]
    scheduled = [c for c in callbacks if isinstance(c, keras.callbacks.LearningRateScheduler)]
    for callback in scheduled:
        callback.set_model(model)

    def rate(step: Any) -> Any:
        leaf._iterations.assign(step)
        return tf.cast(leaf.learning_rate, tf.float32)

    def of_epoch(first: Any) -> Any:
        return tf.map_fn(rate, first + tf.range(shards.steps, dtype=first.dtype),
                         fn_output_signature=tf.float32, parallel_iterations=1)
    own_rates, rates = tf.function(of_epoch), list[float]()
    for epoch in range(config.epochs):
        for callback in scheduled:
            callback.on_epoch_begin(epoch)
        first = epoch * shards.steps
        own = own_rates(tf.constant(first, leaf._iterations.dtype)).numpy()
        rates += [float(value) * plan.factor(first + step) for step, value in enumerate(own)]
    return LrCurve(steps_per_epoch=shards.steps, description=plan.describe(base),
                   rates=tuple(rates))

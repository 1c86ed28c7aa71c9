"""The learning rate of a whole run on N ranks, without training: for `hvdtrain lr`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from hvdtrain.config import TrainConfig
from hvdtrain.data.shard import ShardPlan
from hvdtrain.data.source import Source
from hvdtrain.data.stream import StreamSource
from hvdtrain.data.stream_plan import StreamPlan
from hvdtrain.optim import keras_seam
from hvdtrain.optional import require
from hvdtrain.train.schedule import effective_rate, install, plan_learning_rate


@dataclass(frozen=True, kw_only=True)
class LrCurve:
    """The rate of each step."""

    steps_per_epoch: int
    description: str
    """Base rate, factor and warmup in words."""
    rates: tuple[float, ...]
    """One for each step of the run, from the first."""

    def points(self, most: int) -> list[int]:
        """Steps to show: the first and the last, the ends of a warmup, evenly between."""
        last = len(self.rates) - 1
        even = {round(i * last / max(1, most - 1)) for i in range(most)}
        return sorted(even | {0, last})


def learning_rates(model: Any, train: Source | StreamSource, config: TrainConfig, *, size: int,
                   base: str, callbacks: Any = ()) -> LrCurve:
    """Compute the rate of each step. One process; nothing is trained.

    `LearningRateScheduler` callbacks are called as in training. Rates that depend on what
    training finds (`ReduceLROnPlateau`) stay as they begin.

    Args:
        model: A compiled model with a distributed optimizer.
        train: The training data. The shares of all ranks of a stream are counted here.
        config: The settings.
        size: Integer, the number of ranks.
        base: String, the optimizer's rate in words.
        callbacks: The job's callbacks.
    """
    shards: ShardPlan | StreamPlan
    if isinstance(train, StreamSource):
        shards = StreamPlan(counts=tuple(train.count(rank, size) for rank in range(size)), rank=0,
                            batch_per_rank=config.rank_batch(size),
                            growth=1 if config.batch_global else size)
    else:
        shards = ShardPlan(samples=len(train), rank=0, size=size,
                           remainder=config.remainder_as("join"),
                           batch_per_rank=config.rank_batch(size),
                           batch_global=config.batch_global, shuffle=False)
    plan = plan_learning_rate(shards.growth, config.lr_scaling, config.warmup_epochs, shards.steps)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    install(model.optimizer, plan)
    scheduled = [c for c in callbacks if isinstance(c, keras.callbacks.LearningRateScheduler)]
    for callback in scheduled:
        callback.set_model(model)
    iterations = keras_seam.leaf_optimizers(model.optimizer)[0]._iterations
    rates = []
    for epoch in range(config.epochs):
        for callback in scheduled:
            callback.on_epoch_begin(epoch)
        for step in range(shards.steps):
            iterations.assign(epoch * shards.steps + step)
            rates.append(effective_rate(model.optimizer, plan))
    return LrCurve(steps_per_epoch=shards.steps, description=plan.describe(base),
                   rates=tuple(rates))


def draw(curve: LrCurve, path: Path, title: str) -> None:
    """Plot the curve to a file, in the format of its suffix (png, svg, pdf).

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("matplotlib", "the plot of the learning rate")
    from matplotlib.figure import Figure
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.plot([step / curve.steps_per_epoch for step in range(len(curve.rates))], curve.rates)
    axes.set(xlabel="epoch", ylabel="learning rate", title=title)
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)

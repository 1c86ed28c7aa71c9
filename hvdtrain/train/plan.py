"""Before the first step: build the model, compare the ranks, plan the run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.base import Collective
from hvdtrain.config import TrainConfig
from hvdtrain.data.source import tensors_of
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.optim.distributed import state_of
from hvdtrain.session import Session
from hvdtrain.settings import refuse_differences, settings_of
from hvdtrain.train.schedule import LrPlan, base_rate, plan_learning_rate
from hvdtrain.world import World


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """What a run will do, equal on all ranks; printed before it starts. Strings are for a reader.

    `shards` is a `ShardPlan`, `StreamPlan` or `BatchPlan`; `party` is what computes the gradient of
    one batch; another engine has `details` in place of a collective.
    """

    job: str
    shards: Any
    lr: LrPlan
    base_rate: str
    optimizer: str
    config: TrainConfig
    parameters: int
    validation_samples: int | None  # None: not known
    ranks: tuple[str, ...]
    collective: str = ""
    party: str = "rank"
    details: tuple[tuple[str, str], ...] = ()
    elastic: str = ""

    @classmethod
    def of(cls, model: Any, shards: Any, config: TrainConfig, **said: Any) -> TrainPlan:
        """The plan of a compiled, built model; `said` are the fields that it does not contain."""
        optimizers = keras_seam.optimizers_of(model)
        return cls(
            shards=shards, config=config, base_rate=base_rate(optimizers),
            lr=plan_learning_rate(shards, config),
            optimizer=", ".join(type(o).__name__ for o in optimizers),
            parameters=sum(int(np.prod(v.shape)) for v in model.weights), **said)

    def render(self) -> str:
        """The plan as text, one fact per line."""
        shards, config = self.shards, self.config
        validation = ("validation data of a number that is not known"
                      if self.validation_samples is None else
                      f"{self.validation_samples:,} for validation")
        rows = [
            ("job", f"{self.job}: {self.parameters:,} parameters, {self.optimizer}"),
            ("ranks", f"{len(self.ranks)}: {_group(self.ranks)}"),
            *((("elastic", self.elastic),) if self.elastic else ()),
            *(self.details or (("collective", self.collective),)),
            *((("gradients", text),) if (text := _gradients(config)) else ()),
            ("batch", shards.batch_text(self.party)),
            ("data", f"{shards.data_text(self.party)}; {validation}"),
            ("steps", f"{'not known' if shards.steps is None else shards.steps} per epoch"
                      f"{' on every rank' if self.party == 'rank' else ''}"
                      f", {config.epochs} epoch{'s' if config.epochs > 1 else ''}"),
            ("learning rate", f"{self.lr.describe(self.base_rate)} ({config.lr_scaling})"),
            ("output", str(config.output) if config.output else "nothing is written"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def _gradients(config: TrainConfig) -> str:
    said = {
        f"compressed to {config.compression}": config.compression != "none",
        f"divided by {config.predivide:g} first": config.predivide != 1,
        "optimizer state divided over the ranks": config.zero,
        "BatchNormalization over all ranks": config.sync_batch_norm,
        "halves of the step compiled by XLA": config.xla,
    }
    return ", ".join(text for text, applies in said.items() if applies)


def _group(ranks: tuple[str, ...]) -> str:
    """Ranks with the same text together: `0-3 hosta: CPU, 2 CPU threads`."""
    groups = [[rank for rank, _ in group] for _, group in itertools.groupby(
        enumerate(ranks), key=lambda numbered: numbered[1])]
    return "; ".join(f"{g[0] if len(g) == 1 else f'{g[0]}-{g[-1]}'} on {ranks[g[0]]}"
                     for g in groups)


def verbosity(world: World, asked: str | int = "auto") -> int:
    """Keras' `verbose` here. Open MPI gives the chief a terminal even with output to a file."""
    if not world.is_chief:
        return 0
    if asked != "auto":
        return int(asked)
    return 1 if sys.stdout.isatty() and world.starter == "single" else 2


def build_model(model: Any, one_sample: Callable[[], Any]) -> None:
    """Build model and optimizers: what is built during tracing cannot be broadcast."""
    # A `train_step` that uses more than `call` is traced once, on a sample with a first axis of 1.
    several = len(keras_seam.found_optimizers(model)) > 1
    sample = None if _is_built(model) and not several else one_sample()
    own_step = type(model).train_step is not keras.Model.train_step
    has_call = type(model).call not in (keras.Layer.call, keras.Model.call)
    if not _is_built(model) and has_call:
        inputs = sample[0] if isinstance(sample, tuple) else sample
        # A step of the model's own may call it with something else.
        with suppress(Exception) if own_step else nullcontext():
            model(tensors_of(inputs))
    if several or not _is_built(model):
        keras_model.trace_train_step(model, sample)
    for optimizer in keras_seam.optimizers_of(model):
        if not optimizer.built:
            optimizer.build(model.trainable_variables)


def _is_built(model: Any) -> bool:
    return all(layer.built for layer in model._flatten_layers())


def fit_steps_per_execution(model: Any, session: Session, steps: int) -> None:
    """Keras runs whole executions: with 2 of them per 3 steps it would run a fourth step."""
    asked = model.steps_per_execution
    fitting = next(n for n in range(min(asked, steps), 0, -1) if steps % n == 0)
    if fitting == asked:
        return
    model.steps_per_execution = fitting
    if session.world.is_chief:
        get_logger().warning(
            "steps_per_execution is %d instead of %d: an epoch has %d steps, which is no "
            "multiple of it. The result is the same.", fitting, asked, steps)


def compare_settings(collective: Collective, config: TrainConfig, data: Mapping[str, Any],
                     optimizers: Sequence[Any], callbacks: Sequence[Any] = ()) -> None:
    """Refuse to train if settings, data or callbacks differ between ranks. All ranks."""
    mine: dict[str, Any] = {**settings_of(config), **data}
    mine["callbacks"] = ", ".join(type(c).__name__ for c in callbacks) or "none"
    # A rank that made one more distributed optimizer would wait for the others forever.
    mine["order of distributed optimizers"] = ", ".join(
        hooked.name for leaf in [*optimizers, *keras_seam.leaf_optimizers(optimizers)]
        if (hooked := state_of(leaf)) is not None)
    refuse_differences(collective.gather_objects(mine))

"""`TrainPlan`: what a run is going to do, as a value that is printed before it does it."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.config import TrainConfig
from hvdtrain.data.batch_plan import BatchPlan
from hvdtrain.data.shard import ShardPlan
from hvdtrain.data.source import Source
from hvdtrain.data.stream import StreamSource
from hvdtrain.data.stream_plan import StreamPlan
from hvdtrain.optim import keras_seam
from hvdtrain.optim.distributed import state_of
from hvdtrain.session import Session
from hvdtrain.settings import refuse_differences, settings_of
from hvdtrain.train.schedule import LrPlan, base_rate, plan_learning_rate
from hvdtrain.world import World


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """The plan of one run, equal on all ranks."""

    job: str
    shards: Any
    """A `ShardPlan`, or the `StreamPlan` or `BatchPlan` that stands for it."""
    lr: LrPlan
    base_rate: str
    optimizer: str
    config: TrainConfig
    validation_samples: int | None
    """None: not known."""
    ranks: tuple[str, ...]
    """For each rank: host and devices."""
    collective: str
    parameters: int
    party: str = "rank"
    """What computes the gradient of one batch, in words."""
    details: tuple[tuple[str, str], ...] = ()
    """Name and text of facts of another engine, in place of the collective."""

    def render(self) -> str:
        """The plan as text, one fact per line."""
        shards, config = self.shards, self.config
        rows = [
            ("job", f"{self.job}: {self.parameters:,} parameters, {self.optimizer}"),
            ("ranks", f"{len(self.ranks)}: {_group(self.ranks)}"),
            *(self.details or (("collective", self.collective),)),
            *((("gradients", text),) if (text := _gradients(config)) else ()),
            ("batch", shards.batch_text(self.party)),
            ("data", f"{shards.data_text(self.party)}; {self._validation}"),
            ("steps", f"{'not known' if shards.steps is None else shards.steps} per epoch"
                      f"{' on every rank' if self.party == 'rank' else ''}"
                      f", {config.epochs} epoch{'s' if config.epochs > 1 else ''}"),
            ("learning rate", f"{self.lr.describe(self.base_rate)} ({config.lr_scaling})"),
            ("output", str(config.output) if config.output else "nothing is written"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)

    @property
    def _validation(self) -> str:
        if self.validation_samples is None:
            return "validation data of a number that is not known"
        return f"{self.validation_samples:,} for validation"


def make_plan(model: Any, shards: ShardPlan | StreamPlan | BatchPlan, config: TrainConfig,
              *, job: str, validation_samples: int | None, ranks: tuple[str, ...],
              collective: str = "", party: str = "rank",
              details: tuple[tuple[str, str], ...] = ()) -> TrainPlan:
    """The plan of a compiled, built model. Before its learning rate is scaled.

    Args:
        model: The model.
        shards: Which samples belong to which step, and how many gradients an update has.
        config: How to train.
        job: String, its name.
        validation_samples: Integer, samples of the validation data; None: not known.
        ranks: As the field of `TrainPlan`; so are the others.
        collective: See there.
        party: See there.
        details: See there.
    """
    optimizers = keras_seam.optimizers_of(model)
    return TrainPlan(
        job=job, shards=shards, config=config,
        optimizer=", ".join(type(o).__name__ for o in optimizers),
        lr=plan_learning_rate(shards.growth, config.lr_scaling, config.warmup_epochs, shards.steps),
        base_rate=base_rate(optimizers),
        parameters=sum(int(np.prod(v.shape)) for v in model.weights),
        validation_samples=validation_samples,
        ranks=ranks, collective=collective, party=party, details=details)


def verbosity(world: World, asked: str | int = "auto") -> int:
    """`verbose` of Keras for this rank: a bar for a person, lines for a program, else nothing.

    Open MPI gives the chief a terminal of its own even where the output goes to a file.

    Args:
        world: This rank.
        asked: `verbose` of Keras' `fit`; the chief does as it says.
    """
    if asked != "auto" and world.is_chief:
        return int(asked)
    person = sys.stdout.isatty() and world.starter == "single"
    return 0 if not world.is_chief else 1 if person else 2


def _gradients(config: TrainConfig) -> str:
    """What is done with gradients beside the mean over all ranks; empty for nothing."""
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
    groups: list[tuple[int, int, str]] = []
    for rank, text in enumerate(ranks):
        if groups and groups[-1][2] == text:
            groups[-1] = (groups[-1][0], rank, text)
        else:
            groups.append((rank, rank, text))
    return "; ".join(f"{a if a == b else f'{a}-{b}'} on {text}" for a, b, text in groups)


def compare_settings(collective: Collective, config: TrainConfig, data: Mapping[str, Any],
                     optimizers: Sequence[Any], callbacks: Sequence[Any] = ()) -> None:
    """Refuse to train where ranks were given different settings or data. All ranks.

    Args:
        collective: The collective of the run.
        config: The settings.
        data: What is known of the training data, by name.
        optimizers: The model's.
        callbacks: The user's. Those of Keras that write files run on the chief by themselves.

    Raises:
        ConfigError: On every rank, naming the first rank and setting that differ.
    """
    mine: dict[str, Any] = {**settings_of(config), **data}
    mine["callbacks"] = ", ".join(type(c).__name__ for c in callbacks) or "none"
    # A rank that made one distributed optimizer more would wait for the others for ever.
    mine["order of distributed optimizers"] = ", ".join(
        hooked.name for leaf in [*optimizers, *keras_seam.leaf_optimizers(optimizers)]
        if (hooked := state_of(leaf)) is not None)
    everyone = collective.gather_objects(mine)
    refuse_differences(everyone, [f"rank {rank}" for rank in range(len(everyone))])


def facts_of(train: Source | StreamSource) -> dict[str, Any]:
    """What must be equal on all ranks, by name: finds ranks with other data or order."""
    facts: dict[str, Any] = {"number of training samples": len(train)}
    if isinstance(train, Source):  # a rank may read a share of a stream that no other has
        facts["checksum of three training samples"] = _sample_checksum(train)
    return facts


def _sample_checksum(train: Source) -> int:
    """Of the first, the middle and the last sample."""
    rows = np.asarray([0, len(train) // 2, len(train) - 1])
    checksum = 0
    for array in tf.nest.flatten(train.read(rows)):
        if array.dtype.kind not in "OUS":
            checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
    return checksum


def rank_texts(session: Session) -> tuple[str, ...]:
    """Host and devices of every rank. All ranks."""
    mine = f"{session.world.host} ({session.devices})"
    return tuple(session.collective.gather_objects(mine))

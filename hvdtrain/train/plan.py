"""`TrainPlan`: what a run is going to do, as a value that is printed before it does it."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.config import TrainConfig
from hvdtrain.data.shard import ShardPlan
from hvdtrain.data.source import Source
from hvdtrain.errors import ConfigError
from hvdtrain.optim.distributed import state_of
from hvdtrain.optim.keras_seam import leaf_optimizers
from hvdtrain.session import Session
from hvdtrain.train.schedule import LrPlan


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """The plan of one run, equal on all ranks."""

    job: str
    shards: ShardPlan
    lr: LrPlan
    base_rate: str
    optimizer: str
    config: TrainConfig
    validation_samples: int
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
            ("batch", f"{shards.batch_per_rank} per {self.party} x {shards.size} = "
                      f"{shards.global_batch} global"),
            ("data", self._data_line()),
            ("steps", f"{shards.steps} per epoch{' on every rank' if self.party == 'rank' else ''}"
                      f", {config.epochs} epoch{'s' if config.epochs > 1 else ''}"),
            ("learning rate", f"{self.lr.describe(self.base_rate)} ({config.lr_scaling})"),
            ("output", str(config.output) if config.output else "nothing is written"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)

    def _data_line(self) -> str:
        shards = self.shards
        change = (f", {shards.padded} repeated" if shards.padded else
                  f", {shards.dropped} left out" if shards.dropped else "")
        last = (f", last batch {shards.last_batch_per_rank} per {self.party}"
                if shards.last_batch_per_rank else "")
        order = f"reshuffled each epoch (seed {shards.seed})" if shards.shuffle else "in order"
        return (f"{shards.samples:,} samples, {order}{last}{change}; "
                f"{self.validation_samples:,} for validation")


def _group(ranks: tuple[str, ...]) -> str:
    """Ranks with the same text together: `0-3 hosta: CPU, 2 CPU threads`."""
    groups: list[tuple[int, int, str]] = []
    for rank, text in enumerate(ranks):
        if groups and groups[-1][2] == text:
            groups[-1] = (groups[-1][0], rank, text)
        else:
            groups.append((rank, rank, text))
    return "; ".join(f"{a if a == b else f'{a}-{b}'} on {text}" for a, b, text in groups)


def compare_settings(collective: Collective, config: TrainConfig, train: Source,
                     optimizer: Any) -> None:
    """Refuse to train where ranks were given different settings or data. All ranks.

    Raises:
        ConfigError: On every rank, naming the first rank and setting that differ.
    """
    mine: dict[str, Any] = {f.name: str(getattr(config, f.name))
                            for f in dataclasses.fields(config)}
    mine["number of training samples"] = len(train)
    mine["checksum of three training samples"] = _sample_checksum(train)
    # A rank that made one distributed optimizer more would wait for the others for ever.
    mine["order of distributed optimizers"] = ", ".join(
        hooked.name for leaf in [optimizer, *leaf_optimizers(optimizer)]
        if (hooked := state_of(leaf)) is not None)
    everyone = collective.gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                raise ConfigError(
                    f"The ranks were given different settings: {name} is {value} on rank 0 and "
                    f"{theirs[name]} on rank {rank}. Give every rank the same command line, job "
                    "file and data.")


def _sample_checksum(train: Source) -> int:
    """Of the first, the middle and the last sample: finds ranks with other data or order."""
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

"""What a run trains on or evaluates: a feed knows an epoch's steps and gives Keras the batches.

`SourceFeed` is for samples that hvdtrain reads (`Source`, `StreamSource`, `by_file`); a
`data.keras_adapters.RankAdapter` is the feed for what Keras' `fit` takes.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Array, Collective
from hvdtrain.config import TrainConfig
from hvdtrain.data.by_file import FileShards
from hvdtrain.data.keras_adapters import RankAdapter
from hvdtrain.data.pipeline import training_dataset
from hvdtrain.data.plans import ShardPlan, StreamPlan, in_turn
from hvdtrain.data.source import ArraySource, Source, Structure, check_source, one_sample
from hvdtrain.data.stream import StreamSource, stream_dataset
from hvdtrain.errors import DataError
from hvdtrain.optim import keras_model
from hvdtrain.runtime.progress import Progress
from hvdtrain.session import Session


class SourceFeed:
    """Samples that hvdtrain reads, on each rank only its own.

    `batch_ranks`: a global batch has the samples of as many ranks, where these are others.
    """

    weighted = False  # whether the batches of an evaluation are pairs `(weight, batch)`

    def __init__(self, source: Source | StreamSource, session: Session, config: TrainConfig,
                 batch_ranks: int | None = None) -> None:
        if isinstance(source, StreamSource) and config.divide == "batches":
            source.divide_made()
        check_source(source, streams=True)
        self._source = source
        self._session = session
        self._config = config
        self._batch_ranks = batch_ranks
        self._plan: Any = None

    def plan(self, model: Any) -> Any:
        """The steps of a training epoch. All ranks, before anything else."""
        world, config = self._session.world, self._config
        if not isinstance(self._source, StreamSource):
            fixed = keras_model.fixed_batch(model) is not None
            self._plan = self._shards(
                seed=config.seed or 0, shuffle=config.shuffle, whole_batches=fixed,
                remainder=config.remainder_as("pad" if fixed else "join"))
        elif (config.batch_global or 0) % world.size and self._batch_ranks is None:
            raise DataError(f"{self._source.name}: a stream is shared sample by sample, so that "
                            f"the global batch must divide by {world.size} ranks. Received: "
                            f"{config.batch_global}")
        else:
            self._plan = self._steps(
                seed=config.seed or 0,
                growth=1 if config.batch_global else self._batch_ranks or world.size,
                shuffle=config.shuffle and isinstance(self._source, FileShards),
                stream_order=self._source.order)
        return self._plan

    def _shards(self, **how: Any) -> ShardPlan:
        world, config, ranks = self._session.world, self._config, self._batch_ranks
        if ranks not in (None, world.size) and config.batch_global is None:
            how |= {"batch_global": self._kept_batch, "batch_ranks": ranks}
        return ShardPlan(**{
            "samples": len(self._source), "rank": world.rank, "size": world.size,
            "batch_per_rank": -(-self._kept_batch // world.size),
            "batch_global": config.batch_global, **how})

    @property
    def _kept_batch(self) -> int:
        """Samples per step over all ranks."""
        config, ranks = self._config, self._batch_ranks or self._session.world.size
        return config.batch_global or config.rank_batch(ranks) * ranks

    def _steps(self, **how: Any) -> StreamPlan:
        # A stream is shared sample by sample: other ranks may only nearly have the global batch.
        world = self._session.world
        return StreamPlan(counts=self._counts(), rank=world.rank,
                          batch_per_rank=max(1, round(self._kept_batch / world.size)), **how)

    def _counts(self) -> tuple[int, ...]:
        """Samples of each rank's share of a stream; the first call counts on all ranks."""
        source = self._source
        assert isinstance(source, StreamSource)  # noqa: S101
        if source.counts:
            return source.counts
        with self._session.progress.phase("counting the samples of the stream"):
            return source.count_everywhere(self._session.collective)

    def compare(self, collective: Collective) -> dict[str, Any]:
        """What must be equal on all ranks, by name. All ranks."""
        source = self._source
        if isinstance(source, StreamSource):
            self._counts()
        facts: dict[str, Any] = {"number of training samples": len(source)}
        if isinstance(source, Source):  # a rank may read a share of a stream that no other has
            rows = np.asarray([0, len(source) // 2, len(source) - 1])
            checksum = 0
            for array in tf.nest.flatten(source.read(rows)):
                if array.dtype.kind not in "OUS":
                    checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
            facts["checksum of three training samples"] = checksum
        return facts

    def one_sample(self) -> Structure:
        """One sample, with a first axis of length 1."""
        return one_sample(self._source)

    def training(self, epoch: int, step: int, *, begun: int | None) -> dict[str, Any]:
        """Arguments of `fit` from a step on; a former run has trained from epoch `begun` to it."""
        # It never ends, so that Keras does not run a step on no data.
        batches = self._batches(self._plan, first_epoch=epoch, first_step=step)
        return {"x": batches, "steps_per_epoch": self._plan.steps, "shuffle": False}

    def evaluation(self) -> Any:
        """This rank's batches for Keras' `evaluate`; sets `weighted`. All ranks."""
        # A step has one process' batch; a rank without a sample in the last gets one not counted.
        plan: Any = (self._steps() if isinstance(self._source, StreamSource) else
                     self._shards(shuffle=False, remainder="join", for_evaluation=True))
        self.weighted = plan.uneven
        return self._batches(plan, epochs=1).apply(
            tf.data.experimental.assert_cardinality(plan.steps))

    def _batches(self, plan: Any, **which: Any) -> Any:
        source, world = self._source, self._session.world
        if isinstance(source, FileShards):
            source = source.shard(world.rank, world.size)
        if isinstance(source, StreamSource):
            return stream_dataset(source, plan, **which)
        return training_dataset(watched(source, self._session.progress), plan, **which)

    @property
    def samples(self) -> int | None:
        """Samples of all ranks; None where they were not counted."""
        return sum(self._counts()) if isinstance(self._source, StreamSource) else len(self._source)

    def places(self, counts: Array) -> Array:
        """The samples' places in the data, rank by rank; `counts` has shape `(ranks, steps)`."""
        if not isinstance(self._source, StreamSource):
            return in_turn(counts)
        return np.concatenate([self._source.numbers(rank, len(counts))
                               for rank in range(len(counts))])

    def on_steps_done(self) -> None:
        """Called when a training epoch has ended."""


Feed = SourceFeed | RankAdapter


class _WatchedSource(Source):
    def __init__(self, source: Source, progress: Progress) -> None:
        self.name = source.name
        self._source = source
        self._progress = progress

    def __len__(self) -> int:
        return len(self._source)

    @property
    def signature(self) -> Structure:
        return self._source.signature

    def read(self, rows: Array) -> Structure:
        with self._progress.busy("reading data"):
            return self._source.read(rows)


def watched(source: Source, progress: Progress) -> Source:
    """A source that reports reading, so that a rank without data is named; arrays stay as is."""
    if isinstance(source, ArraySource) and source.arrays is not None:
        return source
    return _WatchedSource(source, progress)

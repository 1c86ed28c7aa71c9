"""What a run trains on or evaluates: samples by number, streams, or what Keras' `fit` takes.

A feed knows the steps of an epoch and gives Keras' own loop this rank's batches. `SourceFeed`
stands for samples that hvdtrain reads (`Source`, `StreamSource`, `by_file`), `KerasFeed` for
arrays, data sets and generators as they are given to Keras.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import tensorflow as tf

from hvdtrain.config import TrainConfig
from hvdtrain.data.file_shares import FileShares, share_dataset
from hvdtrain.data.keras_adapters import RankAdapter
from hvdtrain.data.pipeline import training_dataset
from hvdtrain.data.shard import ShardPlan
from hvdtrain.data.source import Source, Structure, check_source
from hvdtrain.data.stream import StreamSource, one_sample, stream_dataset
from hvdtrain.data.stream_plan import StreamPlan
from hvdtrain.errors import DataError
from hvdtrain.optim import keras_model
from hvdtrain.session import Session
from hvdtrain.train.plan import facts_of
from hvdtrain.train.reading import watched


class Feed(ABC):
    """Data of one run, as one rank reads them."""

    weighted = False
    """Whether the batches of an evaluation are pairs `(weight, batch)`."""

    @abstractmethod
    def plan(self, model: Any) -> Any:
        """The steps of an epoch of training. All ranks; before anything else."""

    @abstractmethod
    def compare(self) -> dict[str, Any]:
        """Refuse data that differ between the ranks. All ranks.

        Returns:
            What must be equal on all ranks, by name.
        """

    @abstractmethod
    def one_sample(self) -> Structure:
        """One sample, with a first axis of length 1."""

    @abstractmethod
    def training(self, epoch: int, step: int, *, resumed: bool) -> dict[str, Any]:
        """Arguments of Keras' `fit` for this rank's batches.

        Args:
            epoch: Integer, epochs that were done.
            step: Integer, steps of the next one that were done.
            resumed: Boolean, whether a run of before has trained on their data.
        """

    @abstractmethod
    def evaluation(self) -> Any:
        """This rank's batches for Keras' `evaluate`. All ranks; sets `weighted`."""

    @property
    @abstractmethod
    def samples(self) -> int | None:
        """Samples of all ranks; None where they were not counted."""

    def on_epoch_end(self) -> None:  # noqa: B027 - most feeds have nothing to do
        """An epoch of training has ended."""


class SourceFeed(Feed):
    """Samples that hvdtrain reads: each rank reads its own only.

    Args:
        source: A `Source`, a `StreamSource` or what `by_file` returns.
        session: This rank.
        config: How to train.
    """

    def __init__(self, source: Source | StreamSource, session: Session,
                 config: TrainConfig) -> None:
        if isinstance(source, StreamSource) and config.divide == "batches":
            source.divide_made()
        check_source(source, streams=True)
        self._source = source
        self._session = session
        self._config = config
        self._plan: Any = None

    def plan(self, model: Any) -> Any:
        """See `Feed.plan`."""
        self._plan = self._make_plan(model)
        return self._plan

    def _make_plan(self, model: Any) -> ShardPlan | StreamPlan:
        source, world, config = self._source, self._session.world, self._config
        if isinstance(source, StreamSource):
            if (config.batch_global or 0) % world.size:
                raise DataError(f"{source.name}: a stream is shared sample by sample, so that the "
                                f"global batch must divide by {world.size} ranks. Received: "
                                f"{config.batch_global}")
            return StreamPlan(counts=self._counts(source), rank=world.rank,
                              batch_per_rank=config.rank_batch(world.size), seed=config.seed or 0,
                              growth=1 if config.batch_global else world.size,
                              shuffle=config.shuffle and isinstance(source, FileShares),
                              stream_order=source.order)
        fixed = keras_model.fixed_batch(model) is not None
        return ShardPlan(
            samples=len(source), rank=world.rank, size=world.size,
            batch_per_rank=config.rank_batch(world.size), batch_global=config.batch_global,
            seed=config.seed or 0, shuffle=config.shuffle,
            remainder=config.remainder_as("pad" if fixed else "join"), whole_batches=fixed)

    def _counts(self, source: StreamSource) -> tuple[int, ...]:
        if source.counts:
            return source.counts
        with self._session.progress.phase("counting the samples of the stream"):
            return source.count_everywhere(self._session.collective)

    def compare(self) -> dict[str, Any]:
        """See `Feed.compare`."""
        if isinstance(self._source, StreamSource):
            self._counts(self._source)
        return facts_of(self._source)

    def one_sample(self) -> Structure:
        """See `Feed.one_sample`."""
        return one_sample(self._source)

    def training(self, epoch: int, step: int, *, resumed: bool) -> dict[str, Any]:
        """See `Feed.training`."""
        del resumed  # the order depends on the number of the epoch
        source, world, progress = self._source, self._session.world, self._session.progress
        where = {"first_epoch": epoch, "first_step": step}
        if isinstance(source, FileShares):
            share = watched(source.share(world.rank, world.size), progress)
            batches = share_dataset(share, self._plan, **where)
        elif isinstance(source, StreamSource):
            batches = stream_dataset(source, self._plan, **where)
        else:
            batches = training_dataset(watched(source, progress), self._plan, **where)
        # It never ends, so that Keras does not run a step on no data.
        return {"x": batches, "steps_per_epoch": self._plan.steps, "shuffle": False}

    def evaluation(self) -> Any:
        """See `Feed.evaluation`.

        The ranks take the same steps, in each of which they have the samples of one batch of one
        process. A rank that has none in the last one goes on with a sample that does not count.
        """
        source, world = self._source, self._session.world
        batch = self._config.rank_batch(world.size)
        plan: Any
        if isinstance(source, StreamSource):
            plan = StreamPlan(counts=self._counts(source), rank=world.rank, batch_per_rank=batch)
            dataset = (share_dataset(source.share(world.rank, world.size), plan, epochs=1)
                       if isinstance(source, FileShares) else
                       stream_dataset(source, plan, epochs=1))
        else:
            plan = ShardPlan(samples=len(source), rank=world.rank, size=world.size,
                             batch_per_rank=batch, batch_global=self._config.batch_global,
                             shuffle=False, remainder="join", for_evaluation=True)
            dataset = training_dataset(source, plan, epochs=1)
        self.weighted = plan.uneven
        return dataset.apply(tf.data.experimental.assert_cardinality(plan.steps))

    @property
    def samples(self) -> int | None:
        """See `Feed.samples`."""
        if isinstance(self._source, StreamSource):
            return sum(self._counts(self._source))
        return len(self._source)


class KerasFeed(Feed):
    """Arrays, data sets and generators as Keras takes them: each rank has its part of a batch.

    Args:
        adapter: What was given.
        session: This rank.
        name: String for messages, `"training"` or `"validation"`.
        steps: Integer, the steps of an epoch where they were given.
    """

    def __init__(self, adapter: RankAdapter, session: Session, name: str,
                 steps: int | None = None) -> None:
        self._adapter = adapter
        self._session = session
        self._name = name
        self._steps = steps
        self.weighted = adapter.weighted

    def plan(self, model: Any) -> Any:
        """See `Feed.plan`."""
        return self._adapter.plan(self._steps)

    def check(self, model: Any) -> None:
        """Refuse batches that cannot be divided, or whose parts the model does not take.

        Raises:
            DataError: On every rank, saying what to do instead.
        """
        plan, size = self._adapter.plan(self._steps), self._session.world.size
        batch = plan.global_batch
        if batch is None or size == 1:
            return
        per_rank = "hvdtrain.TrainConfig(batch=\"per_rank\")"
        if batch < size and self._name == "training":
            raise DataError(
                f"The batch of {batch} samples is divided over {size} ranks; every rank needs at "
                f"least one. Give batch_size={size} or more, start at most {batch} ranks, or let "
                f"batch_size be that of each rank: {per_rank}.")
        fixed = keras_model.fixed_batch(model)
        left = 0 if plan.samples is None else plan.samples % batch
        if fixed is not None and fixed * size != batch:
            raise DataError(
                f"The model takes batches of {fixed} samples only, and the batch of {batch} is "
                f"divided over {size} ranks. Let batch_size be that of each rank ({per_rank}), or "
                "make the model without a fixed batch.")
        if fixed is not None and left:
            raise DataError(
                f"The model takes batches of {fixed} samples only, and of {plan.samples} samples "
                f"the last one has {left} over all ranks. Leave them out, or make the model "
                "without a fixed batch.")

    def compare(self) -> dict[str, Any]:
        """See `Feed.compare`."""
        return {f"steps of the {self._name} data": self._steps,
                **self._adapter.compare(self._session.collective, self._name)}

    def one_sample(self) -> Structure:
        """See `Feed.one_sample`."""
        return self._adapter.one_sample()

    def training(self, epoch: int, step: int, *, resumed: bool) -> dict[str, Any]:
        """See `Feed.training`; with `initial_epoch` alone Keras begins with the first data."""
        if resumed:
            self._adapter.begin_at(epoch, step, steps_per_epoch=self._steps)
        return {"x": self._adapter, "steps_per_epoch": self._steps}

    def evaluation(self) -> Any:
        """See `Feed.evaluation`."""
        return self._adapter

    @property
    def samples(self) -> int | None:
        """See `Feed.samples`."""
        found: int | None = self._adapter.plan(self._steps).samples
        return found

    def on_epoch_end(self) -> None:
        """See `Feed.on_epoch_end`."""
        self._adapter.on_steps_done()



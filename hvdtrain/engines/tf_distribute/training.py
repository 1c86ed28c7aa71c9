"""One process' training under a strategy: a `KerasRun` in which TensorFlow adds the gradients."""
# TensorFlow shards no data: every batch is placed.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import Choice
from hvdtrain.collectives.base import Collective
from hvdtrain.collectives.single import SingleCollective
from hvdtrain.config import TrainConfig
from hvdtrain.data.pipeline import evaluation_dataset, training_dataset
from hvdtrain.data.plans import ShardPlan, evaluation_rows
from hvdtrain.data.source import Source, check_source
from hvdtrain.engines.tf_distribute import patches, strategies
from hvdtrain.engines.tf_distribute.choice import StrategyChoice, choose_strategy, find_cluster
from hvdtrain.errors import DataError
from hvdtrain.job import Job
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.runtime.progress import IDLE, Progress
from hvdtrain.runtime.watchdog import start_watchdog
from hvdtrain.session import Session
from hvdtrain.train.coordinator import Coordinator
from hvdtrain.train.feed import SourceFeed, watched
from hvdtrain.train.fit import KerasRun
from hvdtrain.train.plan import TrainPlan, build_model, compare_settings, fit_steps_per_execution
from hvdtrain.train.run import RunResult, build_job
from hvdtrain.world import World

_STEPS_IN_ONE_CALL = ("hierarchical_copy", "reduction_to_one_device")
"""Ways to add gradients that work in Keras' loop over several steps."""


@dataclass(frozen=True, kw_only=True)
class StrategySession(Session):
    """A process that has met the others under its strategy."""

    strategy: Any
    chosen: StrategyChoice

    @property
    def replicas(self) -> int:
        """Replicas of all processes."""
        return int(self.strategy.num_replicas_in_sync)

    @property
    def replicas_here(self) -> int:
        """Replicas in this process."""
        return self.replicas // self.world.size


@contextmanager
def open_strategy(config: TrainConfig, world: World,
                  environ: Mapping[str, str]) -> Iterator[StrategySession]:
    """Make the strategy and meet the other processes. All processes."""
    choice = choose_strategy(
        config.tf, world, gpus=strategies.visible_gpus(config.tf, world, environ))
    several = world.size > 1
    strategy = strategies.make_strategy(
        choice, world, find_cluster(world, environ) if several else None)
    made: Collective = (strategies.StrategyCollective(strategy, world.rank) if several
                        else SingleCollective())
    progress = Progress()
    watchdog = start_watchdog(world, progress, made.gather_objects,
                              hang_timeout_s=config.hang_timeout_s, environ=environ)
    with patches.applied(strategy):
        yield StrategySession(
            world=world, collective=made, devices=", ".join(choice.devices), progress=progress,
            choice=Choice(name=choice.name, reason=config.tf.strategy), watchdog=watchdog,
            strategy=strategy, chosen=choice)
    progress.enter(IDLE)
    made.barrier()
    if watchdog is not None:
        watchdog.close()


@dataclass(frozen=True, kw_only=True)
class ProcessPlan(ShardPlan):
    """A process' samples, in each step replica by replica; `rank` and `size` count processes."""
    # `batch_per_rank` is the batch of all its replicas.

    replicas: int

    @property
    def last_batch_per_rank(self) -> int:
        """Samples in the last, smaller step: equal on the replicas."""
        left, everyone = self.samples % self.global_batch, self.size * self.replicas
        each = -(-left // everyone) if self.remainder == "pad" else left // everyone
        return each * self.replicas


def training_input(strategy: Any, source: Source, shards: ShardPlan, *, replicas_here: int,
                   epoch: int, step: int) -> Any:
    """A distributed dataset without end: each step has a batch for each replica of this process."""
    # The rank in `shards` is that of this process' first replica.
    together = ProcessPlan(
        samples=shards.samples, rank=shards.rank // replicas_here,
        size=shards.size // replicas_here, batch_per_rank=shards.batch_per_rank * replicas_here,
        seed=shards.seed, shuffle=shards.shuffle, remainder=shards.remainder,
        replicas=replicas_here)
    in_turn = training_dataset(source, together, first_epoch=epoch, first_step=step)
    if replicas_here > 1:
        def cut(tensor: Any) -> Any:
            """Cut a batch of this process into one per replica, along a new first axis."""
            each = None if tensor.shape[0] is None else tensor.shape[0] // replicas_here
            parts = tf.reshape(
                tensor, tf.concat([[replicas_here, -1], tf.shape(tensor)[1:]], axis=0))
            parts.set_shape([replicas_here, each, *tensor.shape[1:]])
            return parts
        # `map` hands over the elements of a tuple, and anything else alone.
        in_turn = in_turn.map(lambda *batch: tf.nest.map_structure(
            cut, batch[0] if len(batch) == 1 else batch)).unbatch().prefetch(replicas_here)
    # Otherwise all workers would agree at each step whether there is another batch.
    endless = in_turn.apply(tf.data.experimental.assert_cardinality(
        tf.data.INFINITE_CARDINALITY))
    return strategy.distribute_datasets_from_function(lambda context: endless)


class StrategyFeed(SourceFeed):
    """A process' samples: each of its replicas has a batch in each step."""

    _source: Source
    _session: StrategySession

    def __init__(self, source: Source, session: StrategySession, config: TrainConfig) -> None:
        check_source(source)
        super().__init__(source, session, config)

    def plan(self, model: Any) -> ShardPlan:
        config, session = self._config, self._session
        shards = self._plan = ShardPlan(
            samples=len(self._source), rank=session.world.rank * session.replicas_here,
            size=session.replicas, batch_per_rank=config.rank_batch(1), seed=config.seed or 0,
            shuffle=config.shuffle, remainder=config.remainder_as("pad"))
        return shards

    def training(self, epoch: int, step: int, *, begun: int | None) -> dict[str, Any]:
        batches = training_input(
            self._session.strategy, watched(self._source, self._session.progress), self._plan,
            replicas_here=self._session.replicas_here, epoch=epoch, step=step)
        return {"x": batches, "steps_per_epoch": self._plan.steps, "shuffle": False}

    def evaluation(self) -> tuple[Any, int]:
        """This process' share of validation data, each sample once, and its steps (0: empty)."""
        # A distributed dataset, repeated. Batches differ by one sample at most: none is empty.
        source, session = self._source, self._session
        here, batch = session.replicas_here, self._config.rank_batch(1)
        rows = evaluation_rows(len(source), session.world.rank, session.world.size)
        if len(rows) == 0:
            return None, 0
        if len(rows) < here:
            raise DataError(
                f"There are {len(rows)} validation samples for {here} replicas; every "
                f"replica needs at least one. Give at least {here} validation samples.")
        steps = min(-(-len(rows) // (batch * here)), len(rows) // here)
        size, larger = divmod(len(rows), steps * here)
        cut = larger * (size + 1)
        dataset = evaluation_dataset(source, rows[cut:], size)
        if cut:
            dataset = evaluation_dataset(source, rows[:cut], size + 1).concatenate(dataset)
        repeated = dataset.repeat()
        return session.strategy.distribute_datasets_from_function(lambda context: repeated), steps


@dataclass(kw_only=True)
class StrategyRun(KerasRun):
    """A run of engine `tf`."""

    session: StrategySession
    validation: StrategyFeed | None = None

    @property
    def holds_metrics(self) -> bool:
        """Every process restores all of the metrics: the strategy divides what is assigned."""
        return True

    @property
    def metrics_collective(self) -> Collective:
        """The strategy sums metrics wherever a variable of them is read."""
        return SingleCollective()

    def prepare(self) -> TrainPlan:
        model, config, session = self.model, self.config, self.session
        with session.strategy.scope():
            if getattr(model, "optimizer", None) is not None:
                build_model(model, self.data.one_sample)
        patches.hook_optimizer(model, session.strategy)
        kind = type(model)
        own = [name for name in ("train_step", "compute_loss")
               if getattr(kind, name) is not getattr(keras.Model, name)]
        if own and session.replicas > 1 and session.world.is_chief:
            # What a model computes by itself is not divided by the number of replicas.
            get_logger().warning(
                "%s has a %s of its own. Gradients are added over %d replicas: a loss that it "
                "does not get from its base class must be divided by their number, or the run "
                "is not that of engine allreduce, which averages.", kind.__name__,
                " and a ".join(own), session.replicas)
        compare_settings(session.collective, config, self.data.compare(session.collective),
                         [model.optimizer])
        shards: Any = self.data.plan(model)
        self._fit_execution(shards)
        devices = session.chosen.devices or tuple(
            f"TPU:{number}" for number in range(session.replicas_here))
        texts = session.collective.gather_objects(
            [f"{session.world.host} ({device})" for device in devices])
        return TrainPlan.of(
            model, shards, config, job=self.name, collective=session.chosen.describe(),
            validation_samples=0 if self.validation is None else self.validation.samples,
            ranks=tuple(text for theirs in texts for text in theirs))

    def _fit_execution(self, shards: ShardPlan) -> None:
        """Switch off what the strategy does not support: XLA, and several steps per execution."""
        model, choice = self.model, self.session.chosen
        if choice.name not in ("default", "one_device", "tpu") and model.jit_compile:
            model.jit_compile = False
        if (model.steps_per_execution > 1 and self.session.replicas > 1
                and choice.cross_device not in _STEPS_IN_ONE_CALL):
            model.steps_per_execution = 1
            if self.session.world.is_chief:
                get_logger().warning(
                    "steps_per_execution is 1: strategy %s adds gradients by collectives, which "
                    "do not run within Keras' loop. The result is the same.", choice.name)
        fit_steps_per_execution(model, self.session, shards.steps)
        model.train_function = None

    def build_metrics(self) -> None:
        with self.session.strategy.scope():
            keras_model.build_metrics(self.model, self.data.one_sample())

    @contextmanager
    def installed(self, coordinator: Coordinator) -> Iterator[None]:
        patches.scale_learning_rate(self.model.optimizer, self.plan.lr)
        # Keras would build the model again, which reduces a batch over workers and fails.
        keras_seam.set_on_instance(self.model, "_maybe_symbolic_build", lambda *_, **__: None)
        try:
            yield
        finally:
            object.__delattr__(self.model, "_maybe_symbolic_build")

    def evaluation(self) -> None:
        """Keras' own does not work under every strategy: see `own_evaluation`."""

    def own_evaluation(self) -> Callable[[Any], dict[str, Any]] | None:
        """Evaluate on all replicas, with the callbacks' calls that Keras makes."""
        if self.validation is None:
            return None
        model, (dataset, steps) = self.model, self.validation.evaluation()

        def evaluate(callbacks: Any) -> dict[str, Any]:
            asked, model.steps_per_execution = model.steps_per_execution, 1
            model.make_test_function()
            callbacks.on_test_begin()
            model.reset_metrics()
            iterator, logs = iter(dataset) if steps else None, {}
            for step in range(steps):
                callbacks.on_test_batch_begin(step)
                logs = model.test_function(iterator)
                callbacks.on_test_batch_end(step, logs)
            model.steps_per_execution = asked
            figures = keras_model.pythonify_logs(model._get_metrics_result_or_logs(logs))
            callbacks.on_test_end(figures)
            return figures
        return evaluate

    def average_statistics(self) -> None:
        strategies.average_statistics(self.session.strategy, self.session.collective, self.model)

    def loss_is_finite(self) -> bool:
        loss = next((m for m in self.model.metrics if m.name == "loss"), None)
        return loss is None or bool(np.isfinite(float(loss.result())))

    def compare_weights(self, when: str) -> None:
        super().compare_weights(when)
        if self.config.check_weights:
            strategies.check_replicas_equal(
                self.session.strategy, [*self.model.trainable_variables,
                                        *keras_seam.shared_variables(self.model.optimizer)],
                when=when)


def train_job(job: Job, config: TrainConfig, session: StrategySession, *,
              stop_asked: Callable[[], bool], dry_run: bool) -> RunResult:
    """Build a job's model and data, and train. All processes."""
    model, splits = build_job(job, config, session, session.strategy.scope())
    run = StrategyRun(
        model=model, session=session, config=config, name=job.name, stop_asked=stop_asked,
        callbacks=keras.tree.flatten(list(job.callbacks())),
        data=StrategyFeed(splits.train, session, config),
        validation=(None if splits.validation is None else
                    StrategyFeed(splits.validation, session, config)))
    return run.fit(dry_run=dry_run)

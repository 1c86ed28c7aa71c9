"""One process' training under a strategy.

The module to read after `train.fit`, whose parts it uses wherever they do not depend on how
gradients are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

import hvdtrain
from hvdtrain.collectives.base import Collective
from hvdtrain.collectives.select import Choice
from hvdtrain.collectives.single import SingleCollective
from hvdtrain.config import TrainConfig
from hvdtrain.data.shard import ShardPlan
from hvdtrain.data.source import Source, check_source, splits_of
from hvdtrain.data.stream import one_sample
from hvdtrain.engines.tf_distribute import patches
from hvdtrain.engines.tf_distribute.choice import StrategyChoice, choose_strategy
from hvdtrain.engines.tf_distribute.cluster import find_cluster
from hvdtrain.engines.tf_distribute.collective import StrategyCollective
from hvdtrain.engines.tf_distribute.coordinator import StrategyCoordinator, StrategySaver
from hvdtrain.engines.tf_distribute.inputs import evaluation_input, training_input
from hvdtrain.engines.tf_distribute.optimizer import hook_optimizer, scale_learning_rate
from hvdtrain.engines.tf_distribute.strategies import (
    check_promise,
    make_strategy,
    visible_gpus,
)
from hvdtrain.job import Job
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_model, state
from hvdtrain.runtime.progress import IDLE, Progress
from hvdtrain.runtime.watchdog import start_watchdog
from hvdtrain.session import Session
from hvdtrain.train.callbacks.coordinator import StopAgreement
from hvdtrain.train.callbacks.state import CallbackStates
from hvdtrain.train.callbacks.user import divide
from hvdtrain.train.checkpoint import CheckpointStore
from hvdtrain.train.checkpoint_file import RunState
from hvdtrain.train.fit import RunResult, first_step_of
from hvdtrain.train.loop import RankCallbacks, joined, skip_steps
from hvdtrain.train.output import make_writers, open_output, resume, save_final, save_times
from hvdtrain.train.plan import TrainPlan, compare_settings, facts_of, make_plan, verbosity
from hvdtrain.train.prepare import build_model, fit_steps_per_execution
from hvdtrain.train.reading import watched
from hvdtrain.world import World

_STEPS_IN_ONE_CALL = ("hierarchical_copy", "reduction_to_one_device")
"""Ways to add gradients that work within Keras' loop over several steps."""


@dataclass(frozen=True, kw_only=True)
class StrategyRun:
    """A process that has met the others under a strategy."""

    strategy: Any
    choice: StrategyChoice
    config: TrainConfig
    session: Session

    @classmethod
    @contextmanager
    def open(cls, config: TrainConfig, world: World,
             environ: Mapping[str, str]) -> Iterator[StrategyRun]:
        """Make the strategy and meet the other processes. Every process."""
        gpus = visible_gpus(config.tf, world, environ)
        choice = choose_strategy(config.tf, world, gpus=gpus)
        cluster = find_cluster(world, environ) if world.size > 1 else None
        strategy = make_strategy(choice, cluster)
        check_promise(strategy, choice, world)
        made: Collective = (StrategyCollective(strategy, world.rank) if world.size > 1
                            else SingleCollective())
        progress = Progress()
        watchdog = start_watchdog(world, progress, made.gather_objects,
                                  hang_timeout_s=config.hang_timeout_s, environ=environ)
        session = Session(
            world=world, collective=made, devices=", ".join(choice.devices), progress=progress,
            choice=Choice(name=choice.name, reason=config.tf.strategy), watchdog=watchdog)
        with patches.applied(strategy):
            yield cls(strategy=strategy, choice=choice, config=config, session=session)
        progress.enter(IDLE)
        made.barrier()
        if watchdog is not None:
            watchdog.close()

    @property
    def replicas_here(self) -> int:
        """Replicas in this process."""
        return int(self.strategy.num_replicas_in_sync) // self.session.world.size

    def fit(self, job: Job, *, stop_asked: Callable[[], bool], dry_run: bool) -> RunResult:
        """Build the job's model and data, and train. Every process."""
        progress = self.session.progress
        keras.utils.set_random_seed(self.config.seed or 0)
        with progress.phase("building data and model"):
            splits = splits_of(job.data())
            with self.strategy.scope():
                model = job.model()
        progress.enter("preparing the training")
        train, validation = splits.train, splits.validation
        for source in (train, validation):
            if source is not None:
                check_source(source)
        plan = self._prepare(model, train, validation, job.name)
        if self.session.world.is_chief:
            print(f"hvdtrain plan\n{plan.render()}", flush=True)  # noqa: T201 - promised output
        if dry_run:
            return RunResult(history={}, first_epoch=0, model_path=None)
        store = open_output(self.session, self.config)
        scale_learning_rate(model.optimizer, plan.lr)
        begin = resume(model, self.session, self.config, store, plan)
        state.broadcast(self.session.collective, state.training_state(model))
        with patches.built(model):
            history = self._train(model, train, validation, plan, store, begin,
                                  list(job.callbacks()), stop_asked)
        progress.enter("saving the final model")
        return RunResult(history=history, first_epoch=begin.epoch,
                         model_path=save_final(model, self.session, self.config))

    def _prepare(self, model: Any, train: Source, validation: Source | None,
                 job: str) -> TrainPlan:
        """Everything before the plan is printed: model built, settings compared."""
        config, session = self.config, self.session
        with self.strategy.scope():
            if getattr(model, "optimizer", None) is not None:
                build_model(model, lambda: one_sample(train))
        hook_optimizer(model, self.strategy)
        self._warn_of_own_losses(model)
        compare_settings(session.collective, config, facts_of(train), [model.optimizer])
        shards = ShardPlan(
            samples=len(train), rank=session.world.rank * self.replicas_here,
            size=int(self.strategy.num_replicas_in_sync), batch_per_rank=config.rank_batch(1),
            seed=config.seed or 0, shuffle=config.shuffle, remainder=config.remainder_as("pad"))
        self._fit_execution(model, shards)
        return make_plan(model, shards, config, job=job,
                         validation_samples=0 if validation is None else len(validation),
                         ranks=self._replica_texts(), collective=self.choice.describe())

    def _warn_of_own_losses(self, model: Any) -> None:
        """What a model computes by itself is not divided by the number of replicas."""
        own = [name for name in ("train_step", "compute_loss")
               if getattr(type(model), name) is not getattr(keras.Model, name)]
        if own and self.strategy.num_replicas_in_sync > 1 and self.session.world.is_chief:
            get_logger().warning(
                "%s has a %s of its own. Gradients are added over %d replicas: a loss that it "
                "does not get from its base class must be divided by their number, or the run "
                "is not that of engine allreduce, which averages.", type(model).__name__,
                " and a ".join(own), self.strategy.num_replicas_in_sync)

    def _fit_execution(self, model: Any, shards: ShardPlan) -> None:
        """Switch off what the strategy cannot: XLA, and several steps in one call."""
        if self.choice.name not in ("default", "one_device", "tpu") and model.jit_compile:
            model.jit_compile = False
        single = self.strategy.num_replicas_in_sync == 1
        if (model.steps_per_execution > 1 and not single
                and self.choice.cross_device not in _STEPS_IN_ONE_CALL):
            model.steps_per_execution = 1
            if self.session.world.is_chief:
                get_logger().warning(
                    "steps_per_execution is 1: strategy %s adds gradients by collectives, which "
                    "do not run within Keras' loop. The result is the same.", self.choice.name)
        fit_steps_per_execution(model, self.session, shards.steps)
        model.train_function = None

    def _replica_texts(self) -> tuple[str, ...]:
        """Host and device of every replica, for the plan."""
        devices = self.choice.devices or tuple(
            f"TPU:{number}" for number in range(self.replicas_here))
        mine = [f"{self.session.world.host} ({device})" for device in devices]
        return tuple(text for texts in self.session.collective.gather_objects(mine)
                     for text in texts)

    def _train(self, model: Any, train: Source, validation: Source | None, plan: TrainPlan,
               store: CheckpointStore | None, begin: RunState, callbacks: list[Any],
               stop_asked: Callable[[], bool]) -> dict[str, list[float]]:
        session, config = self.session, self.config
        first_step = first_step_of(model, plan, begin)
        stop = StopAgreement(session.collective, session.progress)
        states, times = CallbackStates(callbacks), save_times(config)
        saver = self._saver(plan, store, states)
        coordinator = StrategyCoordinator(
            self.strategy, collective=session.collective, progress=session.progress,
            lr_plan=plan.lr, evaluate=self._evaluator(model, validation), stop=stop,
            steps_per_epoch=plan.shards.steps,
            check_weights=config.check_weights, stop_on_nan=config.stop_on_nan,
            stop_asked=stop_asked, saver=saver, times=times)
        writers = [] if store is None else make_writers(
            session, plan, store, begin.epoch, first_step, saver=saver, times=times)
        dataset = training_input(
            self.strategy, watched(train, session.progress), plan.shards,
            first_replica=plan.shards.rank, replicas_here=self.replicas_here,
            first_epoch=begin.epoch, first_step=first_step)
        with self.strategy.scope():
            keras_model.build_metrics(model, train.read(np.zeros(1, np.int64)))
        if first_step:
            skip_steps(model, first_step)
        together = RankCallbacks(
            callbacks, divide(callbacks, session), coordinator=coordinator,
            after=[stop, *writers], model=model, collective=session.collective, states=states,
            # Every process restores the whole metrics: the strategy divides what is assigned.
            begin=begin, first_step=first_step, holds_metrics=True,
            verbose=verbosity(session.world), epochs=config.epochs, steps=plan.shards.steps)
        with joined(model, coordinator):
            history = model.fit(
                dataset, epochs=config.epochs, initial_epoch=begin.epoch,
                steps_per_epoch=plan.shards.steps, shuffle=False, callbacks=together)
        if saver is not None:
            saver.wait()
        return dict(history.history)

    def _saver(self, plan: TrainPlan, store: CheckpointStore | None,
               states: CallbackStates) -> StrategySaver | None:
        if store is None:
            return None
        session = self.session
        return StrategySaver(
            self.strategy, collective=session.collective, progress=session.progress, store=store,
            shards=plan.shards, version=hvdtrain.__version__,
            states=states)

    def _evaluator(self, model: Any, validation: Source | None
                   ) -> Callable[[Any], dict[str, Any]] | None:
        """Evaluates on all replicas, with the calls of callbacks that Keras makes."""
        if validation is None:
            return None
        world = self.session.world
        given = evaluation_input(
            self.strategy, validation, process=world.rank, processes=world.size,
            replicas_here=self.replicas_here, batch=self.config.rank_batch(1))

        def evaluate(callbacks: Any) -> dict[str, Any]:
            asked, model.steps_per_execution = model.steps_per_execution, 1
            model.make_test_function()
            callbacks.on_test_begin()
            model.reset_metrics()
            iterator, logs = iter(given.dataset) if given.steps else None, {}
            for step in range(given.steps):
                callbacks.on_test_batch_begin(step)
                logs = model.test_function(iterator)
                callbacks.on_test_batch_end(step, logs)
            model.steps_per_execution = asked
            figures = keras_model.pythonify_logs(model._get_metrics_result_or_logs(logs))
            callbacks.on_test_end(figures)
            return figures
        return evaluate

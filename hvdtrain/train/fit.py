"""Training on Keras' own loop: `KerasRun`, and `AllreduceRun` of the engine allreduce.

Keras calls the callbacks through the `Coordinator`. `KerasRun._joined` gives it the figures of all
ranks after an epoch's last step and after an evaluation, before any callback sees them. In engine
allreduce each rank has its part of every batch, and gradients are averaged.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import TrainConfig
from hvdtrain.data.keras_adapters import RankAdapter
from hvdtrain.data.pipeline import reading_error
from hvdtrain.errors import DataError, OptimizerError
from hvdtrain.job import Job
from hvdtrain.optim import keras_model, keras_seam, state
from hvdtrain.optim.distributed import distribute_as_set, state_of
from hvdtrain.optim.keras_seam import Hidden, hooked
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.optim.sample_weights import weigh_losses, weigh_training
from hvdtrain.optim.sync_batchnorm import sync_batchnorm
from hvdtrain.optim.zero import check_callbacks, share_loaded
from hvdtrain.runtime import phases
from hvdtrain.session import Session
from hvdtrain.train import evaluate, schedule
from hvdtrain.train.callbacks import logs_going_on, restore_backup
from hvdtrain.train.checkpoint import RunState
from hvdtrain.train.coordinator import Coordinator
from hvdtrain.train.elastic import origin_of
from hvdtrain.train.feed import Feed, SourceFeed
from hvdtrain.train.plan import (
    TrainPlan,
    build_model,
    compare_settings,
    fit_steps_per_execution,
    verbosity,
)
from hvdtrain.train.run import Run, RunResult, build_job
from hvdtrain.train.timing import StepClock
from hvdtrain.train.writers import Checkpoints, Figures

_TRACED = "_hvdtrain_traced_step"
_DOORS = ("evaluate", "predict")  # that `hvdtrain.distribute` may have replaced


@dataclass(kw_only=True)
class KerasRun(Run):
    """A run on Keras' loop; `initial_epoch`, `validation_arguments` are those of Keras' `fit`."""

    data: Feed
    initial_epoch: int = 0
    validation: Feed | None = None
    validation_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def first_step(self) -> int:
        """The step of the first epoch to begin with: a whole number of executions."""
        step = super().first_step
        return step - step % int(self.model.steps_per_execution)

    @abstractmethod
    def installed(self, coordinator: Coordinator) -> AbstractContextManager[None]:
        """Everything put on model and optimizers while they train. All ranks."""

    def evaluation(self) -> Any:
        """The batches that Keras' `fit` evaluates after epochs, or None."""
        return None if self.validation is None else self.validation.evaluation()

    def own_evaluation(self) -> Callable[[Any], dict[str, Any]] | None:
        """What the `Coordinator` evaluates instead."""
        return None

    def build_metrics(self) -> None:
        """Create the states of metrics if they are needed before the first step."""
        if self.first_step or self.plan.shards.uneven:
            evaluate.build_metrics(self.model, self.data)

    def train(self) -> Any:
        model, begin, first_step = self.model, self.begin, self.first_step
        arguments = self.data.training(begin.epoch, first_step,
                                       begun=self.initial_epoch if begin.step else None)
        self.build_metrics()
        if (evaluated := self.evaluation()) is not None:
            arguments |= {**self.validation_arguments, "validation_data": evaluated}
        checkpoints = Checkpoints(self)
        coordinator = Coordinator(
            self, checkpoints, [] if self.store is None else [Figures(self), checkpoints],
            evaluate_own=self.own_evaluation(), epoch_ended=self.data.on_steps_done)
        with (self.installed(coordinator), self._joined(coordinator),
              logs_going_on(self.callbacks, begin, self.session)):
            if first_step:
                _skip_steps(model, first_step)
            try:
                history = keras.Model.fit(
                    model, epochs=self.config.epochs, initial_epoch=begin.epoch,
                    callbacks=coordinator, **arguments)
            except tf.errors.OpError as error:
                why = reading_error(error)
                if why is None:
                    raise
                raise DataError(f"This rank cannot read its data. {why}") from None
        checkpoints.wait()
        if self.times and verbosity(self.session.world, self.verbose):
            hosts = [rank.partition(" (")[0] for rank in self.plan.ranks]
            print(phases.table(phases.added(self.times), hosts), flush=True)  # noqa: T201
        return history

    @contextmanager
    def _joined(self, coordinator: Coordinator) -> Iterator[None]:
        """`fit` ends epochs as the coordinator does; a callback's own `evaluate` stays alone."""
        model = self.model
        doors = {name: model.__dict__.pop(name) for name in _DOORS if name in model.__dict__}
        own_evaluations = 0

        def results_of_all(results: Any, logs: Any) -> Any:
            return results(logs) if own_evaluations else coordinator.end_of_loop(logs)

        def evaluate_here(keras_evaluate: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal own_evaluations
            if kwargs.get("_use_cached_eval_dataset") and self.validation is not None:
                with (coordinator.evaluating(), evaluate.evaluating(
                        model, self.validation, self.session.collective)):
                    return keras_evaluate(*args, **kwargs)
            if coordinator.is_evaluating:
                return keras_evaluate(*args, **kwargs)
            own_evaluations += 1
            try:
                return keras_evaluate(*args, **kwargs)
            finally:
                own_evaluations -= 1

        with ExitStack() as stack:
            for name, door in doors.items():
                stack.callback(keras_seam.set_on_instance, model, name, door)
            stack.enter_context(hooked(
                model, evaluate=evaluate_here, _get_metrics_result_or_logs=results_of_all))
            yield


def _skip_steps(model: Any, steps: int) -> None:
    """Let the next calls of the train function do nothing: the data begin later. All ranks."""
    model.make_train_function()
    train: Callable[[Any], Any] = model.train_function
    left = iter(range(steps // model.steps_per_execution))

    def skipping(iterator: Any) -> Any:
        return train(iterator) if next(left, None) is None else {}
    model.train_function = skipping


@dataclass(kw_only=True)
class AllreduceRun(KerasRun):
    """A run of engine `allreduce`."""


    def prepare(self) -> TrainPlan:
        model, session, config = self.model, self.session, self.config
        optimizers = keras_seam.found_optimizers(model)
        if not optimizers:
            raise OptimizerError("The model is not compiled. Call model.compile(optimizer, loss) "
                                 "before training.")
        for optimizer in optimizers:
            distribute_as_set(optimizer, session.collective, ReducerOptions.of(config),
                              zero=config.zero)
        keras_seam.self_test()
        if model.jit_compile:
            model.jit_compile = False
        model.train_function = None
        shards: Any = self.data.plan(model)
        samples = 0 if self.validation is None else self.validation.samples
        compare_settings(session.collective, config, self.data.compare(session.collective),
                         optimizers, self.callbacks)
        if isinstance(self.validation, RankAdapter):
            self.validation.compare(session.collective)
        build_model(model, self.data.one_sample)
        self.origin.check_model(config, model)
        check_callbacks(keras_seam.optimizers_of(model), self.callbacks)
        if config.sync_batch_norm:
            sync_batchnorm(model, session.collective)
        if isinstance(self.data, SourceFeed):
            fit_steps_per_execution(model, session, shards.steps)
        ranks = session.collective.gather_objects(f"{session.world.host} ({session.devices})")
        return TrainPlan.of(
            model, shards, config, job=self.name, validation_samples=samples, ranks=tuple(ranks),
            collective=f"{session.collective.name} ({session.choice.reason})",
            elastic=self.origin.describe(config, session.world.size))

    def load(self) -> RunState:
        model, session = self.model, self.session
        begin = super().load()
        done = self.initial_epoch
        if self.origin.commit is None:
            done = max(done, restore_backup(model, self.callbacks, session))
        share_loaded(keras_seam.optimizers_of(model))
        state.fold_rank_into_seeds(state.training_state(model), session.world.rank)
        if done > begin.epoch:
            return dataclasses.replace(begin, epoch=done, samples=0, step=0)
        return begin

    @contextmanager
    def installed(self, coordinator: Coordinator) -> Iterator[None]:
        model, collective = self.model, self.session.collective
        optimizers = keras_seam.optimizers_of(model)
        traced = self._traced()
        with ExitStack() as stack:
            stack.callback(setattr, model, "train_function", None)
            stack.enter_context(schedule.scaled(optimizers, self.plan.lr))
            stack.enter_context(coordinator.watching_loss(optimizers, traced.first_bad))
            share = weigh_losses(model, collective)
            if self.config.xla:
                stack.enter_context(keras_model.split_step(model))
            stack.enter_context(weigh_training(model, share, weighted=self.plan.shards.uneven))
            stack.enter_context(keras_model.losses_by_samples(model))
            for callback in self.callbacks if self.origin.commit is not None else ():
                if isinstance(callback, keras.callbacks.BackupAndRestore):  # a commit is newer
                    stack.enter_context(hooked(callback, _load_model=lambda _: None))
            self.clock = traced.clock
            stack.enter_context(self.clock.traced(model))
            self.clock.timing(model, is_new=traced.put_on(model))
            yield

    def _traced(self) -> _TracedStep:
        """The step of a former `fit`, if it is still that of the model; else a new one."""
        model, config, lr = self.model, self.config, self.plan.lr
        # `compile` makes another tracker, and distributing an optimizer anew another state.
        of = [getattr(model, "_loss_tracker", None), model, self.session.collective,
              *map(state_of, keras_seam.optimizers_of(model))]
        traced_for = (lr.scale, lr.warmup_steps, self.plan.shards.uneven, self.stops_on_nan,
                      config.xla, config.sync_batch_norm, model.run_eagerly,
                      int(model.steps_per_execution), keras_model.weights_key(model))
        known = model.__dict__.get(_TRACED)
        if known is not None and of[0] is not None and known.value.is_for(of, traced_for):
            return known.value  # type: ignore[no-any-return]
        made = _TracedStep(of=of, traced_for=traced_for,
                           clock=StepClock(self.session.collective, self.session.progress))
        keras_seam.set_on_instance(model, _TRACED, Hidden(made))
        return made


@dataclass(kw_only=True, eq=False)
class _TracedStep:
    """A train function and what its graph refers to, for as long as nothing of this changes."""
    # Keras too traces a step once for all calls of `fit` between two of `compile`.

    of: list[Any]
    traced_for: tuple[Any, ...]
    clock: StepClock
    first_bad: Any = field(default_factory=lambda: tf.Variable(
        -1, dtype=tf.int64, trainable=False))
    function: Any = None

    def is_for(self, of: list[Any], traced_for: tuple[Any, ...]) -> bool:
        return self.traced_for == traced_for and len(of) == len(self.of) and all(
            a is b for a, b in zip(of, self.of, strict=True))

    def put_on(self, model: Any) -> bool:
        """Give a model its train function; returns whether it is new."""
        is_new = self.function is None
        model.train_function = self.function
        model.make_train_function()
        self.function = model.train_function
        return is_new


def run_job(job: Job, config: TrainConfig, session: Session, *,
            stop_asked: Callable[[], bool] = lambda: False, dry_run: bool = False) -> RunResult:
    """Build a job's model and data and train, with `config` in place of its own. All ranks."""
    origin = origin_of(session, config)
    config = origin.settings(config)
    model, splits = build_job(job, config, session)
    run = AllreduceRun(
        model=model, session=session, config=config, name=job.name, stop_asked=stop_asked,
        callbacks=keras.tree.flatten(list(job.callbacks())), origin=origin,
        data=SourceFeed(splits.train, session, config, origin.batch_ranks),
        validation=(None if splits.validation is None else
                    SourceFeed(splits.validation, session, config)))
    return run.fit(dry_run=dry_run)

"""The training of a model on all ranks. The module to read first.

Who owns what:

- the doors: `hvdtrain.fit` in `train.keras_door`, `train.distribute`, jobs in `run`;
- what comes first: `train.prepare`;
- data: `train.feed`; `data.shard.ShardPlan` and `data.part.Part` decide which samples;
- steps in which ranks do not count alike: `optim.shares`;
- gradients: `optim.distributed`, hooked into the model's optimizers;
- learning rate: `train.schedule`;
- the loop itself: Keras; what of ours stands in it: `train.loop`;
- what ranks do together during training: `train.callbacks.coordinator`;
- files: `train.output`, `train.checkpoint`, `train.callbacks.writers`;
- ranks that hang: `runtime.watchdog`, which `session.progress` tells how far this rank is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import TrainConfig
from hvdtrain.data.failures import reading_error
from hvdtrain.errors import DataError
from hvdtrain.optim import keras_model, keras_seam, state
from hvdtrain.optim.shares import share_losses, share_steps
from hvdtrain.optim.sync_batchnorm import sync_batchnorm
from hvdtrain.optim.xla import split_step
from hvdtrain.optim.zero_files import check_use, share_loaded
from hvdtrain.session import Session
from hvdtrain.train import schedule
from hvdtrain.train.callbacks.coordinator import Coordinator, StopAgreement
from hvdtrain.train.callbacks.state import CallbackStates
from hvdtrain.train.callbacks.user import divide, restore_backup
from hvdtrain.train.checkpoint import CheckpointStore
from hvdtrain.train.checkpoint_file import RunState
from hvdtrain.train.evaluate import Evaluation, losses_by_samples
from hvdtrain.train.feed import Feed, KerasFeed, SourceFeed
from hvdtrain.train.loop import RankCallbacks, joined, skip_steps
from hvdtrain.train.output import (
    make_saver,
    make_writers,
    open_output,
    resume,
    save_final,
    save_times,
)
from hvdtrain.train.plan import TrainPlan, compare_settings, make_plan, rank_texts, verbosity
from hvdtrain.train.prepare import build_model, fit_steps_per_execution, prepare_optimizers


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run gave; equal on all ranks."""

    history: dict[str, list[Any]]
    """Figures per epoch of this run, over all ranks: `loss`, metrics, `val_*`, `learning_rate`."""
    first_epoch: int
    """Epochs that were already done (0, or more when resumed)."""
    model_path: Path | None
    """The final model, a plain `.keras` file; None without an output folder."""
    callback: Any = None
    """Keras' `History`, where Keras' own `fit` ran."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of a model. Every rank makes it alike, and calls `fit`."""

    model: Any
    session: Session
    config: TrainConfig
    callbacks: Sequence[Any] = ()
    """The user's."""
    name: str = "fit"
    """What the plan calls it."""
    verbose: str | int = "auto"
    initial_epoch: int = 0
    validation: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of Keras' `fit` on how the validation data are evaluated."""
    stop_asked: Callable[[], bool] = lambda: False
    """Tells whether this process was told to stop."""

    def fit(self, train: Feed, validation: Feed | None, *, dry_run: bool = False) -> RunResult:
        """Train. All ranks.

        Args:
            train: What to train on.
            validation: What to evaluate after epochs; or None.
            dry_run: Boolean; print the plan and return.

        Returns:
            A `RunResult`. The model has the weights of the last epoch; what was put on it for
            the training is taken away, also after an error.

        Raises:
            OptimizerError: The model has no optimizer, or one that cannot be distributed as set.
            ConfigError: Ranks were given different settings, or one that cannot act here.
            DataError: Fewer samples than ranks, or they cannot be read.
            TrainingError: The loss is not finite, or ranks hold different weights.
            CheckpointError: A file could not be written or read.
        """
        model, session = self.model, self.session
        with (session.watched(self.config.hang_timeout_s),
              keras_model.trainable_as_compiled(model),
              keras_model.compiled_settings_kept(model)):
            session.progress.enter("preparing the training")
            plan = self._prepare(train, validation)
            if session.world.is_chief:
                show_plan(session, plan)
            if dry_run:
                return RunResult(history={}, first_epoch=0, model_path=None,
                                 callback=keras.callbacks.History())
            store = open_output(session, self.config)
            begin = self._begin(plan, store)
            history = self._train(train, validation, plan, store, begin)
            session.progress.enter("saving the final model")
            return RunResult(history=dict(history.history), callback=history,
                             first_epoch=begin.epoch,
                             model_path=save_final(model, session, self.config))

    @property
    def _ends_by_itself(self) -> bool:
        """Whether a callback ends the training where the loss is not finite."""
        return any(isinstance(c, keras.callbacks.TerminateOnNaN) for c in self.callbacks)

    def _prepare(self, train: Feed, validation: Feed | None) -> TrainPlan:
        """Everything before the plan is printed: model built, steps agreed, settings compared."""
        model, session, config = self.model, self.session, self.config
        prepare_optimizers(model, session, config)
        shards = train.plan(model)
        samples = 0 if validation is None else validation.samples
        compare_settings(session.collective, config, train.compare(),
                         keras_seam.found_optimizers(model), self.callbacks)
        if isinstance(validation, KerasFeed):
            validation.compare()
        build_model(model, train.one_sample)
        check_use(keras_seam.optimizers_of(model), self.callbacks)
        if config.sync_batch_norm:
            sync_batchnorm(model, session.collective)
        if isinstance(train, SourceFeed):
            fit_steps_per_execution(model, session, shards.steps)
        return make_plan(model, shards, config, job=self.name, validation_samples=samples,
                         ranks=rank_texts(session),
                         collective=f"{session.collective.name} ({session.choice.reason})")

    def _begin(self, plan: TrainPlan, store: CheckpointStore | None) -> RunState:
        """Where the run begins, with the same weights on all ranks."""
        model, session = self.model, self.session
        begin = resume(model, session, self.config, store, plan)
        done = max(restore_backup(model, self.callbacks, session), self.initial_epoch)
        if done > begin.epoch:
            begin = dataclasses.replace(begin, epoch=done, samples=0, step=0)
        variables = state.training_state(model)
        state.broadcast(session.collective, variables)
        share_loaded(keras_seam.optimizers_of(model))
        state.fold_rank_into_seeds(variables, session.world.rank)
        return begin

    def _train(self, train: Feed, validation: Feed | None, plan: TrainPlan,
               store: CheckpointStore | None, begin: RunState) -> Any:
        model, session, config = self.model, self.session, self.config
        first_step = first_step_of(model, plan, begin)
        stop = StopAgreement(session.collective, session.progress)
        states, times = CallbackStates(self.callbacks), save_times(config)
        saver = make_saver(session, plan, store, states)
        coordinator = Coordinator(
            collective=session.collective, progress=session.progress, lr_plan=plan.lr,
            stop_asked=self.stop_asked, stop=stop, check_weights=config.check_weights,
            stop_on_nan=config.stop_on_nan and not self._ends_by_itself, saver=saver, times=times,
            steps_per_epoch=plan.shards.steps, epoch_ended=train.on_epoch_end)
        writers = [] if store is None else make_writers(
            session, plan, store, begin.epoch, first_step, saver=saver, times=times)
        arguments = train.training(begin.epoch, first_step, resumed=begin.step > 0)
        if (first_step or plan.shards.uneven) and not keras_model.metrics_are_built(model):
            keras_model.build_metrics(model, train.one_sample())
        evaluation = None if validation is None else Evaluation(model, validation, session)
        if evaluation is not None:
            arguments |= {**self.validation, "validation_data": evaluation.data}
        with self._installed(plan, coordinator, evaluation):
            if first_step:
                skip_steps(model, first_step)
            callbacks = RankCallbacks(
                self.callbacks, divide(self.callbacks, session), coordinator=coordinator,
                after=[stop, *writers], model=model, collective=session.collective,
                states=states, begin=begin, first_step=first_step,
                holds_metrics=session.world.is_chief,
                verbose=verbosity(session.world, self.verbose), epochs=config.epochs,
                steps=plan.shards.steps)
            with _named_reading_errors():
                history = keras.Model.fit(model, epochs=config.epochs, callbacks=callbacks,
                                          initial_epoch=begin.epoch, **arguments)
        if saver is not None:
            saver.wait()
        return history

    @contextmanager
    def _installed(self, plan: TrainPlan, coordinator: Coordinator,
                   evaluation: Evaluation | None) -> Iterator[None]:
        """Everything that is put on the model and its optimizers, while they train."""
        model, collective = self.model, self.session.collective
        optimizers = keras_seam.optimizers_of(model)
        with ExitStack() as undo:
            undo.callback(keras_model.forget_train_function, model)
            schedule.install(optimizers, plan.lr)
            undo.callback(schedule.remove, optimizers)
            undo.callback(coordinator.watch_loss(optimizers))
            share = share_losses(model, collective)
            if self.config.xla:
                undo.callback(split_step(model))
            undo.callback(share_steps(model, share, weighted=plan.shards.uneven))
            undo.enter_context(losses_by_samples(model))
            undo.enter_context(joined(model, coordinator, evaluation))
            yield


def show_plan(session: Session, plan: TrainPlan) -> None:
    """Print a plan, unless it is the same as that of the training before. The chief."""
    text = plan.render()
    if session.shown != [text]:
        session.shown[:] = [text]
        print(f"hvdtrain plan\n{text}", flush=True)  # noqa: T201 - promised output


def first_step_of(model: Any, plan: TrainPlan, begin: RunState) -> int:
    """The step of the first epoch to begin with; whole calls of the train function only."""
    step: int = plan.shards.step_after(begin.samples)
    return step - step % int(model.steps_per_execution)


@contextmanager
def _named_reading_errors() -> Iterator[None]:
    try:
        yield
    except tf.errors.OpError as error:
        why = reading_error(error)
        if why is None:
            raise
        raise DataError(f"This rank cannot read its data. {why}") from None

"""`fit`: trains a compiled Keras model on all ranks. The function to read first.

Who owns what:

- what comes first: `train.prepare`;
- data: `data.shard.ShardPlan` decides which samples, `data.pipeline` makes batches of them;
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import TrainConfig
from hvdtrain.data.failures import reading_error
from hvdtrain.data.file_shares import FileShares, share_dataset
from hvdtrain.data.pipeline import training_dataset
from hvdtrain.data.source import Source, as_source, check_source
from hvdtrain.data.stream import StreamSource, one_sample, stream_dataset
from hvdtrain.errors import DataError
from hvdtrain.optim import keras_model, keras_seam, state
from hvdtrain.optim.shares import share_losses, share_steps
from hvdtrain.optim.sync_batchnorm import sync_batchnorm
from hvdtrain.optim.xla import split_step
from hvdtrain.optim.zero_files import check_use, share_loaded
from hvdtrain.session import Session, session_for
from hvdtrain.train import schedule
from hvdtrain.train.callbacks.coordinator import Coordinator, StopAgreement
from hvdtrain.train.callbacks.state import CallbackStates
from hvdtrain.train.callbacks.user import divide, restore_backup
from hvdtrain.train.checkpoint import CheckpointStore
from hvdtrain.train.checkpoint_file import RunState
from hvdtrain.train.evaluate import Evaluation, losses_by_samples
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
from hvdtrain.train.prepare import (
    build_model,
    fit_steps_per_execution,
    plan_steps,
    prepare_optimizers,
)
from hvdtrain.train.reading import watched


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a run gave; equal on all ranks."""

    history: dict[str, list[float]]
    """Figures per epoch of this run, over all ranks: `loss`, metrics, `val_*`, `learning_rate`."""
    first_epoch: int
    """Epochs that were already done (0, or more when resumed)."""
    model_path: Path | None
    """The final model, a plain `.keras` file; None without an output folder."""


def fit(model: Any, train: Source | Any, *, validation: Source | Any | None = None,
        config: TrainConfig | None = None, callbacks: Sequence[Any] = (),
        session: Session | None = None, job: str = "fit",
        stop_asked: Callable[[], bool] | None = None, dry_run: bool = False) -> FitResult:
    """Train a compiled Keras model on all ranks. Every rank must call it.

    Args:
        model: A compiled `keras.Model`. Its optimizers are made distributed, as `config` says.
        train: A `Source`, a `StreamSource`, what `by_file` returns, or arrays `x` or `(x, y)` or
            `(x, y, sample_weight)`, the same on all ranks; each rank trains on its share.
        validation: As `train`, evaluated on all ranks after each epoch; or None.
        config: How to train; defaults to `TrainConfig()`. Its `seed` draws the order of the
            samples, and unless it is 0 the dropout; the weights are those of the chief's model.
        callbacks: Keras callbacks, called on every rank after the metrics of all ranks are in.
        session: Defaults to that of `hvdtrain.init()`, which is called with `collective`,
            `timeline` and `hang_timeout_s` of `config` if it was not called before.
        job: String, the name in the plan.
        stop_asked: Callable that tells whether this process was told to stop.
        dry_run: Boolean; print the plan and return.

    Returns:
        A `FitResult`. The model has the weights of the last epoch; what was put on it for the
        training is taken away, also after an error.

    Raises:
        OptimizerError: The model has no optimizer, or one that cannot be distributed as set.
        ConfigError: Ranks were given different settings, or one that cannot act here.
        DataError: Fewer samples than ranks, or they cannot be read.
        TrainingError: The loss is not finite, or ranks hold different weights.
        CheckpointError: A file could not be written or read.
    """
    config = config or TrainConfig()
    session = session_for(config) if session is None else session
    state.seed_dropout(model, config.seed)
    return fit_job(model, train, validation=validation, config=config, callbacks=callbacks,
                   session=session, job=job, stop_asked=stop_asked, dry_run=dry_run)


def fit_job(model: Any, train: Source | Any, *, validation: Source | Any | None,
            config: TrainConfig, callbacks: Sequence[Any], session: Session, job: str,
            stop_asked: Callable[[], bool] | None = None, dry_run: bool = False) -> FitResult:
    """As `fit`, of a model that was made with the seed of its settings. Every rank."""
    with (session.watched(config.hang_timeout_s), keras_model.trainable_as_compiled(model),
          keras_model.compiled_settings_kept(model)):
        return _Run(model=model, session=session, config=config,
                    callbacks=keras.tree.flatten(list(callbacks)),
                    stop_asked=stop_asked or (lambda: False)).fit(train, validation, job,
                                                                  dry_run=dry_run)


def first_step_of(model: Any, plan: TrainPlan, begin: RunState) -> int:
    """The step of the first epoch to begin with; whole calls of the train function only."""
    step: int = plan.shards.step_after(begin.samples)
    return step - step % int(model.steps_per_execution)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One training."""

    model: Any
    session: Session
    config: TrainConfig
    callbacks: list[Any]
    """The user's."""
    stop_asked: Callable[[], bool]

    def fit(self, train: Source | Any, validation: Source | Any | None, job: str, *,
            dry_run: bool) -> FitResult:
        model, session, config = self.model, self.session, self.config
        session.progress.enter("preparing the training")
        train, validation = as_source(train, "train"), as_source(validation, "validation")
        plan = self._prepare(train, validation, job)
        if session.world.is_chief:
            print(f"hvdtrain plan\n{plan.render()}", flush=True)  # noqa: T201 - promised output
        if dry_run:
            return FitResult(history={}, first_epoch=0, model_path=None)
        store = open_output(session, config)
        begin = resume(model, session, config, store, plan)
        restored = restore_backup(model, self.callbacks, session)
        if restored > begin.epoch:
            begin = dataclasses.replace(begin, epoch=restored, samples=0)
        variables = state.training_state(model)
        state.broadcast(session.collective, variables)
        share_loaded(keras_seam.optimizers_of(model))
        state.fold_rank_into_seeds(variables, session.world.rank)
        history = self._train(train, validation, plan, store, begin)
        session.progress.enter("saving the final model")
        return FitResult(history=history, first_epoch=begin.epoch,
                         model_path=save_final(model, session, config))

    def _prepare(self, train: Any, validation: Any, job: str) -> TrainPlan:
        """Everything before the plan is printed: model built, steps agreed, settings compared."""
        model, session, config = self.model, self.session, self.config
        for source in (train, validation):
            if source is not None:
                check_source(source, streams=True)
        prepare_optimizers(model, session, config)
        shards = plan_steps(model, train, validation, session, config)
        compare_settings(session.collective, config, train,
                         keras_seam.found_optimizers(model))
        build_model(model, train)
        check_use(keras_seam.optimizers_of(model), self.callbacks)
        if config.sync_batch_norm:
            sync_batchnorm(model, session.collective)
        fit_steps_per_execution(model, session, shards.steps)
        return make_plan(model, shards, config, job=job, validation=validation,
                         ranks=rank_texts(session),
                         collective=f"{session.collective.name} ({session.choice.reason})")

    def _train(self, train: Source | StreamSource, validation: Source | StreamSource | None,
               plan: TrainPlan, store: CheckpointStore | None,
               begin: RunState) -> dict[str, list[float]]:
        model, session, config = self.model, self.session, self.config
        first_step = first_step_of(model, plan, begin)
        stop = StopAgreement(session.collective, session.progress)
        states, times = CallbackStates(self.callbacks), save_times(config)
        saver = make_saver(session, plan, store, states)
        coordinator = Coordinator(
            collective=session.collective, progress=session.progress, lr_plan=plan.lr,
            stop_asked=self.stop_asked, stop=stop, evaluate=self._evaluator(validation),
            check_weights=config.check_weights, stop_on_nan=config.stop_on_nan, saver=saver,
            times=times)
        writers = [] if store is None else make_writers(
            session, plan, store, begin.epoch, first_step, saver=saver, times=times)
        dataset = _batches(train, session, plan, begin.epoch, first_step)
        if (first_step or plan.shards.uneven) and not keras_model.metrics_are_built(model):
            keras_model.build_metrics(model, one_sample(train))
        with self._installed(plan, coordinator):
            if first_step:
                skip_steps(model, first_step)
            callbacks = RankCallbacks(
                self.callbacks, divide(self.callbacks, session), coordinator=coordinator,
                after=[stop, *writers], model=model, collective=session.collective,
                states=states, begin=begin, first_step=first_step,
                holds_metrics=session.world.is_chief, verbose=verbosity(session.world),
                epochs=config.epochs, steps=plan.shards.steps)
            with _named_reading_errors():
                history = model.fit(
                    dataset, epochs=config.epochs, initial_epoch=begin.epoch,
                    steps_per_epoch=plan.shards.steps, shuffle=False, callbacks=callbacks)
        if saver is not None:
            saver.wait()
        return dict(history.history)

    @contextmanager
    def _installed(self, plan: TrainPlan, coordinator: Coordinator) -> Iterator[None]:
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
            undo.enter_context(joined(model, coordinator))
            yield

    def _evaluator(self, validation: Any | None) -> Callable[[Any], dict[str, Any]] | None:
        """Evaluates this rank's share of the validation data."""
        if validation is None:
            return None
        return Evaluation(self.model, validation, self.session, self.config.rank_batch(self.session.world.size)).run


@contextmanager
def _named_reading_errors() -> Iterator[None]:
    try:
        yield
    except tf.errors.OpError as error:
        why = reading_error(error)
        if why is None:
            raise
        raise DataError(f"This rank cannot read its data. {why}") from None


def _batches(train: Source | StreamSource, session: Session, plan: TrainPlan, first_epoch: int,
             first_step: int) -> Any:
    """This rank's batches, without end."""
    if isinstance(train, FileShares):
        share = train.share(session.world.rank, session.world.size)
        return share_dataset(watched(share, session.progress), plan.shards,
                             first_epoch=first_epoch, first_step=first_step)
    if isinstance(train, StreamSource):
        return stream_dataset(train, plan.shards, first_epoch=first_epoch, first_step=first_step)
    return training_dataset(watched(train, session.progress), plan.shards,
                            first_epoch=first_epoch, first_step=first_step)

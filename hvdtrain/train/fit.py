"""`fit`: trains a compiled Keras model on all ranks. The function to read first.

Who owns what:

- what comes first: `train.prepare`;
- data: `data.shard.ShardPlan` decides which samples, `data.pipeline` makes batches of them;
- steps in which ranks do not count alike: `optim.shares`;
- gradients: `optim.distributed`, hooked into the model's optimizer before this is called;
- learning rate: `train.schedule`;
- what ranks do together during training: `train.callbacks.coordinator`;
- files: `train.output`, `train.checkpoint`, `train.callbacks.writers`;
- the loop itself: Keras;
- ranks that hang: `runtime.watchdog`, which `session.progress` tells how far this rank is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdtrain.config import TrainConfig
from hvdtrain.data.failures import reading_error
from hvdtrain.data.file_shares import FileShares, share_dataset
from hvdtrain.data.pipeline import training_dataset
from hvdtrain.data.source import Source, as_source, check_source
from hvdtrain.data.stream import StreamSource, one_sample, stream_dataset
from hvdtrain.errors import DataError
from hvdtrain.optim import keras_seam, state
from hvdtrain.optim.shares import share_losses, share_steps
from hvdtrain.optim.sync_batchnorm import sync_batchnorm
from hvdtrain.optim.xla import split_step
from hvdtrain.optim.zero_files import check_use, share_loaded
from hvdtrain.session import Session, init
from hvdtrain.train import schedule
from hvdtrain.train.callbacks.coordinator import Coordinator, StopAgreement
from hvdtrain.train.callbacks.mid_epoch import GoOn, skip_steps
from hvdtrain.train.callbacks.state import CallbackStates, RestoreCallbacks
from hvdtrain.train.callbacks.user import divide, restore_backup
from hvdtrain.train.checkpoint import CheckpointStore
from hvdtrain.train.checkpoint_file import RunState
from hvdtrain.train.evaluate import evaluate_share, share_of
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
    prepare_optimizer,
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
        model: A compiled `keras.Model` whose optimizer is a `DistributedOptimizer`.
        train: A `Source`, a `StreamSource`, what `by_file` returns, or arrays `x` or `(x, y)` or
            `(x, y, sample_weight)`, the same on all ranks; each rank trains on its share.
        validation: As `train`, evaluated on all ranks after each epoch; or None.
        config: How to train; defaults to `TrainConfig()`.
        callbacks: Keras callbacks, called on every rank after the metrics of all ranks are in.
        session: Defaults to that of `hvdtrain.init()`.
        job: String, the name in the plan.
        stop_asked: Callable that tells whether this process was told to stop.
        dry_run: Boolean; print the plan and return.

    Returns:
        A `FitResult`.

    Raises:
        OptimizerError: The model's optimizer is not distributed.
        ConfigError: Ranks were given different settings.
        DataError: Fewer samples than ranks, or they cannot be read.
        TrainingError: The loss is not finite, or ranks hold different weights.
        CheckpointError: A file could not be written or read.
    """
    config = config or TrainConfig()
    session = session or init(hang_timeout_s=config.hang_timeout_s)
    with session.watched(config.hang_timeout_s):
        return _fit(model, train, validation, config, list(callbacks), session, job,
                    stop_asked or (lambda: False), dry_run)


def _fit(model: Any, train: Source | Any, validation: Source | Any | None, config: TrainConfig,
         callbacks: list[Any], session: Session, job: str, stop_asked: Callable[[], bool],
         dry_run: bool) -> FitResult:
    """`fit`, watched."""
    session.progress.enter("preparing the training")
    train, validation = as_source(train, "train"), as_source(validation, "validation")
    for source in (train, validation):
        if source is not None:
            check_source(source, streams=True)
    prepare_optimizer(model, session)
    check_use(model.optimizer, callbacks, zero=config.zero, ranks=session.world.size)
    shards = plan_steps(train, validation, session, config)
    compare_settings(session.collective, config, train, model.optimizer)
    build_model(model, train)
    if config.sync_batch_norm:
        sync_batchnorm(model, session.collective)
    fit_steps_per_execution(model, session, shards.steps)
    plan = make_plan(model, shards, config, job=job, validation=validation,
                     ranks=rank_texts(session),
                     collective=f"{session.collective.name} ({session.choice.reason})")
    if session.world.is_chief:
        print(f"hvdtrain plan\n{plan.render()}", flush=True)  # noqa: T201 - promised output
    if dry_run:
        return FitResult(history={}, first_epoch=0, model_path=None)
    store = open_output(session, config)
    schedule.install(model.optimizer, plan.lr)
    begin = resume(model, session, config, store, plan)
    restored = restore_backup(model, callbacks, session)
    if restored > begin.epoch:
        begin = dataclasses.replace(begin, epoch=restored, samples=0)
    variables = state.training_state(model)
    state.broadcast(session.collective, variables)
    share_loaded(model.optimizer)
    state.fold_rank_into_seeds(variables, session.world.rank)
    history = _train(model, train, validation, session, plan, store, begin, callbacks, stop_asked)
    session.progress.enter("saving the final model")
    return FitResult(history=history, first_epoch=begin.epoch,
                     model_path=save_final(model, session, config))


def first_step_of(model: Any, plan: TrainPlan, begin: RunState) -> int:
    """The step of the first epoch to begin with; whole calls of the train function only."""
    step: int = plan.shards.step_after(begin.samples)
    return step - step % int(model.steps_per_execution)


def _train(model: Any, train: Source | StreamSource,
           validation: Source | StreamSource | None, session: Session,
           plan: TrainPlan, store: CheckpointStore | None, begin: RunState,
           callbacks: list[Any], stop_asked: Callable[[], bool]) -> dict[str, list[float]]:
    config, collective = plan.config, session.collective
    first_step = first_step_of(model, plan, begin)
    stop = StopAgreement(collective, session.progress)
    states, times = CallbackStates(callbacks), save_times(config)
    saver = make_saver(session, plan, store, states)
    coordinator = Coordinator(
        collective=collective, progress=session.progress, lr_plan=plan.lr,
        stop_asked=stop_asked, stop=stop,
        evaluate=_evaluator(model, validation, session, config),
        check_weights=config.check_weights, stop_on_nan=config.stop_on_nan,
        saver=saver, times=times, first_step=first_step)
    coordinator.watch_loss(model.optimizer)
    writers: list[Any] = []
    if store is not None:
        writers = make_writers(session, plan, store, begin.epoch, first_step, saver=saver,
                               times=times)
    dataset = _batches(train, session, plan, begin.epoch, first_step)
    share = share_losses(model, collective)
    if first_step or plan.shards.uneven:
        keras_seam.build_metrics(model, one_sample(train))
    undo = [split_step(model)] if config.xla else []
    undo.append(share_steps(model, share, weighted=plan.shards.uneven))
    if first_step:
        skip_steps(model, first_step)
    try:
        history = model.fit(
            dataset, epochs=config.epochs, initial_epoch=begin.epoch,
            steps_per_epoch=plan.shards.steps, shuffle=False, verbose=verbosity(session.world),
            callbacks=[GoOn(begin, is_chief=session.world.is_chief), coordinator,
                       *divide(callbacks, session), stop, *writers,
                       RestoreCallbacks(states, begin.callbacks)])
    except tf.errors.OpError as error:
        why = reading_error(error)
        if why is None:
            raise
        raise DataError(f"This rank cannot read its data. {why}") from None
    finally:
        for step in reversed(undo):
            step()
    if saver is not None:
        saver.wait()
    return dict(history.history)


def _evaluator(model: Any, validation: Source | StreamSource | None, session: Session,
               config: TrainConfig) -> Callable[[], None] | None:
    """A function that leaves this rank's share of the validation in the metric states."""
    if validation is None:
        return None
    share = share_of(validation, session, config.batch_per_rank)
    return lambda: evaluate_share(model, share)


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

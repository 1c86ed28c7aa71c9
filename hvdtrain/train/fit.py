"""`fit`: trains a compiled Keras model on all ranks. The function to read first.

Who owns what:

- data: `data.shard.ShardPlan` decides which samples, `data.pipeline` makes batches of them;
- gradients: `optim.distributed`, hooked into the model's optimizer before this is called;
- learning rate: `train.schedule`;
- what ranks do together during training: `train.callbacks.coordinator`;
- files: `train.output`, `train.checkpoint`, `train.callbacks.writers`;
- the loop itself: Keras;
- ranks that hang: `runtime.watchdog`, which `session.progress` tells how far this rank is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvdtrain
from hvdtrain.config import TrainConfig
from hvdtrain.data.pipeline import evaluation_dataset, training_dataset
from hvdtrain.data.shard import ShardPlan, evaluation_rows
from hvdtrain.data.source import Source, as_source, check_source
from hvdtrain.errors import OptimizerError
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_seam, state
from hvdtrain.optim.distributed import DistributedOptimizer, is_distributed
from hvdtrain.session import Session, init
from hvdtrain.train import schedule
from hvdtrain.train.callbacks.coordinator import Coordinator, StopAgreement
from hvdtrain.train.callbacks.mid_epoch import GoOn, StopSaver, skip_steps
from hvdtrain.train.checkpoint import CheckpointStore, RunState
from hvdtrain.train.output import make_writers, open_output, resume, save_final
from hvdtrain.train.plan import TrainPlan, compare_settings, make_plan, rank_texts, verbosity
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
        train: A `Source`, or arrays `x` or `(x, y)` or `(x, y, sample_weight)`, the same on all
            ranks; each rank trains on its share.
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
        DataError: Fewer samples than ranks.
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
            check_source(source)
    _prepare_optimizer(model, session)
    compare_settings(session.collective, config, train, model.optimizer)
    shards = ShardPlan(
        samples=len(train), rank=session.world.rank, size=session.world.size,
        batch_per_rank=config.batch_per_rank, seed=config.seed, shuffle=config.shuffle,
        remainder=config.remainder)
    build_model(model, train)
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
    variables = state.training_state(model)
    state.broadcast(session.collective, variables)
    state.fold_rank_into_seeds(variables, session.world.rank)
    history = _train(model, train, validation, session, plan, store, begin, callbacks, stop_asked)
    session.progress.enter("saving the final model")
    return FitResult(history=history, first_epoch=begin.epoch,
                     model_path=save_final(model, session, config))


def _prepare_optimizer(model: Any, session: Session) -> None:
    """Check that gradients are reduced, and undo what `compile` did against it."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise OptimizerError("The model is not compiled. Call model.compile(optimizer, loss) "
                             "before training.")
    leaves = keras_seam.leaf_optimizers(optimizer)
    if not is_distributed(optimizer) and not all(is_distributed(leaf) for leaf in leaves):
        raise OptimizerError(
            f"The model's optimizer ({type(optimizer).__name__}) is not distributed: each rank "
            "would train alone. Compile with hvdtrain.DistributedOptimizer(optimizer). A copied, "
            "unpickled or reloaded optimizer is a plain one again: call "
            "hvdtrain.DistributedOptimizer(model.optimizer) after loading.")
    # compile() wraps an optimizer in a plain LossScaleOptimizer under mixed_float16.
    DistributedOptimizer(optimizer, collective=session.collective)
    keras_seam.self_test()
    if model.jit_compile:
        model.jit_compile = False
    model.train_function = None


def build_model(model: Any, train: Source) -> None:
    """Build model and optimizer now: what is built during tracing cannot be broadcast."""
    if not model.built:
        sample = train.read(np.zeros(1, np.int64))
        inputs = sample[0] if isinstance(sample, tuple) else sample
        model(tf.nest.map_structure(tf.convert_to_tensor, inputs))
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def fit_steps_per_execution(model: Any, session: Session, steps: int) -> None:
    """Keras runs whole executions: with 2 of them per 3 steps it would take a fourth step."""
    asked = model.steps_per_execution
    fitting = next(n for n in range(min(asked, steps), 0, -1) if steps % n == 0)
    if fitting == asked:
        return
    model.steps_per_execution = fitting
    if session.world.is_chief:
        get_logger().warning(
            "steps_per_execution is %d instead of %d: an epoch has %d steps, which is no "
            "multiple of it. The result is the same.", fitting, asked, steps)


def first_step_of(model: Any, plan: TrainPlan, begin: RunState) -> int:
    """The step of the first epoch to begin with; whole calls of the train function only."""
    step: int = plan.shards.step_after(begin.samples)
    return step - step % int(model.steps_per_execution)


def _train(model: Any, train: Source, validation: Source | None, session: Session,
           plan: TrainPlan, store: CheckpointStore | None, begin: RunState,
           callbacks: list[Any], stop_asked: Callable[[], bool]) -> dict[str, list[float]]:
    config, collective = plan.config, session.collective
    first_step = first_step_of(model, plan, begin)
    stop = StopAgreement(collective, session.progress)
    coordinator = Coordinator(
        collective=collective, progress=session.progress, lr_plan=plan.lr,
        stop_asked=stop_asked, stop=stop,
        evaluate=_evaluator(model, validation, session, config),
        check_weights=config.check_weights, stop_on_nan=config.stop_on_nan,
        saver=_stop_saver(session, plan, store), first_step=first_step)
    coordinator.watch_loss(model.optimizer)
    writers: list[Any] = []
    if store is not None:
        writers = make_writers(session, plan, store, begin.epoch, first_step)
    dataset = training_dataset(
        watched(train, session.progress), plan.shards, first_epoch=begin.epoch,
        first_step=first_step)
    if first_step:
        keras_seam.build_metrics(model, train.read(np.zeros(1, np.int64)))
        skip_steps(model, first_step)
    history = model.fit(
        dataset, epochs=config.epochs, initial_epoch=begin.epoch,
        steps_per_epoch=plan.shards.steps, shuffle=False, verbose=verbosity(session.world),
        callbacks=[GoOn(begin, is_chief=session.world.is_chief), coordinator, *callbacks, stop,
                   *writers])
    return dict(history.history)


def _stop_saver(session: Session, plan: TrainPlan,
                store: CheckpointStore | None) -> StopSaver | None:
    if store is None:
        return None
    return StopSaver(collective=session.collective, progress=session.progress, store=store,
                     shards=plan.shards, lr_scale=plan.lr.scale, version=hvdtrain.__version__)


def _evaluator(model: Any, validation: Source | None, session: Session,
               config: TrainConfig) -> Callable[[], None] | None:
    """A function that leaves this rank's share of the validation in the metric states."""
    if validation is None:
        return None
    rows = evaluation_rows(len(validation), session.world.rank, session.world.size)
    if len(rows) == 0:
        return lambda: model.reset_metrics()
    dataset = evaluation_dataset(validation, rows, config.batch_per_rank)
    return lambda: model.evaluate(dataset, verbose=0)

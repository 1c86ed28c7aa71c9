"""The files of a run: what may be written where, what a former run left, what is written."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.config import TrainConfig
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_seam, state
from hvdtrain.optim.kept_back_files import restore_kept_back
from hvdtrain.optim.zero_files import consolidated
from hvdtrain.session import Session
from hvdtrain.train import schedule
from hvdtrain.train.callbacks.saver import CheckpointSaver, SaveTimes
from hvdtrain.train.callbacks.state import CallbackStates
from hvdtrain.train.callbacks.writers import (
    CheckpointWriter,
    ChiefFile,
    ChiefFiles,
    MetricsFile,
    TensorBoardLog,
)
from hvdtrain.train.checkpoint import CheckpointStore
from hvdtrain.train.checkpoint_file import RunState, save_model
from hvdtrain.train.chief import on_chief
from hvdtrain.train.plan import TrainPlan
from hvdtrain.whole_file import remove_leftovers


def open_output(session: Session, config: TrainConfig) -> CheckpointStore | None:
    """Refuse to write over a former run, unless told to. All ranks.

    Returns:
        The store of checkpoints, or None where nothing is written.

    Raises:
        ConfigError: A run is to be resumed, but no output folder is given.
        CheckpointError: On every rank: the output is a file, or holds a former run.
    """
    output = config.output
    if output is None:
        if config.resume:
            raise ConfigError("resume needs the output folder of the run to go on with: give "
                              "TrainConfig(output=...). `hvdtrain fit` has one by itself.")
        return None
    store = CheckpointStore(output / "checkpoints", keep=config.keep_checkpoints,
                            background=config.checkpoint_background)

    def prepare() -> None:
        try:
            _prepare(output, store, config)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"The output folder {output} cannot be used: {error.strerror} "
                                  f"({error.filename}). Give another one with --output."
                                  ) from error

    on_chief(session.collective, prepare)
    return store


def _prepare(output: Path, store: CheckpointStore, config: TrainConfig) -> None:
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"The output {output} is a file; a folder is needed. Give another "
                              "name with --output.")
    output.mkdir(parents=True, exist_ok=True)
    written = [*store.paths(), *(p for n in ("model.keras", "metrics.jsonl")
                                 if (p := output / n).exists())]
    if not config.resume and not config.overwrite and written:
        raise CheckpointError(
            f"{output} holds files of a former run ({written[-1].name}). Go on with it "
            "(--resume), delete them (--overwrite), or give another folder (--output).")
    if config.overwrite:
        for path in [*written, *(output / "tensorboard").glob("events.out.tfevents.*")]:
            path.unlink(missing_ok=True)
    for folder in (output, store.folder):
        remove_leftovers(folder)


def resume(model: Any, session: Session, config: TrainConfig, store: CheckpointStore | None,
            plan: TrainPlan) -> RunState:
    """Load the newest whole checkpoint on the chief. All ranks; broadcast the variables after.

    Returns:
        Where the run stands, on every rank.

    Raises:
        CheckpointError: On every rank: no checkpoint can be read, or it is of another model.
    """
    start = RunState(epoch=0, step=0, ranks=plan.shards.size,
                     version=hvdtrain.__version__)
    if not config.resume or store is None:
        return start
    found = on_chief(session.collective, lambda: store.load_newest(model))
    if found is None:
        if session.world.is_chief:
            get_logger().info("No checkpoint in %s yet: starting from the beginning.",
                              store.folder)
        return start
    used = restore_kept_back(keras_seam.optimizers_of(model), found.kept_back)
    if session.world.is_chief:
        if found.kept_back and not used:
            get_logger().warning(
                "The checkpoint holds what compression had not sent yet, and this run has no "
                "compression that sends it later (topk or lowrank, on several ranks): it is "
                "left out.")
        own = state.local_variables(model)
        if own and session.world.size > 1:
            get_logger().warning(
                "A checkpoint holds the chief's variables only. What other ranks have for "
                "themselves (`%s`%s) begins anew.", own[0].path, ", ..." if own[1:] else "")
        schedule.rescale(keras_seam.optimizers_of(model), 1 / found.lr_scale)
        state.restore_seeds(state.training_state(model), found.seeds)
        within = f" and {found.samples} samples of the next" if found.samples else ""
        get_logger().info(
            "Going on after epoch %d of %d%s (step %d, written on %d rank%s).", found.epoch,
            config.epochs, within, found.step, found.ranks, "s" if found.ranks > 1 else "")
    placed = state.restore_states_of_samples(
        model, found.rank_states, rank=session.world.rank, size=session.world.size)
    if session.world.is_chief:
        _warn_of_changes(found, plan, placed=placed)
    return dataclasses.replace(found, kept_back={}, rank_states=())


def _warn_of_changes(found: RunState, plan: TrainPlan, *, placed: bool) -> None:
    if not placed:
        get_logger().warning("The states that stateful layers keep of their samples begin with "
                             "zeros: the checkpoint was written with another global batch.")
    if found.samples and found.stream_order != getattr(plan.shards, "stream_order", ""):
        get_logger().warning(
            "The stream has another order than the run before had (its shuffles have other seeds, "
            "or it begins with other files): some samples of epoch %d are trained on twice and "
            "others not at all. Give shuffle(..., seed=...) a seed, or call "
            "keras.utils.set_random_seed before the dataset is made.", found.epoch + 1)


def make_saver(session: Session, plan: TrainPlan, store: CheckpointStore | None,
               states: CallbackStates | None = None) -> CheckpointSaver | None:
    """What writes the checkpoints of a run; None where nothing is written.

    Args:
        session: This rank.
        plan: The plan of the run.
        store: Where checkpoints go.
        states: What the user's callbacks remember.
    """
    if store is None:
        return None
    return CheckpointSaver(
        collective=session.collective, progress=session.progress, store=store,
        shards=plan.shards, version=hvdtrain.__version__, states=states)


def save_times(config: TrainConfig) -> SaveTimes:
    """When checkpoints are due beside the ends of epochs."""
    return SaveTimes(every_steps=config.checkpoint_every_steps, every_s=config.checkpoint_every_s)


def make_writers(session: Session, plan: TrainPlan, store: CheckpointStore, first_epoch: int,
                 first_step: int, *, saver: CheckpointSaver | None = None,
                 times: SaveTimes | None = None) -> list[Any]:
    """The callbacks that write files, for this rank.

    Args:
        session: This rank.
        plan: The plan of the run.
        store: Where checkpoints go; the other files go beside it.
        first_epoch: Integer, epochs that a former run has done.
        first_step: Integer, steps of the next one that it has done.
        saver: What writes checkpoints; defaults to that of `make_saver`.
        times: When they are due beside the ends of epochs.
    """
    config, writers = plan.config, list[Any]()
    output = store.folder.parent
    files: list[ChiefFile] = [MetricsFile(
        output / "metrics.jsonl", first_epoch=first_epoch,
        samples_per_epoch=plan.shards.samples_per_epoch,
        done_before=plan.shards.samples_before(first_step))]
    if config.tensorboard and importlib.util.find_spec("tensorboard"):
        files.append(TensorBoardLog(output / "tensorboard"))
    writers.append(ChiefFiles(files, session.collective, session.progress))
    saver = saver or make_saver(session, plan, store)
    if saver is not None and (config.checkpoint_every_epochs or config.checkpoint_every_steps):
        writers.append(CheckpointWriter(
            saver, times or save_times(config), every_epochs=config.checkpoint_every_epochs,
            last_epoch=config.epochs))
    return writers


def save_final(model: Any, session: Session, config: TrainConfig) -> Path | None:
    """Write `model.keras`, a plain Keras file. All ranks.

    Returns:
        Its path, or None where nothing is written.

    Raises:
        CheckpointError: On every rank, if the chief could not write it.
    """
    if config.output is None:
        return None
    path = config.output / "model.keras"
    with consolidated(keras_seam.optimizers_of(model)):
        on_chief(session.collective, lambda: save_model(model, path))
    return path

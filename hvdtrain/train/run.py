"""`Run`: what every training does, whatever engine computes its updates. Read this first.

- Entry points: `train.keras_door`, `train.distribute`; for jobs, `train.fit`.
- Plan: `train.plan`. Files: `train.checkpoint`, `train.writers`. Data: `train.feed`, `data.plans`.
- Epochs: Keras' own loop with `train.fit`; all ranks together: `train.coordinator`; ranks that
  hang: `runtime.watchdog`, told by `session.progress`.
- Engine allreduce: `train.fit`; the others: `engines`. Gradients: `optim.distributed`; uneven
  steps: `optim.sample_weights`; learning rate: `train.schedule`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras

import hvdtrain
from hvdtrain.collectives.base import Collective
from hvdtrain.config import TrainConfig
from hvdtrain.data.source import DataSplits, splits_of
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.job import Job
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_model, keras_seam, state
from hvdtrain.optim.distributed import restore_error_feedback
from hvdtrain.optim.zero import consolidated
from hvdtrain.session import Session
from hvdtrain.train import schedule
from hvdtrain.train.callbacks import CallbackStates
from hvdtrain.train.checkpoint import CheckpointStore, RunState, save_model
from hvdtrain.train.chief import on_chief
from hvdtrain.train.elastic import Origin, load_commit
from hvdtrain.train.evaluate import merged_logs, merged_states
from hvdtrain.train.plan import TrainPlan
from hvdtrain.train.timing import StepClock
from hvdtrain.whole_file import remove_leftovers


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run; equal on all ranks."""

    history: dict[str, list[Any]] = field(default_factory=dict)
    """Per epoch of this run, over all ranks: `loss`, metrics, `val_*`, `learning_rate`."""
    first_epoch: int = 0  # epochs that a former run had done, and that are not in `history`
    model_path: Path | None = None  # a plain `.keras` file; None without an output folder
    callback: Any = field(default_factory=keras.callbacks.History)  # Keras' own


@dataclass(kw_only=True)
class Run(ABC):
    """One training of a model. All ranks create it alike, and call `fit`.

    An engine implements `prepare` and `train`, and overrides what differs. `verbose` is Keras';
    `stop_asked` tells whether this process was asked to stop. `fit` sets the plan, the checkpoint
    store (None if nothing is written), where the run begins, and the callbacks' states.
    """

    model: Any
    session: Session
    config: TrainConfig
    name: str = "fit"
    callbacks: Sequence[Any] = ()
    verbose: str | int = "auto"
    stop_asked: Callable[[], bool] = lambda: False
    origin: Origin = field(default_factory=Origin)  # `config` has its settings

    plan: TrainPlan = field(init=False)
    store: CheckpointStore | None = field(init=False)
    begin: RunState = field(init=False)
    states: CallbackStates = field(init=False)
    clock: StepClock | None = field(init=False, default=None)
    times: list[Any] = field(init=False, default_factory=list)  # `phases.of_all_ranks` of epochs

    def fit(self, *, dry_run: bool = False) -> RunResult:
        """Train, or only print the plan (`dry_run`). All ranks.

        The model then has the last epoch's weights; what was put on it for the training is
        removed, also after an error.
        """
        session = self.session
        with (session.watched(self.config.hang_timeout_s),
              keras_model.trainable_as_compiled(self.model),
              keras_model.compiled_settings_kept(self.model)):
            session.progress.enter("preparing the training")
            self.plan = self.prepare()
            text = self.plan.render()
            if session.world.is_chief and session.shown != [text]:
                session.shown[:] = [text]
                print(f"hvdtrain plan\n{text}", flush=True)  # noqa: T201 - promised output
            if dry_run:
                return RunResult()
            self.store = self._open_output()
            self.begin = self.load()
            self._tell_of_repeated()
            self.states = CallbackStates(self.callbacks)
            history, output = self.train(), self.config.output
            session.progress.enter("saving the final model")
            path = None if output is None else output / "model.keras"
            if path is not None:
                with consolidated(keras_seam.optimizers_of(self.model)):
                    on_chief(session.collective, lambda: save_model(self.model, path))
            return RunResult(history=dict(history.history), callback=history,
                             first_epoch=self.begin.epoch - len(
                                 self.begin.history.get("epoch", ())), model_path=path)

    @abstractmethod
    def prepare(self) -> TrainPlan:
        """Build the model, agree on the steps, compare the settings. All ranks."""

    @abstractmethod
    def train(self) -> Any:
        """Train to the last epoch; gives Keras' `History`. All ranks."""

    def load(self) -> RunState:
        """Where the run begins, with the weights of the chief's newest state. All ranks.

        That is the commit to go on from, if it can be used, or the newest checkpoint.
        """
        session, shards, store = self.session, self.plan.shards, self.store
        is_chief, found = session.world.is_chief, self._load_commit()
        if found is None and store is not None and self.config.resume:
            found = on_chief(session.collective, lambda: store.load_newest(self.model))
            if found is None and is_chief:
                get_logger().info("No checkpoint in %s yet: starting from the beginning.",
                                  store.folder)
        if found is not None and self.origin.elastic is not None:
            self.origin.elastic.steps = max(self.origin.elastic.steps, found.step)
        begin = (RunState(epoch=0, step=0, ranks=shards.size, version=hvdtrain.__version__)
                 if found is None else self._resume(found))
        state.broadcast_variables(state.training_state(self.model), collective=session.collective)
        return begin

    def _load_commit(self) -> RunState | None:
        elastic, steps = self.origin.elastic, self.origin.commit
        if elastic is None or steps is None:
            return None
        found = on_chief(self.session.collective,
                         lambda: load_commit(elastic.store, steps, self.model))
        if found is None:
            self.origin = dataclasses.replace(self.origin, commit=None)
        return found

    @property
    def first_step(self) -> int:
        """The step of the first epoch to begin with."""
        return int(self.plan.shards.step_after(self.begin.samples))

    @property
    def holds_metrics(self) -> bool:
        """Whether this rank continues the metrics of an interrupted epoch."""
        return self.session.world.is_chief

    @property
    def metrics_collective(self) -> Collective:
        """What sums the states of metrics over all ranks."""
        return self.session.collective

    @property
    def stops_on_nan(self) -> bool:
        """Whether a loss that is not finite is an error; else a callback may end the training."""
        return self.config.stop_on_nan and not any(
            isinstance(c, keras.callbacks.TerminateOnNaN) for c in self.callbacks)

    def average_statistics(self) -> None:
        """Give all ranks the mean of the layers' statistics of their data. All ranks."""
        state.average_statistics(self.session.collective, self.model)

    def metric_states(self) -> tuple[tuple[float, ...], ...]:
        """The states of the metrics over all ranks. All ranks."""
        return merged_states(self.metrics_collective, self.model)

    def figures(self, logs: Any) -> dict[str, Any]:
        """The figures of all ranks in place of this rank's last step. All ranks."""
        return merged_logs(self.session.collective, self.model, logs,
                           metrics=self.metrics_collective)

    def loss_is_finite(self) -> bool:
        """Whether the metrics show a finite loss, if no optimizer watches it. All ranks."""
        return True

    def compare_weights(self, when: str) -> None:
        """Stop if ranks hold different weights, unless switched off. All ranks."""
        if self.config.check_weights:
            optimizers = keras_seam.optimizers_of(self.model)
            with self.session.progress.phase("comparing the weights"):
                shared = keras_seam.shared_weights(optimizers, self.model.trainable_variables)
                state.check_equal(self.session.collective, [
                    *shared, *keras_seam.shared_variables(optimizers)], when=when)

    def _open_output(self) -> CheckpointStore | None:
        """Refuse to overwrite a former run, unless allowed to. All ranks."""
        config, output = self.config, self.config.output
        if output is None:
            if config.resume and not self.origin.resumes:
                raise ConfigError("resume needs the output folder of the run to go on with: give "
                                  "TrainConfig(output=...). `hvdtrain fit` has one by itself.")
            return None
        store = CheckpointStore(output / "checkpoints", keep=config.keep_checkpoints,
                                background=config.checkpoint_background)
        on_chief(self.session.collective, lambda: _make_ready(output, store, config))
        return store

    def _resume(self, found: RunState) -> RunState:
        world, optimizers = self.session.world, keras_seam.optimizers_of(self.model)
        lost = {"kept_back": not restore_error_feedback(optimizers, found.kept_back),
                "states": not state.restore_states_of_samples(
                    self.model, found.rank_states, rank=world.rank, size=world.size)}
        if world.is_chief:
            schedule.rescale(optimizers, 1 / found.lr_scale)
            state.restore_seeds(state.training_state(self.model), found.seeds)
            within = f" and {found.samples} samples of the next" if found.samples else ""
            get_logger().info(
                "Going on after epoch %d of %d%s (step %d, written on %d rank%s).", found.epoch,
                self.config.epochs, within, found.step, found.ranks,
                "s" if found.ranks > 1 else "")
            self._warn_of_changes(found, **lost)
        return dataclasses.replace(found, kept_back={}, rank_states=())

    def _tell_of_repeated(self) -> None:
        """Say how many samples of an epoch are trained on again, as no step begins there."""
        shards, samples = self.plan.shards, self.begin.samples
        again = samples - shards.samples_before(self.first_step) if samples else 0
        if again > 0 and self.session.world.is_chief:
            get_logger().info("No step begins after %d samples: %d of them are trained on once "
                              "more.", samples, again)

    def _warn_of_changes(self, found: RunState, *, kept_back: bool, states: bool) -> None:
        """Warn of what a checkpoint has that cannot be used; the flags say what was lost."""
        warn = get_logger().warning
        if found.kept_back and kept_back:
            warn("The checkpoint holds what compression had not sent yet, and this run has no "
                 "compression that sends it later (lowrank, on several ranks): it is left "
                 "out.")
        own = state.local_variables(self.model)
        if own and self.session.world.size > 1:
            warn("A checkpoint holds the chief's variables only. What other ranks have for "
                 "themselves (`%s`%s) begins anew.", own[0].path, ", ..." if own[1:] else "")
        if states:
            warn("The states that stateful layers keep of their samples begin with zeros: the "
                 "checkpoint was written with another global batch.")
        if found.samples and found.stream_order != getattr(self.plan.shards, "stream_order", ""):
            warn("The stream has another order than the run before had (its shuffles have other "
                 "seeds, or it begins with other files): some samples of epoch %d are trained on "
                 "twice and others not at all. Give shuffle(..., seed=...) a seed, or call "
                 "keras.utils.set_random_seed before the dataset is made.", found.epoch + 1)

def build_job(job: Job, config: TrainConfig, session: Session,
              scope: AbstractContextManager[Any] | None = None) -> tuple[Any, DataSplits]:
    """The model and the data of a job, with the seeds set. All ranks."""
    keras.utils.set_random_seed(config.seed or 0)
    with session.progress.phase("building data and model"):
        splits = splits_of(job.data())
        with scope or nullcontext():
            return job.model(), splits


def _make_ready(output: Path, store: CheckpointStore, config: TrainConfig) -> None:
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"The output {output} is a file; a folder is needed. Give another "
                              "name with --output.")
    try:
        output.mkdir(parents=True, exist_ok=True)
        former = [*store.paths(), *(path for name in ("model.keras", "metrics.jsonl")
                                    if (path := output / name).exists())]
        if former and not config.resume and not config.overwrite:
            raise CheckpointError(
                f"{output} holds files of a former run ({former[-1].name}). Go on with it "
                "(--resume), delete them (--overwrite), or give another folder (--output).")
        if config.overwrite:
            for path in [*former, *(output / "tensorboard").glob("events.out.tfevents.*")]:
                path.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"The output folder {output} cannot be used: {error.strerror} "
                              f"({error.filename}). Give another one with --output.") from error
    for folder in (output, store.folder):
        remove_leftovers(folder)

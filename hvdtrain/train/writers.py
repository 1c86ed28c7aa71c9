"""Checkpoints, commits, `metrics.jsonl`, TensorBoard logs; all ranks learn of failures."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain
from hvdtrain.errors import NotWrittenError
from hvdtrain.optim import keras_seam, state
from hvdtrain.optim.distributed import collect_error_feedback
from hvdtrain.optim.zero import consolidated
from hvdtrain.train.checkpoint import RunState, named_failures, written
from hvdtrain.train.chief import on_chief
from hvdtrain.train.elastic import Elastic, values_of
from hvdtrain.train.run import Run

_PAUSE = 50  # between commits, at least so many times as long as one takes
Logs = dict[str, Any] | None


class SaveTimes:
    """When a checkpoint is due within an epoch: by steps, or by the chief's clock."""

    def __init__(self, *, every_steps: int = 0, every_s: float = 0.0) -> None:
        self._every_steps = every_steps
        self._every_s = every_s
        self._step: int | None = None
        self._at = time.monotonic()

    def begin(self, step: int) -> None:
        """Training begins, or a checkpoint was written, after this many steps."""
        self._step, self._at = step, time.monotonic()

    def by_steps(self, step: int) -> bool:
        """Whether one is due after this many steps."""
        if not self._every_steps or self._step is None:
            return False
        return step // self._every_steps > self._step // self._every_steps

    def by_clock(self) -> bool:
        """Whether one is due by this rank's clock."""
        return bool(self._every_s) and time.monotonic() - self._at >= self._every_s


def state_of_run(run: Run, epoch: int, step: int) -> RunState:
    """The position after so many epochs and steps of the next, with all but variables. All ranks.

    Statistics and open accumulations, which each rank has gathered, get their mean.
    """
    model, collective, shards = run.model, run.session.collective, run.plan.shards
    optimizers = keras_seam.optimizers_of(model)
    run.average_statistics()
    state.average_accumulators(collective, optimizers)
    return RunState(
        epoch=epoch, step=keras_seam.steps_done(optimizers), ranks=shards.size,
        version=hvdtrain.__version__, seeds=state.seeds_of(state.training_state(model)),
        samples=shards.samples_before(step) if step else 0,
        metrics=run.metric_states() if step else (), callbacks=run.states.collect(),
        stream_order=getattr(shards, "stream_order", ""),
        rank_states=state.gather_states_of_samples(collective, model),
        kept_back=collect_error_feedback(optimizers),
        batch_ranks=run.origin.batch_ranks or shards.size)


class Checkpoints(keras.callbacks.Callback):
    """Writes a run's checkpoints: after epochs, and if the `Coordinator` asks. All ranks."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self.times = SaveTimes(every_steps=run.config.checkpoint_every_steps,
                               every_s=run.config.checkpoint_every_s)
        self.steps_done = 0  # after the step that runs, since the first epoch

    def save(self, epoch: int, step: int = 0) -> str | None:
        """Write one after so many epochs and steps of the next; gives its path. All ranks."""
        run, store, model = self._run, self._run.store, self._run.model
        if store is None:
            return None
        with run.session.progress.phase("saving a checkpoint"):
            reached = state_of_run(run, epoch, step)
            with consolidated(keras_seam.optimizers_of(model)):
                return on_chief(run.session.collective, lambda: str(store.save(model, reached)))

    def wait(self) -> None:
        """Return when the last one is on disk, or raise. All ranks."""
        run, store = self._run, self._run.store
        if store is not None:
            with run.session.progress.phase("waiting for a checkpoint to be on the disk"):
                on_chief(run.session.collective, store.wait)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Save if due: after every `checkpoint_every_epochs` epochs, and after the last."""
        done, config = epoch + 1, self._run.config
        every = config.checkpoint_every_epochs
        is_last = done == config.epochs or self.model.stop_training
        if self.times.by_steps(self.steps_done) or (every and (done % every == 0 or is_last)):
            self.save(done)
            self.times.begin(self.steps_done)


class Commits:
    """Writes the commits of elastic training, if the `Coordinator` asks. All ranks.

    On each host the rank with local rank 0 writes one, with the same content. By the clock they
    take at most 2 % of the time.
    """

    def __init__(self, run: Run, history: Any) -> None:
        self._run, self._history = run, history
        self._elastic = run.origin.elastic if run.origin.commits else None
        self._steps_before = 0 if self._elastic is None else self._elastic.steps
        self._every_steps = 0 if self._elastic is None else run.config.commit_every_steps
        self._every_s = (0.0 if self._elastic is None or self._every_steps else
                         run.config.commit_every_s)
        self.times = SaveTimes(every_steps=self._every_steps, every_s=self._every_s)
        self.is_asked = False

    @property
    def change_asked(self) -> bool:
        """Whether the launcher asks this host's ranks to commit and end."""
        elastic = self._run.origin.elastic
        return elastic is not None and elastic.change_asked

    def is_due(self, step: int) -> bool:
        """Whether one is due after so many steps since the first epoch. Equal on all ranks."""
        return self.is_asked or self.times.by_steps(step)

    def count(self, steps: int) -> None:
        """Note the steps of this run."""
        if self._elastic is not None:
            self._elastic.steps = self._steps_before + steps

    def save(self, epoch: int, step: int = 0, *, begin: RunState | None = None) -> None:
        """Commit so many epochs and steps of the next, if the run has commits. All ranks.

        `begin`: nothing was trained since; its samples need not be those before a step.
        """
        run, elastic, collective = self._run, self._elastic, self._run.session.collective
        self.is_asked = False
        if elastic is None:
            return
        began, keeps = time.monotonic(), None
        with run.session.progress.phase("committing"):
            reached = dataclasses.replace(state_of_run(run, epoch, step), history={
                "epoch": list(self._history.epoch), "history": dict(self._history.history)})
            if begin is not None:
                reached = dataclasses.replace(reached, samples=begin.samples, metrics=begin.metrics)
            if not elastic.one_host:
                keeps = elastic.writes
                reached = collective.gather_objects(
                    reached if run.session.world.is_chief else None)[0]
            with consolidated(keras_seam.optimizers_of(run.model), keeps=keeps):
                failed = self._written(elastic, reached) if elastic.writes else ""
            failures = [text for text in collective.gather_objects(failed) if text]
        if failures:
            raise NotWrittenError(failures[0])
        pause_s = max(self._every_s, _PAUSE * (time.monotonic() - began))
        self.times = SaveTimes(every_steps=self._every_steps,
                               every_s=pause_s if self._every_s else 0.0)

    def _written(self, elastic: Elastic, reached: RunState) -> str:
        try:
            elastic.store.write(elastic.steps, {"training": elastic.trainings, "state": reached},
                                values_of(self._run.model))
        except NotWrittenError as error:
            return f"{self._run.session.world.host}: {error}"
        return ""


class Figures(keras.callbacks.Callback):
    """Writes each epoch's figures to `metrics.jsonl` and TensorBoard's log. All ranks."""
    # Keras' TensorBoard callback has an `on_train_batch_end`: a copy from the device every batch.

    def __init__(self, run: Run) -> None:
        super().__init__()
        assert run.config.output is not None  # noqa: S101
        self._run = run
        self._path = run.config.output / "metrics.jsonl"
        self._log_folder = run.config.output / "tensorboard"
        self._log: Any = None
        self._epoch_began = 0.0
        self._done_before = run.plan.shards.samples_before(run.first_step)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Open the files."""
        self._on_chief(self._begin)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Start the clock."""
        self._epoch_began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Write the figures."""
        self._on_chief(lambda: self._write(epoch + 1, dict(logs or {})))

    def on_train_end(self, logs: Logs = None) -> None:
        """Close the log; `metrics.jsonl` is closed after each line."""
        self._on_chief(self._close)

    def _on_chief(self, work: Callable[[], None]) -> None:
        session = self._run.session
        with session.progress.phase("writing the figures"):
            on_chief(session.collective, work)

    def _begin(self) -> None:
        """Remove the lines of epochs that a former run began and this one repeats."""
        path = self._path
        with written(path) as temporary:
            lines = path.read_text().splitlines() if path.is_file() else []
            temporary.write_text("".join(
                f"{line}\n" for line in lines if _epoch_of(line) <= self._run.begin.epoch))
        if self._run.config.tensorboard and importlib.util.find_spec("tensorboard"):
            with named_failures(self._log_folder, tf.errors.OpError):
                self._log = tf.summary.create_file_writer(str(self._log_folder))

    def _write(self, epoch: int, figures: dict[str, Any]) -> None:
        seconds = time.perf_counter() - self._epoch_began
        line = {"epoch": epoch, **{k: np.asarray(v).tolist() for k, v in figures.items()},
                "seconds": round(seconds, 4), "time_s": round(time.time(), 4)}
        if (every := self._run.plan.shards.samples_per_epoch) is not None:
            samples = max(0, every - self._done_before)
            line |= {"samples": samples, "samples_per_s": round(samples / seconds, 2)}
        self._done_before = 0
        if self._run.times:
            line["time"] = self._run.times[-1]
        with named_failures(self._path), self._path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        if self._log is not None:
            with named_failures(self._log_folder, tf.errors.OpError):
                with self._log.as_default(step=epoch):
                    for name, value in figures.items():
                        if np.ndim(value) == 0:
                            tf.summary.scalar(name, value)
                    for name, each in line.get("time", {}).items():
                        tf.summary.scalar(f"time/{name}", float(np.median(each)))
                self._log.flush()

    def _close(self) -> None:
        if self._log is not None:
            with named_failures(self._log_folder, tf.errors.OpError):
                self._log.close()


def _epoch_of(line: str) -> float:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return float(json.loads(line)["epoch"])
    return float("inf")

"""What is written during training: checkpoints, `metrics.jsonl`, a TensorBoard log.

Only the chief writes; where a write can fail, all ranks take part so that all hear of it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np

from hvdtrain.collectives.base import Collective
from hvdtrain.runtime.progress import Progress
from hvdtrain.train.callbacks.saver import CheckpointSaver, SaveTimes
from hvdtrain.train.checkpoint_file import not_written
from hvdtrain.train.chief import on_chief
from hvdtrain.whole_file import whole_file


class CheckpointWriter(keras.callbacks.Callback):
    """Writes a checkpoint after every so many epochs, and after the last. On every rank.

    Args:
        saver: What writes it.
        times: When one is due beside that.
        every_epochs: Integer; 0 for none but those of `times`.
        last_epoch: Integer, the number of epochs of the run.
    """

    def __init__(self, saver: CheckpointSaver, times: SaveTimes, *, every_epochs: int,
                 last_epoch: int) -> None:
        super().__init__()
        self._saver = saver
        self._times = times
        self._every = every_epochs
        self._last = last_epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save where it is due."""
        del logs
        done = epoch + 1
        due = self._times.by_steps(self._times.now)
        if self._every:
            due = due or done % self._every == 0 or done == self._last or self.model.stop_training
        if due:
            self._saver.save(self.model, done)
            self._times.begin(self._times.now)


class ChiefFile(Protocol):
    """A file of figures, of which the chief alone has one open."""

    def begin(self) -> None:
        """Make it ready. May fail."""
    def epoch_begins(self) -> None:
        """Note the time."""
    def write(self, epoch: int, figures: dict[str, Any]) -> None:
        """Add the figures of an epoch. May fail."""
    def close(self) -> None:
        """After the last epoch. May fail."""


class ChiefFiles(keras.callbacks.Callback):
    """Lets the chief write files of figures. On every rank: all hear of a failure.

    Args:
        files: What is written, on the chief.
        collective: The collective of the run.
        progress: Of this rank, for the watchdog: all ranks wait while the chief writes.
    """

    def __init__(self, files: Sequence[ChiefFile], collective: Collective,
                 progress: Progress) -> None:
        super().__init__()
        self._files = files
        self._collective = collective
        self._progress = progress

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Make the files ready."""
        del logs
        self._on_chief(lambda file: file.begin())

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the clock."""
        del epoch, logs
        for file in self._files:
            file.epoch_begins()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the figures."""
        self._on_chief(lambda file: file.write(epoch, dict(logs or {})))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the files."""
        del logs
        self._on_chief(lambda file: file.close())

    def _on_chief(self, act: Callable[[ChiefFile], None]) -> None:
        def work() -> None:
            for file in self._files:
                act(file)

        with self._progress.phase("writing the figures"):
            on_chief(self._collective, work)


class MetricsFile:
    """`metrics.jsonl`, with one JSON object per epoch.

    Args:
        path: Path of the file.
        first_epoch: Integer; lines of this epoch and later ones (from a run that was cut off)
            are removed first.
        samples_per_epoch: Integer, over all ranks; None where it is not known.
        done_before: Integer, how many of the first epoch's a former run has trained on.
    """

    def __init__(self, path: Path, *, first_epoch: int, samples_per_epoch: int | None,
                 done_before: int = 0) -> None:
        self._path = path
        self._first_epoch = first_epoch
        self._samples = samples_per_epoch
        self._done_before = done_before
        self._began = 0.0

    def begin(self) -> None:
        """Remove the lines of epochs that are done anew."""
        path = self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_text().splitlines() if path.is_file() else []
            with whole_file(path) as temporary:
                temporary.write_text("".join(
                    f"{line}\n" for line in lines if _epoch_of(line) <= self._first_epoch))
        except OSError as error:
            raise not_written(path, error) from error

    def epoch_begins(self) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def write(self, epoch: int, figures: dict[str, Any]) -> None:
        """Add the line of an epoch."""
        seconds = time.perf_counter() - self._began
        line = {"epoch": epoch + 1, **{k: np.asarray(v).tolist() for k, v in figures.items()},
                "seconds": round(seconds, 4), "time_s": round(time.time(), 4)}
        if self._samples is not None:
            samples, self._done_before = max(0, self._samples - self._done_before), 0
            line |= {"samples": samples, "samples_per_s": round(samples / seconds, 2)}
        try:
            with self._path.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            raise not_written(self._path, error) from error

    def close(self) -> None:
        """Each line was closed when it was written."""


def _epoch_of(line: str) -> float:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return float(json.loads(line)["epoch"])
    return float("inf")


class TensorBoardLog:
    """Each epoch's figures as TensorBoard scalars.

    (Keras' own callback overrides `on_train_batch_end`, which costs a copy of the metrics from
    the device after every batch.)
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def begin(self) -> None:
        """Open the log."""
        import tensorflow as tf
        with self._written():
            self._writer = tf.summary.create_file_writer(str(self._folder))

    def epoch_begins(self) -> None:
        """Nothing of an epoch's beginning is in the log."""

    def write(self, epoch: int, figures: dict[str, Any]) -> None:
        """Add the figures of an epoch."""
        import tensorflow as tf
        with self._written():
            with self._writer.as_default(step=epoch + 1):
                for name, value in figures.items():
                    if np.ndim(value) == 0:
                        tf.summary.scalar(name, value)
            self._writer.flush()

    def close(self) -> None:
        """Close the log."""
        with self._written():
            self._writer.close()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        import tensorflow as tf
        try:
            yield
        except tf.errors.OpError as error:
            raise not_written(self._folder, error) from error

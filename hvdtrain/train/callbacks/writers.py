"""What is written during training: checkpoints, `metrics.jsonl`, a TensorBoard log.

Only the chief writes; where a write can fail, all ranks take part so that all hear of it.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import keras

from hvdtrain.errors import NotWrittenError
from hvdtrain.train.callbacks.saver import CheckpointSaver, SaveTimes


class CheckpointWriter(keras.callbacks.Callback):
    """Writes a checkpoint after every so many epochs, and after the last. On every rank.

    Args:
        saver: What writes it.
        times: When one is due beside that.
        every_epochs: Integer; 0 for none but those of `times`.
        last_epoch: Integer, the number of epochs of the run.
        steps: Integer, steps of an epoch.
    """

    def __init__(self, saver: CheckpointSaver, times: SaveTimes, *, every_epochs: int,
                 last_epoch: int, steps: int) -> None:
        super().__init__()
        self._saver = saver
        self._times = times
        self._every = every_epochs
        self._last = last_epoch
        self._steps = steps

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save where it is due."""
        del logs
        done = epoch + 1
        due = self._times.by_steps(done * self._steps)
        if self._every:
            due = due or done % self._every == 0 or done == self._last or self.model.stop_training
        if due:
            self._saver.save(self.model, done)
            self._times.begin(done * self._steps)


class MetricsWriter(keras.callbacks.Callback):
    """Appends one JSON object per epoch to `metrics.jsonl`. The chief only.

    Args:
        path: Path of the file.
        first_epoch: Integer; lines of this epoch and later ones (from a run that was cut off)
            are removed first.
        samples_per_epoch: Integer, over all ranks.
        done_before: Integer, how many of the first epoch's a former run has trained on.
    """

    def __init__(self, path: Path, *, first_epoch: int, samples_per_epoch: int,
                 done_before: int = 0) -> None:
        super().__init__()
        self._path = path
        self._samples = samples_per_epoch
        self._done_before = done_before
        self._began = 0.0
        kept = [line for line in (path.read_text().splitlines() if path.is_file() else [])
                if _epoch_of(line) <= first_epoch]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(line + "\n" for line in kept))

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the clock."""
        del epoch, logs
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the line."""
        seconds = time.perf_counter() - self._began
        samples, self._done_before = max(0, self._samples - self._done_before), 0
        line = {"epoch": epoch + 1, **{k: float(v) for k, v in (logs or {}).items()},
                "samples": samples, "seconds": round(seconds, 4),
                "samples_per_s": round(samples / seconds, 2), "time_s": round(time.time(), 4)}
        try:
            with self._path.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            raise NotWrittenError(
                f"{self._path} could not be written: {error.strerror or error}. Free space on "
                "the disk, then go on with --resume.") from error


def _epoch_of(line: str) -> float:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return float(json.loads(line)["epoch"])
    return float("inf")


class TensorBoardWriter(keras.callbacks.Callback):
    """Writes each epoch's figures as TensorBoard scalars. The chief only.

    (Keras' own callback overrides `on_train_batch_end`, which costs a copy of the metrics from
    the device after every batch.)
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._writer: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Open the log."""
        del logs
        import tensorflow as tf
        self._writer = tf.summary.create_file_writer(str(self._folder))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the figures."""
        import tensorflow as tf
        with self._writer.as_default(step=epoch + 1):
            for name, value in (logs or {}).items():
                tf.summary.scalar(name, value)
        self._writer.flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the log."""
        del logs
        self._writer.close()

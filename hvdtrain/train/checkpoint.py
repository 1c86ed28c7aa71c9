"""The checkpoints of a run: saved, in the background where asked for, and the newest found."""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.errors import CheckpointError
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_seam
from hvdtrain.train.checkpoint_file import (
    RunState,
    not_written,
    read_state,
    save_model,
    serialized,
    write_file,
)

_NAME = re.compile(r"^epoch-(\d{5,})(?:-sample-(\d{9,}))?\.keras$")


class CheckpointStore:
    """The checkpoints of one run, `epoch-00003.keras` and so on, newest last.

    One that was written within an epoch is called `epoch-00003-sample-000001280.keras`.

    Args:
        folder: Path; made when the first checkpoint is written.
        keep: Integer, how many of the newest to keep.
        background: Boolean; `save` only takes a copy in memory, and a thread writes it. Call
            `wait` before relying on the file.
    """

    def __init__(self, folder: Path, *, keep: int, background: bool = False) -> None:
        self.folder = folder
        self._keep = keep
        self._background = background
        self._writing: _Writing | None = None

    def paths(self) -> list[Path]:
        """The checkpoints that are there, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(int(m[1]), int(m[2] or 0), p) for p in self.folder.iterdir()
                 if (m := _NAME.match(p.name))]
        return [path for *_, path in sorted(found)]

    def save(self, model: Any, state: RunState) -> Path:
        """Write one checkpoint and remove those beyond `keep`. The chief only.

        Raises:
            CheckpointError: It could not be written, or the one before it could not; the older
                ones are untouched.
        """
        path = self.folder / state.file_name
        self.wait()
        if not self._background:
            save_model(model, path, state)
            self._remove_old()
            return path
        self._writing = _Writing(serialized(model, state), path, then=self._remove_old)
        self._writing.start()
        return path

    def wait(self) -> None:
        """Return when the last checkpoint is on the disk. The chief; others have nothing.

        Raises:
            CheckpointError: It could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join()
            if writing.error is not None:
                raise writing.error

    def _remove_old(self) -> None:
        with contextlib.suppress(OSError):  # one file too many is no reason to stop
            for old in self.paths()[:-self._keep]:
                old.unlink(missing_ok=True)

    def load_newest(self, model: Any) -> RunState | None:
        """Load the newest checkpoint that can be read into a built, compiled model.

        One that is damaged is said in a warning, and the one before it is taken. The chief
        only; broadcast the variables afterwards.

        Returns:
            Its `RunState`, or None if there is no checkpoint at all.

        Raises:
            CheckpointError: All are damaged, or the newest whole one is of another model.
        """
        damaged: list[str] = []
        for path in reversed(self.paths()):
            try:
                state = read_state(path)
            except CheckpointError as error:
                get_logger().warning("%s Using the one before it.", error)
                damaged.append(path.name)
                continue
            _load_into(model, path)
            return state
        if damaged:
            raise CheckpointError(
                f"No checkpoint in {self.folder} can be read ({', '.join(damaged)} are "
                "damaged). Start afresh with --overwrite, or put a whole one there.")
        return None


class _Writing(threading.Thread):
    """Writes a file that is in memory. Python waits for it before it ends."""

    def __init__(self, file: io.BytesIO, path: Path, *, then: Callable[[], None]) -> None:
        super().__init__(name="hvdtrain-checkpoint", daemon=False)
        self._file = file
        self._path = path
        self._then = then
        self.error: CheckpointError | None = None

    def run(self) -> None:
        try:
            write_file(self._file.getbuffer(), self._path)
            self._then()
        except CheckpointError as error:
            self.error = error
        except Exception as error:  # such as a MemoryError
            self.error = not_written(self._path, error)
            self.error.__cause__ = error


def _load_into(model: Any, path: Path) -> None:
    before = len(keras_seam.variables_of(keras_seam.optimizers_of(model)))
    try:
        model.load_weights(path)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"Checkpoint {path} is whole but does not fit this model: {error}\nThe job was "
            "changed since. Undo the change, or start afresh with --overwrite.") from error
    if len(keras_seam.variables_of(keras_seam.optimizers_of(model))) != before:
        raise CheckpointError(f"Checkpoint {path} holds another optimizer than this job's.")

"""Checkpoints: plain `.keras` files, each complete or absent, and the newest of a run.

Further members of the zip archive are `hvdtrain.json` (the position in the run) and `hvdtrain.npz`
(arrays of callbacks and compression). Keras ignores them: the file loads without hvdtrain.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.collectives.plain import carried
from hvdtrain.errors import CheckpointError, NotWrittenError
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.whole_file import whole_file

_STATE, _ARRAYS = "hvdtrain.json", "hvdtrain.npz"
_ARRAY_KEY = "hvdtrain array"
_NAME = re.compile(r"^epoch-(\d{5,})(?:-sample-(\d{9,}))?\.keras$")


@carried
@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stood when a checkpoint was written."""

    epoch: int  # epochs that were completed
    step: int  # training steps that were done
    ranks: int
    version: str  # the hvdtrain that wrote it
    lr_scale: float = 1.0  # a factor in the learning rate of the file, from version 0.1
    seeds: tuple[tuple[int, int], ...] = ()  # generators, which Keras does not restore
    samples: int = 0  # trained on of the next epoch, over all ranks
    metrics: tuple[tuple[float, ...], ...] = ()  # their states then, summed over all ranks
    callbacks: tuple[dict[str, Any], ...] = ()  # see `train.callbacks.CallbackStates`
    stream_order: str = ""  # what decides the order of a stream, as far as it is known
    rank_states: tuple[Any, ...] = ()  # those that stateful layers keep of samples, by rank
    kept_back: dict[str, Any] = field(default_factory=dict)  # error feedback of compression
    batch_ranks: int = 0  # the global batch was that of so many ranks; 0: of `ranks`
    history: dict[str, Any] = field(default_factory=dict)  # of Keras' `History`; in commits only

    @property
    def file_name(self) -> str:
        """The name of its checkpoint."""
        within = f"-sample-{self.samples:09d}" if self.samples else ""
        return f"epoch-{self.epoch:05d}{within}.keras"


class CheckpointStore:
    """The newest checkpoints of a run, `epoch-00003.keras` or `epoch-00003-sample-000001280.keras`.

    In the background, `save` only copies to memory and a thread writes: call `wait` before relying
    on the file.
    """

    def __init__(self, folder: Path, *, keep: int, background: bool = False) -> None:
        self.folder = folder
        self._keep = keep
        self._background = background
        self._writing: Future[None] | None = None

    def paths(self) -> list[Path]:
        """The checkpoints that are there, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(int(m[1]), int(m[2] or 0), p) for p in self.folder.iterdir()
                 if (m := _NAME.match(p.name))]
        return [path for *_, path in sorted(found)]

    def save(self, model: Any, state: RunState) -> Path:
        """Write a checkpoint, remove old ones. Raises also for the one before. The chief only."""
        path = self.folder / state.file_name
        self.wait()
        if self._background:
            file = io.BytesIO()
            keras_model.save_to_memory(model, file)
            _add_state(file, state)
            writer = ThreadPoolExecutor(1, "hvdtrain-checkpoint")
            self._writing = writer.submit(self._write, file, path)
            writer.shutdown(wait=False)  # Python waits for it before it ends
        else:
            save_model(model, path, state)
            self._remove_old()
        return path

    def wait(self) -> None:
        """Return when the last checkpoint is on disk, or raise as `save` does."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, file: io.BytesIO, path: Path) -> None:
        with named_failures(path, Exception):  # such as a MemoryError
            write_file(file.getbuffer(), path)
            self._remove_old()

    def _remove_old(self) -> None:
        with suppress(OSError):  # one file too many is no reason to stop
            for old in self.paths()[:-self._keep]:
                old.unlink(missing_ok=True)

    def load_newest(self, model: Any) -> RunState | None:
        """Load the newest readable checkpoint into a built, compiled model. The chief only."""
        # None if there is no checkpoint; an error if all are damaged.
        damaged: list[str] = []
        for path in reversed(self.paths()):
            try:
                state = read_state(path)
            except CheckpointError as error:
                get_logger().warning("%s Using the one before it.", error)
                damaged.append(path.name)
            else:
                _load_into(model, path)
                return state
        if damaged:
            raise CheckpointError(
                f"No checkpoint in {self.folder} can be read ({', '.join(damaged)} are "
                "damaged). Start afresh with --overwrite, or put a whole one there.")
        return None


    def newest_state(self) -> RunState | None:
        """The position of the newest checkpoint, which is not checked. The chief only."""
        for path in reversed(self.paths()):
            with suppress(CheckpointError):
                return read_state(path, check=False)
        return None


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Give a temporary name for a file, which is then complete or as it was before."""
    with named_failures(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            yield temporary


@contextmanager
def named_failures(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Turn OSError and the given errors into a `NotWrittenError` that names the file."""
    known: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        yield
    except NotWrittenError:
        raise
    except known as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise NotWrittenError(
            f"{path} could not be written: {why or f'{type(error).__name__}: {error}'}. Free space "
            "on the disk or give another folder with --output; older checkpoints are untouched, "
            "so the run can go on with --resume.") from error


def save_model(model: Any, path: Path, state: RunState | None = None) -> None:
    """Write a model, completely or not at all. The chief only."""
    with written(path) as temporary:
        model.save(temporary)
        if state is not None:
            _add_state(temporary, state)


def write_file(data: memoryview, path: Path) -> None:
    """Write a file that is in memory, completely or not at all."""
    with written(path) as temporary:
        temporary.write_bytes(data)


def _add_state(file: Path | io.BytesIO, state: RunState) -> None:
    arrays: list[np.ndarray[Any, Any]] = []

    def numbered(array: Any) -> dict[str, int]:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{type(array).__name__} cannot be kept in a checkpoint")
        arrays.append(array)
        return {_ARRAY_KEY: len(arrays) - 1}

    text = json.dumps(dataclasses.asdict(state), indent=1, default=numbered)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(_STATE, text)
        if arrays:
            with archive.open(_ARRAYS, "w") as member:
                np.savez(member, *arrays)


def read_state(path: Path, *, check: bool = True) -> RunState:
    """Check a checkpoint byte by byte (CRC of each member) and read its position."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip() if check else None
            if bad is not None:
                raise CheckpointError(f"Checkpoint {path} is damaged (in {bad}).")
            arrays = {}
            if _ARRAYS in archive.namelist():
                with archive.open(_ARRAYS) as member, np.load(member) as found:
                    arrays = dict(found)
            values = json.loads(archive.read(_STATE), object_hook=lambda value: (
                arrays[f"arr_{value[_ARRAY_KEY]}"] if set(value) == {_ARRAY_KEY} else value))
        for name in ("callbacks", "rank_states"):
            values[name] = tuple(values.get(name, ()))
        values["seeds"] = tuple((int(a), int(b)) for a, b in values.get("seeds", ()))
        values["metrics"] = tuple(tuple(map(float, m)) for m in values.get("metrics", ()))
        return RunState(**values)
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"Checkpoint {path} is damaged ({error}).") from error


def _load_into(model: Any, path: Path) -> None:
    optimizers = keras_seam.optimizers_of(model)
    before = len(keras_seam.variables_of(optimizers))
    try:
        model.load_weights(path)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"Checkpoint {path} is whole but does not fit this model: {error}\nThe job was "
            "changed since. Undo the change, or start afresh with --overwrite.") from error
    if len(keras_seam.variables_of(optimizers)) != before:
        raise CheckpointError(f"Checkpoint {path} holds another optimizer than this job's.")

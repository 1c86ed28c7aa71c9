"""One checkpoint file: a plain `.keras` file, written whole or not at all.

It holds model, optimizer and, as further members of the zip archive, `hvdtrain.json` with the
position in the run and `hvdtrain.npz` with arrays that callbacks and compression keep; Keras
ignores these members, so the file loads without hvdtrain. It is written by
`whole_file`.
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.collectives.plain import carried
from hvdtrain.errors import CheckpointError, NotWrittenError
from hvdtrain.optim import keras_model
from hvdtrain.whole_file import whole_file

STATE_MEMBER = "hvdtrain.json"
ARRAYS_MEMBER = "hvdtrain.npz"
_ARRAY_KEY = "hvdtrain array"


@carried
@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stood when a checkpoint was written."""

    epoch: int
    """Epochs that were completed."""
    step: int
    """Training steps that were done."""
    ranks: int
    version: str
    """The hvdtrain that wrote it."""
    lr_scale: float = 1.0
    """Factor in the learning rate of the file: 1, or what version 0.1 has multiplied it with."""
    seeds: tuple[tuple[int, int], ...] = ()
    """The chief's seed generators (dropout), in the order of `optim.state.seed_variables`;
    Keras itself does not restore them."""
    samples: int = 0
    """Samples of the next epoch that were trained on, over all ranks; 0 at the end of one."""
    metrics: tuple[tuple[float, ...], ...] = ()
    """With `samples`: the metrics' states, summed over all ranks."""
    callbacks: tuple[dict[str, Any], ...] = ()
    """What the user's callbacks remember: see `train.callbacks.state`."""
    stream_order: str = ""
    """Of a stream, what decides the order of its samples; empty where it is not known."""
    rank_states: tuple[Any, ...] = ()
    """What stateful layers keep of the samples of all ranks: arrays, rank after rank."""
    kept_back: dict[str, Any] = field(default_factory=dict)
    """What compression has not sent yet: see `optim.kept_back`."""

    @property
    def file_name(self) -> str:
        """The name of its checkpoint."""
        within = f"-sample-{self.samples:09d}" if self.samples else ""
        return f"epoch-{self.epoch:05d}{within}.keras"


def save_model(model: Any, path: Path, state: RunState | None = None) -> None:
    """Write a model to `path`, whole or not at all. The chief only.

    Raises:
        NotWrittenError: It could not be written (disk full, no permission); an older file of
            that name is left as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            model.save(temporary)
            if state is not None:
                _add_state(temporary, state)
    except OSError as error:
        raise not_written(path, error) from error


def serialized(model: Any, state: RunState) -> io.BytesIO:
    """The file that `save_model` would write, in memory."""
    file = io.BytesIO()
    keras_model.save_to_memory(model, file)
    _add_state(file, state)
    return file


def write_file(data: memoryview, path: Path) -> None:
    """Write a file that is in memory, whole or not at all.

    Raises:
        NotWrittenError: As `save_model`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: Exception) -> NotWrittenError:
    """The error of a file of the run that could not be written."""
    why = error.strerror if isinstance(error, OSError) else None
    return NotWrittenError(
        f"{path} could not be written: {why or f'{type(error).__name__}: {error}'}. Free space on "
        "the disk or give another folder with --output; older checkpoints are untouched, so the "
        "run can go on with --resume.")


def _add_state(file: Path | io.BytesIO, state: RunState) -> None:
    arrays: list[np.ndarray[Any, Any]] = []
    values = _without_arrays(dataclasses.asdict(state), arrays)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(STATE_MEMBER, json.dumps(values, indent=1))
        if arrays:
            with archive.open(ARRAYS_MEMBER, "w") as member:
                np.savez(member, *arrays)


def _without_arrays(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    """The same structure with a number in the place of each array, which goes to `arrays`."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {_ARRAY_KEY: len(arrays) - 1}
    if isinstance(value, dict):
        return {name: _without_arrays(v, arrays) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_arrays(v, arrays) for v in value]
    return value


def _with_arrays(value: Any, arrays: Any) -> Any:
    """What `_without_arrays` was given."""
    if isinstance(value, dict):
        if set(value) == {_ARRAY_KEY}:
            return arrays[f"arr_{value[_ARRAY_KEY]}"]
        return {name: _with_arrays(v, arrays) for name, v in value.items()}
    if isinstance(value, list):
        return [_with_arrays(v, arrays) for v in value]
    return value


def read_state(path: Path) -> RunState:
    """Check a checkpoint byte by byte (CRC of each member) and read its position.

    Raises:
        CheckpointError: It is damaged, or it was not written by hvdtrain.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
            if bad is not None:
                raise CheckpointError(f"Checkpoint {path} is damaged (in {bad}).")
            values = json.loads(archive.read(STATE_MEMBER))
            arrays = {}
            if ARRAYS_MEMBER in archive.namelist():
                with archive.open(ARRAYS_MEMBER) as member, np.load(member) as found:
                    arrays = dict(found)
            values["callbacks"] = tuple(_with_arrays(values.get("callbacks", []), arrays))
            values["rank_states"] = tuple(_with_arrays(values.get("rank_states", []), arrays))
            values["kept_back"] = _with_arrays(values.get("kept_back", {}), arrays)
            values["seeds"] = tuple((int(a), int(b)) for a, b in values.get("seeds", ()))
            values["metrics"] = tuple(tuple(map(float, m)) for m in values.get("metrics", ()))
            return RunState(**values)
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"Checkpoint {path} is damaged ({error}).") from error

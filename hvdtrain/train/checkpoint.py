"""Checkpoints: one plain `.keras` file each, written whole or not at all.

A file holds model, optimizer and, as one more member of the zip archive, `hvdtrain.json` with
the position in the run; Keras ignores that member, so the file loads without hvdtrain. It is
written to a temporary name in the same folder, synchronised, and renamed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import CheckpointError
from hvdtrain.log import get_logger

STATE_MEMBER = "hvdtrain.json"
_NAME = re.compile(r"^epoch-(\d{5,})(?:-sample-(\d{9,}))?\.keras$")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stood when a checkpoint was written."""

    epoch: int
    """Epochs that were completed."""
    step: int
    """Training steps that were done."""
    ranks: int
    lr_scale: float
    """Factor that the learning rate was multiplied with."""
    version: str
    """The hvdtrain that wrote it."""
    seeds: tuple[tuple[int, int], ...] = ()
    """The chief's seed generators (dropout), in the order of `optim.state.seed_variables`;
    Keras itself does not restore them."""
    samples: int = 0
    """Samples of the next epoch that were trained on, over all ranks; 0 at the end of one."""
    metrics: tuple[tuple[float, ...], ...] = ()
    """With `samples`: the metrics' states, summed over all ranks."""

    @property
    def file_name(self) -> str:
        """The name of its checkpoint."""
        within = f"-sample-{self.samples:09d}" if self.samples else ""
        return f"epoch-{self.epoch:05d}{within}.keras"


def save_model(model: Any, path: Path, state: RunState | None = None) -> None:
    """Write a model to `path`, whole or not at all. The chief only.

    Raises:
        CheckpointError: It could not be written (disk full, no permission); an older file of
            that name is left as it was.
    """
    temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}.keras")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        model.save(temporary)
        if state is not None:
            with zipfile.ZipFile(temporary, "a") as archive:
                archive.writestr(STATE_MEMBER, json.dumps(dataclasses.asdict(state), indent=1))
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {error.strerror or error}. Free space on the disk or "
            "give another folder with --output; older checkpoints are untouched, so the run "
            "can go on with --resume.") from error
    finally:
        temporary.unlink(missing_ok=True)


class CheckpointStore:
    """The checkpoints of one run, `epoch-00003.keras` and so on, newest last.

    One that was written within an epoch is called `epoch-00003-sample-000001280.keras`.

    Args:
        folder: Path; made when the first checkpoint is written.
        keep: Integer, how many of the newest to keep.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self._keep = keep

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
            CheckpointError: It could not be written; the older ones are untouched.
        """
        path = self.folder / state.file_name
        save_model(model, path, state)
        for old in self.paths()[:-self._keep]:
            old.unlink(missing_ok=True)
        return path

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
            values["seeds"] = tuple((int(a), int(b)) for a, b in values.get("seeds", ()))
            values["metrics"] = tuple(tuple(map(float, m)) for m in values.get("metrics", ()))
            return RunState(**values)
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"Checkpoint {path} is damaged ({error}).") from error


def _load_into(model: Any, path: Path) -> None:
    before = len(model.optimizer.variables)
    try:
        model.load_weights(path)
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"Checkpoint {path} is whole but does not fit this model: {error}\nThe job was "
            "changed since. Undo the change, or start afresh with --overwrite.") from error
    if len(model.optimizer.variables) != before:
        raise CheckpointError(f"Checkpoint {path} holds another optimizer than this job's.")

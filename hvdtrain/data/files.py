"""Files of data: found by name; and the base of all sources over them.

A bad sample (damaged, incomplete, invalid) ends the reading with `on_error="raise"`. With `"skip"`
it stays in place, as zeros with a sample weight of 0: every rank keeps its steps, and the order of
all other samples stays the same.
"""

from __future__ import annotations

import glob
import math
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import tensorflow as tf

from hvdtrain.data.source import Source, Structure
from hvdtrain.errors import DataError
from hvdtrain.log import get_logger

Paths: TypeAlias = str | Path | Sequence[str | Path]
"""A path, a pattern (`*`, `?`, `[...]`, `**`), or a sequence of them."""
OnError: TypeAlias = Literal["raise", "skip"]
Array: TypeAlias = np.ndarray[Any, Any]
Problems: TypeAlias = dict[int, str]
"""For each bad row, by its index in a part of a table: file, place, reason."""

NAMED_BAD_SAMPLES = 5
"""Warnings name this many bad samples; after that only their number, at 10, 100, ..."""


def find_files(paths: Paths) -> tuple[Path, ...]:
    """The files that paths and patterns name; those of a pattern are sorted by name."""
    # DataError where a file does not exist, a pattern finds none, or a path is a folder.
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not given:
        raise DataError("No data files were given. Expected a path, a pattern such as "
                        "'data/*.tfrecord', or a list of them.")
    files: list[Path] = []
    for path in map(Path, given):
        if path.is_dir():
            raise DataError(f"{path} is a folder; expected files. Give a pattern, such as "
                            f"'{path}/*'.")
        found = [path] if path.is_file() else sorted(
            file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
        if not found:
            pattern = glob.has_magic(str(path))
            what = f"No file is named {path}" if pattern else f"The data file {path} does not exist"
            raise DataError(f"{what}. A relative {'pattern' if pattern else 'path'} is taken from "
                            f"the folder {Path.cwd()}.")
        files += found
    return tuple(files)


def name_of(files: Sequence[Path]) -> str:
    """A name for messages: the first file, and the number of others."""
    return f"{files[0]} and {len(files) - 1} more" if len(files) > 1 else str(files[0])


class BadSamplesError(Exception):
    """Some of the requested samples are bad: by position, file, place and reason."""

    def __init__(self, messages: Mapping[int, str]) -> None:
        self.messages = dict(sorted(messages.items()))
        super().__init__("; ".join(self.messages.values()))


class FileSource(Source):
    """Samples in files; subclasses set their content (`fields`) and define `read_rows`.

    Args:
        name: String for messages.
        on_error: `"raise"` or `"skip"`; with `"skip"` all samples have a sample weight.
        content_key: Callable for `content_key`; None if there is no key.
    """

    fields: Structure = None
    """The structure of `tf.TensorSpec` of what `read_rows` returns."""

    def __init__(self, name: str, on_error: OnError,
                 content_key: Callable[[], str] | None) -> None:
        if on_error not in ("raise", "skip"):
            raise DataError(f"{name}: on_error must be 'raise' or 'skip'. Received: {on_error!r}")
        self.name = name
        self.on_error = on_error
        self._content_key = content_key
        self._bad: dict[int, str] = {}
        self._lock = threading.Lock()
        if on_error == "skip":
            weakref.finalize(self, _report, name, self._bad)

    @abstractmethod
    def read_rows(self, rows: Array) -> Structure:
        """Read samples (at least one, also repeated) in any thread, or raise BadSamplesError."""

    @property
    def signature(self) -> Structure:
        """See `Source.signature`."""
        if self.on_error == "raise":
            return self.fields
        return (*self.fields[:2], tf.TensorSpec((), tf.float32))

    def content_key(self) -> str | None:
        """A key that changes with files or settings; None where a user's function decides."""
        return f"{self._content_key()}-{self.on_error}" if self._content_key else None

    def check_fields(self) -> None:
        """Refuse to skip samples that cannot have a weight; subclasses call it in `__init__`."""
        if self.on_error == "skip" and (
                not isinstance(self.fields, tuple) or len(self.fields) < 2):
            raise DataError(
                f"{self.name}: on_error='skip' gives bad samples the weight 0, and Keras knows "
                "weights only beside targets. Name a target, or use on_error='raise'.")

    @property
    def skipped(self) -> int:
        """Different bad samples that this process has met (`on_error="skip"`)."""
        return len(self._bad)

    def read(self, rows: Array) -> Structure:
        """See `Source.read`."""
        rows = np.asarray(rows, np.int64)
        if self.on_error == "skip":
            return self._read_weighted(rows)
        try:
            return self.read_rows(rows)
        except BadSamplesError as error:
            first, *others = error.messages.values()
            more = f" {len(others)} more samples of this batch are bad." if others else ""
            raise DataError(
                f"{first}{more} Mend or replace the file, or give bad samples the weight 0 with "
                "on_error='skip'.") from error

    def _read_weighted(self, rows: Array) -> Structure:
        good = np.fromiter((int(row) not in self._bad for row in rows), bool, len(rows))
        found: Any = None
        while found is None and good.any():
            try:
                found = self.read_rows(rows[good])
            except BadSamplesError as error:
                positions = np.flatnonzero(good)
                for position, message in error.messages.items():
                    self._remember(int(rows[positions[position]]), message)
                good[positions[list(error.messages)]] = False
        if found is None:  # axes of unknown length have one element
            found = tf.nest.map_structure(lambda spec: np.zeros(
                (0, *(size or 1 for size in spec.shape)), spec.dtype.as_numpy_dtype), self.fields)

        def spread(array: Array) -> Array:
            result = np.full((len(good), *array.shape[1:]), b"" if array.dtype == object else 0,
                             array.dtype)
            result[good] = array
            return result
        x, y, *given = found if good.all() else tf.nest.map_structure(spread, tuple(found))
        weights = np.asarray(given[0], np.float32) if given else good.astype(np.float32)
        return x, y, weights

    def _remember(self, row: int, message: str) -> None:
        with self._lock:
            if row in self._bad:
                return
            self._bad[row] = message
            count = len(self._bad)
        if count <= NAMED_BAD_SAMPLES:
            get_logger().warning("%s It has the sample weight 0.", message)
        elif count == 10 ** round(math.log10(count)):
            get_logger().warning("%s: %d bad samples so far, with the sample weight 0",
                                 self.name, count)


def _report(name: str, bad: Mapping[int, str]) -> None:
    if bad:
        get_logger().warning("%s: %d bad sample%s, with the sample weight 0", name, len(bad),
                             "s" if len(bad) > 1 else "")


@dataclass(frozen=True)
class Columns:
    """The names of the used columns."""

    inputs: tuple[str, ...]
    target: str | None
    sample_weight: str | None

    @property
    def others(self) -> dict[str, str]:
        """Those beside the input, by their field of a record."""
        given = {"y": self.target, "weight": self.sample_weight}
        return {field: name for field, name in given.items() if name is not None}

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*self.inputs, *self.others.values()]


def choose_columns(names: Sequence[str], file: Path, columns: Sequence[str] | None,
                   target: str | None, sample_weight: str | None) -> Columns:
    """Select columns among the `names` of a file."""
    if sample_weight is not None and target is None:
        raise DataError("sample_weight needs a target: Keras knows weights only beside one.")
    inputs = [name for name in names if name not in (target, sample_weight)] \
        if columns is None else columns
    chosen = Columns(tuple(inputs), target, sample_weight)
    for name in chosen.names:
        if name not in names:
            raise DataError(f"{file} has no column {name!r}. It has: {', '.join(names)}.")
    if not inputs:
        raise DataError(f"{file} has no column for the input. Name some with columns=[...].")
    return chosen


class TableSource(FileSource):
    """Rows in parts that are arrays of records with the fields `x`, `y` and `weight`."""
    # `_starts` is int64 `(parts + 1,)`: the index of the first row of each part, and of all rows.

    _starts: Array
    _record: np.dtype[Any] = np.dtype([])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @abstractmethod
    def _part(self, number: int) -> tuple[Array, Problems]:
        """The records of a part; those of bad rows have any value."""

    def set_record(self, record: np.dtype[Any]) -> None:
        """Set the type of the records, and with it `fields`."""
        self._record = record
        self.fields = alone_or_tuple([
            tf.TensorSpec(record[name].shape, tf.as_dtype(record[name].base))
            for name in record.names or ()])

    def read_rows(self, rows: Array) -> Structure:
        """See `FileSource.read_rows`."""
        parts = np.searchsorted(self._starts, rows, side="right") - 1
        found, bad = np.empty(len(rows), self._record), {}
        for part in np.unique(parts).tolist():
            positions = np.flatnonzero(parts == part)
            inside = rows[positions] - self._starts[part]
            records, problems = self._part(part)
            if problems:
                bad.update({position: problems[row] for position, row in zip(
                    positions.tolist(), inside.tolist(), strict=True) if row in problems})
            found[positions] = records[inside]
        if bad:
            raise BadSamplesError(bad)
        return alone_or_tuple([np.ascontiguousarray(found[name])
                                for name in self._record.names or ()])


def alone_or_tuple(values: list[Any]) -> Any:
    """The structure of `x` alone, or of it with targets and weights."""
    return tuple(values) if len(values) > 1 else values[0]

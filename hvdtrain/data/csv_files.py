"""`load_csv`: CSV files of numbers as a source, any row in any order."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.csv_index import Dialect, index_rows, read_header
from hvdtrain.data.file_source import BadSamplesError, FileSource, OnError
from hvdtrain.data.files import PartReader, Paths, cache_folder, find_files, fingerprint, name_of
from hvdtrain.data.source import Structure
from hvdtrain.errors import DataError

DTYPES = ("float32", "float64", "int32", "int64")
"""Types that a column of numbers can become."""


def load_csv(paths: Paths, *, target: str | None = None, sample_weight: str | None = None,
             columns: Sequence[str] | None = None, dtype: str = "float32",
             target_dtype: str = "float32", classes: Sequence[str] | None = None,
             missing: float | None = None, delimiter: str = ",", quote: str = '"',
             header: bool = True, on_error: OnError = "raise",
             cache: str | Path | None = None) -> CsvSource:
    """Open CSV files of numbers as a source.

    Where the rows are is found out by reading the files once, in one process per host; the index
    is kept in `cache` until a file changes in size or time. Line ends in quotes belong to a
    field; blank lines are passed over.

    Args:
        paths: Path, pattern or sequence of them; see `hvdtrain.data.files.find_files`. All files
            have the same columns.
        target: String or None, the column that is the target.
        sample_weight: String or None, the column that is the sample weight.
        columns: The columns that are the input, in this order; None for all others. The input
            has the shape `(n, len(columns))`.
        dtype: String, the type of the input.
        target_dtype: String, the type of the target.
        classes: The words that stand for classes in the target's column, in the order of their
            numbers; the target is int32 then.
        missing: Number for fields that are empty; None: they make a row bad.
        delimiter: String, the character between fields.
        quote: String, the character around fields.
        header: Boolean; the first row of each file has the columns' names. Without it they are
            named "0", "1" and so on.
        on_error: `"raise"`, or `"skip"`: rows that cannot be read have sample weight 0.
        cache: Folder for the index; see `hvdtrain.data.files.cache_folder`.

    Raises:
        DataError: Files are missing, differ in their columns, have no rows, or lack a column.
    """
    if sample_weight is not None and target is None:
        raise DataError("sample_weight needs a target: Keras knows weights only beside one.")
    files, dialect = find_files(paths), Dialect(delimiter=delimiter, quote=quote)
    names, begins = _headers(files, dialect, header)
    table = _Table.choose(
        names, files[0], columns=columns, target=target, sample_weight=sample_weight,
        dtype=_dtype(dtype), target_dtype=_dtype("int32" if classes else target_dtype),
        classes=tuple(classes) if classes else None, missing=missing)
    return CsvSource(files, begins, table, dialect, on_error=on_error, cache=cache_folder(cache))


@dataclass(frozen=True, kw_only=True)
class _Table:
    """What is taken from a row of text."""

    names: tuple[str, ...]
    """All columns of the files."""
    inputs: tuple[int, ...]
    target: int | None
    sample_weight: int | None
    dtype: np.dtype[Any]
    target_dtype: np.dtype[Any]
    classes: tuple[str, ...] | None
    missing: float | None

    @classmethod
    def choose(cls, names: Sequence[str], file: Path, *, columns: Sequence[str] | None,
               target: str | None, sample_weight: str | None, **types: Any) -> _Table:
        """Find columns by their names."""
        special = [name for name in (target, sample_weight) if name is not None]
        chosen = [name for name in names if name not in special] if columns is None \
            else list(columns)
        for name in (*chosen, *special):
            if name not in names:
                raise DataError(f"{file} has no column {name!r}. It has: {', '.join(names)}.")
        if not chosen:
            raise DataError(f"{file} has no column for the input. Name some with columns=[...].")
        place = {name: number for number, name in enumerate(names)}
        return cls(names=tuple(names), inputs=tuple(place[name] for name in chosen),
                   target=None if target is None else place[target],
                   sample_weight=None if sample_weight is None else place[sample_weight], **types)

    def take(self, fields: Sequence[str]) -> tuple[list[float], float, float]:
        """Input, target and sample weight of a row.

        Raises:
            ValueError: Naming the column, what was found and what was expected.
        """
        if len(fields) != len(self.names):
            raise ValueError(f"the row has {len(fields)} fields; expected {len(self.names)}")
        return ([self._number(fields, column, self.dtype) for column in self.inputs],
                0 if self.target is None else self._target(fields, self.target),
                1 if self.sample_weight is None
                else self._number(fields, self.sample_weight, np.dtype(np.float32)))

    def _number(self, fields: Sequence[str], column: int, dtype: np.dtype[Any]) -> float:
        text = fields[column].strip()
        if not text and self.missing is not None:
            return self.missing
        try:
            if dtype.kind == "f":
                return float(text)
            value = int(text)
            if abs(value) < 1 << (8 * dtype.itemsize - 1):
                return value
        except ValueError:
            pass
        raise ValueError(f"column {self.names[column]!r} is {text[:40]!r}; expected a number of "
                         f"type {dtype.name}")

    def _target(self, fields: Sequence[str], column: int) -> float:
        if self.classes is None:
            return self._number(fields, column, self.target_dtype)
        if fields[column] not in self.classes:
            raise ValueError(f"column {self.names[column]!r} is {fields[column][:40]!r}; expected "
                             f"one of {', '.join(self.classes)}")
        return self.classes.index(fields[column])


class CsvSource(FileSource):
    """The rows of CSV files. Made by `load_csv`."""

    def __init__(self, files: Sequence[Path], begins: Sequence[int], table: _Table,
                 dialect: Dialect, *, on_error: OnError, cache: Path) -> None:
        super().__init__(name_of(files), on_error,
                         lambda: fingerprint(files, "csv", tuple(begins), dialect, table))
        self._files = tuple(files)
        self._table = table
        self._dialect = dialect
        self._index = index_rows(files, begins, dialect, cache, self.index_count)
        self._parts = PartReader(files, self.count)
        if not len(self._index):
            raise DataError(f"{self.name}: there are no rows of data; at least one is needed.")
        self.check_fields()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def fields(self) -> Structure:
        """See `FileSource.fields`."""
        table = self._table
        specs = [tf.TensorSpec((len(table.inputs),), tf.as_dtype(table.dtype))]
        if table.target is not None:
            specs.append(tf.TensorSpec((), tf.as_dtype(table.target_dtype)))
        if table.sample_weight is not None:
            specs.append(tf.TensorSpec((), tf.float32))
        return tuple(specs) if len(specs) > 1 else specs[0]

    def read_rows(self, rows: np.ndarray[Any, Any]) -> Structure:
        """See `FileSource.read_rows`."""
        files = self._index.file_of(rows)
        taken: dict[int, tuple[list[float], float, float]] = {}
        problems: dict[int, str] = {}
        # In the order of the files, which may be cheaper than the order asked for.
        for position in np.argsort(rows, kind="stable").tolist():
            file, row = int(files[position]), int(rows[position])
            try:
                taken[position] = self._take(file, row)
            except ValueError as error:
                problems[position] = (f"{self._files[file]}, offset "
                                      f"{int(self._index.offsets[row])}: {error}.")
        if problems:
            raise BadSamplesError(dict(sorted(problems.items())))
        x, y, weight = zip(*(taken[position] for position in range(len(rows))), strict=True)
        table = self._table
        arrays = [np.asarray(x, table.dtype)]
        if table.target is not None:
            arrays.append(np.asarray(y, table.target_dtype))
        if table.sample_weight is not None:
            arrays.append(np.asarray(weight, np.float32))
        return tuple(arrays) if len(arrays) > 1 else arrays[0]

    def _take(self, file: int, row: int) -> tuple[list[float], float, float]:
        begin, end = int(self._index.offsets[row]), int(self._index.ends[row])
        try:
            text = self._parts.read(file, begin, end - begin).decode()
        except OSError as error:
            raise DataError(f"{self._files[file]} cannot be read: {error.strerror}.") from error
        try:
            found = list(self._dialect.rows(iter([text])))
        except csv.Error as error:
            raise ValueError(f"the row cannot be read: {error}") from error
        if len(found) != 1:
            raise ValueError("the file has changed since the index was made")
        taken = self._table.take(found[0])
        if not all(map(math.isfinite, (*taken[0], *taken[1:]))):
            raise ValueError("a number is not finite")
        return taken


def _dtype(name: str) -> np.dtype[Any]:
    if name not in DTYPES:
        raise DataError(f"Unknown dtype {name!r}. Expected one of: {', '.join(DTYPES)}.")
    return np.dtype(name)


def _headers(files: Sequence[Path], dialect: Dialect,
             header: bool) -> tuple[list[str], list[int]]:
    """The columns, which are those of all files; and where the data of each file begins."""
    names: list[str] = []
    begins = []
    for file in files:
        fields, begin = read_header(file, dialect, has_header=header)
        mine = fields if header else [str(number) for number in range(len(fields))]
        if names and mine != names:
            raise DataError(f"{file} has other columns than {files[0]}: {', '.join(mine)}; "
                            f"expected {', '.join(names)}.")
        names = mine
        begins.append(begin)
    return names, begins

"""`load_parquet`: Parquet files as a source; a few row groups are kept in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.file_source import BadSamplesError, FileSource, OnError
from hvdtrain.data.files import Paths, find_files, fingerprint, name_of
from hvdtrain.data.parquet_groups import Column, groups_of, metadata_of, read_group
from hvdtrain.data.source import Structure
from hvdtrain.errors import DataError


def load_parquet(paths: Paths, *, target: str | None = None, sample_weight: str | None = None,
                 columns: Sequence[str] | None = None, shape: Sequence[int] | None = None,
                 dtype: str = "float32", target_dtype: str | None = None,
                 groups_kept: int = 4, on_error: OnError = "raise") -> ParquetSource:
    """Open Parquet files as a source.

    A row group is what can be read singly. Rows of a shuffled order lie in as many row groups as
    there are rows: use `hvdtrain.unpacked` then, or write files with small row groups.

    Args:
        paths: Path, pattern or sequence of them; see `hvdtrain.data.files.find_files`.
        target: String or None, the column that is the target.
        sample_weight: String or None, the column that is the sample weight.
        columns: The columns that are the input, in this order; None for all others. Columns of
            numbers side by side make `(n, len(columns))`; a column of lists of one length
            makes `(n, length)`, and must be alone.
        shape: Shape of a sample's input, to which a list is brought; None for as it is.
        dtype: String, the type of the input.
        target_dtype: String, the type of the target; None for that of the column.
        groups_kept: Integer, row groups that are kept in memory for the next reading.
        on_error: `"raise"`, or `"skip"`: rows with missing values, and rows of damaged row groups,
            have sample weight 0.

    Raises:
        DataError: Files are missing or damaged, lack a column, or a column is of another type.
        MissingExtraError: `pyarrow` is not installed.
    """
    if sample_weight is not None and target is None:
        raise DataError("sample_weight needs a target: Keras knows weights only beside one.")
    if groups_kept < 1:
        raise DataError(f"groups_kept must be at least 1. Received: groups_kept={groups_kept}")
    files = find_files(paths)
    chosen = _Chosen.choose(metadata_of(files[0]).schema.to_arrow_schema(), files[0],
                            columns=columns, target=target, sample_weight=sample_weight)
    return ParquetSource(files, chosen, shape=None if shape is None else tuple(shape),
                         dtype=np.dtype(dtype),
                         target_dtype=None if target_dtype is None else np.dtype(target_dtype),
                         groups_kept=groups_kept, on_error=on_error)


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The columns that are read."""

    inputs: tuple[str, ...]
    target: str | None
    sample_weight: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.inputs, *(n for n in (self.target, self.sample_weight) if n is not None))

    @classmethod
    def choose(cls, schema: Any, file: Path, *, columns: Sequence[str] | None,
               target: str | None, sample_weight: str | None) -> _Chosen:
        """Find columns by their names."""
        special = [name for name in (target, sample_weight) if name is not None]
        inputs = [name for name in schema.names if name not in special] if columns is None \
            else list(columns)
        for name in (*inputs, *special):
            if name not in schema.names:
                raise DataError(f"{file} has no column {name!r}. It has: "
                                f"{', '.join(schema.names)}.")
        if not inputs:
            raise DataError(f"{file} has no column for the input. Name some with columns=[...].")
        return cls(inputs=tuple(inputs), target=target, sample_weight=sample_weight)


class ParquetSource(FileSource):
    """The rows of Parquet files. Made by `load_parquet`."""

    def __init__(self, files: Sequence[Path], chosen: _Chosen, *, shape: tuple[int, ...] | None,
                 dtype: np.dtype[Any], target_dtype: np.dtype[Any] | None, groups_kept: int,
                 on_error: OnError) -> None:
        settings = (chosen, shape, dtype, target_dtype)
        super().__init__(name_of(files), on_error,
                         lambda: fingerprint(files, "parquet", *map(str, settings)))
        self._files, self._chosen = tuple(files), chosen
        self._shape, self._dtype, self._target_dtype = shape, dtype, target_dtype
        self._kept: OrderedDict[int, dict[str, Column] | str] = OrderedDict()
        self._groups_kept = groups_kept
        self._lock = threading.Lock()
        self._places: list[tuple[int, int, int]] = []
        """For each row group: its file, its number in it, bytes of the chosen columns."""
        starts, like = [0], metadata_of(files[0]).schema.to_arrow_schema()
        for number, file in enumerate(files):
            for group, (rows, size) in enumerate(groups_of(file, chosen.names, like)):
                self._places.append((number, group, size))
                starts.append(starts[-1] + rows)
        self._starts = np.asarray(starts, np.int64)
        if not len(self):
            raise DataError(f"{self.name}: there are no rows; at least one is needed.")
        self._fields = self._find_fields()
        self.check_fields()

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def fields(self) -> Structure:
        """See `FileSource.fields`."""
        return self._fields

    def read_rows(self, rows: np.ndarray[Any, Any]) -> Structure:
        """See `FileSource.read_rows`."""
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        parts, order, problems = [], [], {}
        for group in np.unique(groups).tolist():
            positions = np.flatnonzero(groups == group)
            inside = rows[positions] - self._starts[group]
            found = self._group(group)
            for position, message in self._problems(group, found, inside):
                problems[int(positions[position])] = message
            if not isinstance(found, str):
                parts.append({name: values[inside] for name, (values, _) in found.items()})
                order.append(positions)
        if problems:
            raise BadSamplesError(dict(sorted(problems.items())))
        back = np.argsort(np.concatenate(order))
        return self._arrange({name: np.concatenate([part[name] for part in parts])[back]
                              for name in self._chosen.names})

    def _problems(self, group: int, found: dict[str, Column] | str,
                  inside: np.ndarray[Any, Any]) -> list[tuple[int, str]]:
        """Which of some rows of a row group are bad, and why."""
        file, number, _ = self._places[group]
        where = f"{self._files[file]}, row group {number}"
        if isinstance(found, str):
            return [(position, f"{where}: {found}.") for position in range(len(inside))]
        return [(position, f"{where}, row {int(inside[position])} of it: column {name!r} has no "
                 "value.") for name, (_, there) in found.items()
                for position in np.flatnonzero(~there[inside]).tolist()]

    def _arrange(self, values: dict[str, np.ndarray[Any, Any]]) -> Structure:
        chosen = self._chosen
        inputs = [values[name] for name in chosen.inputs]
        if len(inputs) > 1 and any(array.ndim > 1 for array in inputs):
            raise DataError(f"{self.name}: a column of lists must be the only input. Inputs: "
                            f"{', '.join(chosen.inputs)}. Choose one with columns=[...].")
        x = inputs[0] if len(inputs) == 1 and inputs[0].ndim > 1 else np.stack(inputs, axis=1)
        x = x.astype(self._dtype)
        if self._shape is not None:
            if int(np.prod(self._shape)) != int(np.prod(x.shape[1:])):
                raise DataError(f"{self.name}: samples have the shape {x.shape[1:]}, which cannot "
                                f"be brought to shape={list(self._shape)}.")
            x = x.reshape(len(x), *self._shape)
        arrays = [x]
        if chosen.target is not None:
            y = values[chosen.target]
            arrays.append(y if self._target_dtype is None else y.astype(self._target_dtype))
        if chosen.sample_weight is not None:
            arrays.append(values[chosen.sample_weight].astype(np.float32))
        return tuple(arrays) if len(arrays) > 1 else x

    def _find_fields(self) -> Structure:
        """From the first row group that can be read."""
        for group in range(len(self._places)):
            found = self._group(group)
            if not isinstance(found, str):
                arrays = self._arrange({name: values[:1] for name, (values, _) in found.items()})
                return tf.nest.map_structure(
                    lambda array: tf.TensorSpec(array.shape[1:], tf.as_dtype(array.dtype)), arrays)
            if self.on_error == "raise":
                file, number, _ = self._places[group]
                raise DataError(f"{self._files[file]}, row group {number}: {found}. Write the file "
                                "anew, or give its rows the weight 0 with on_error='skip'.")
        raise DataError(f"{self.name}: no row group can be read.")

    def _group(self, group: int) -> dict[str, Column] | str:
        """The columns of a row group, or what is wrong with it."""
        with self._lock:
            if group in self._kept:
                self._kept.move_to_end(group)
                return self._kept[group]
            file, number, size = self._places[group]
            self.count.add(size)
            found = read_group(self._files[file], number, self._chosen.names)
            self._kept[group] = found
            if len(self._kept) > self._groups_kept:
                self._kept.popitem(last=False)
            return found

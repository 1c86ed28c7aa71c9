"""`load_parquet`: Parquet files as a source; a few row groups are kept in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.data.build_once import fingerprint
from hvdtrain.data.files import (
    Array,
    Columns,
    OnError,
    Paths,
    Problems,
    TableSource,
    choose_columns,
    find_files,
    name_of,
)
from hvdtrain.errors import DataError
from hvdtrain.optional import require

_PURPOSE = "reading Parquet files"


def load_parquet(paths: Paths, *, target: str | None = None, sample_weight: str | None = None,
                 columns: Sequence[str] | None = None, shape: Sequence[int] | None = None,
                 dtype: str = "float32", target_dtype: str | None = None,
                 groups_kept: int = 4, on_error: OnError = "raise") -> ParquetSource:
    """Open Parquet files as a source.

    Only whole row groups can be read. Rows in a shuffled order are in nearly as many row groups as
    there are rows: use `hvdtrain.unpacked` then, or write files with small row groups.

    Args:
        paths: Path, pattern or sequence of them.
        target: String or None, the column that is the target.
        sample_weight: String or None, the column that is the sample weight.
        columns: The columns of the input, in this order; None for all others. Columns of numbers
            make `(n, len(columns))`; a column of lists of one length makes `(n, length)`, and must
            be alone.
        shape: Shape to which a sample's list is reshaped; None for as it is.
        dtype: String, the type of the input.
        target_dtype: String, the type of the target; None for that of the column.
        groups_kept: Integer, row groups that are kept in memory for later reads.
        on_error: `"raise"`, or `"skip"`: rows with missing values, and rows of damaged row groups,
            have sample weight 0.

    Raises:
        DataError: Files are missing or damaged, lack a column, or a column is of another type.
        MissingExtraError: `pyarrow` is not installed.
    """
    if groups_kept < 1:
        raise DataError(f"groups_kept must be at least 1. Received: groups_kept={groups_kept}")
    files = find_files(paths)
    names = _metadata_of(files[0]).schema.to_arrow_schema().names
    table = _ParquetTable(
        chosen=choose_columns(names, files[0], columns, target, sample_weight),
        shape=None if shape is None else tuple(shape), dtype=dtype, target_dtype=target_dtype)
    return ParquetSource(files, table, groups_kept=groups_kept, on_error=on_error)


@dataclass(frozen=True, kw_only=True)
class _ParquetTable:

    chosen: Columns
    shape: tuple[int, ...] | None
    dtype: str
    target_dtype: str | None

    def records(self, columns: dict[str, Array], source: str) -> Array:
        inputs = [columns[name] for name in self.chosen.inputs]
        if len(inputs) > 1 and any(array.ndim > 1 for array in inputs):
            raise DataError(f"{source}: a column of lists must be the only input. Inputs: "
                            f"{', '.join(self.chosen.inputs)}. Choose one with columns=[...].")
        x = inputs[0] if inputs[0].ndim > 1 else np.stack(inputs, axis=1)
        if self.shape is not None:
            if int(np.prod(self.shape)) != int(np.prod(x.shape[1:])):
                raise DataError(f"{source}: samples have the shape {x.shape[1:]}, which cannot "
                                f"be brought to shape={list(self.shape)}.")
            x = x.reshape(len(x), *self.shape)
        values = {"x": x.astype(self.dtype)}
        for field, name in self.chosen.others.items():
            dtype = self.target_dtype if field == "y" else "float32"
            values[field] = columns[name].astype(dtype or columns[name].dtype)
        records = np.empty(len(x), [(name, array.dtype, array.shape[1:])
                                    for name, array in values.items()])
        for name, array in values.items():
            records[name] = array
        return records


class ParquetSource(TableSource):
    """The rows of Parquet files. Made by `load_parquet`."""

    def __init__(self, files: Sequence[Path], table: _ParquetTable, *, groups_kept: int,
                 on_error: OnError) -> None:
        super().__init__(name_of(files), on_error, lambda: fingerprint(files, "parquet", table))
        self._table = table
        self._kept = lru_cache(groups_kept)(self._load)
        self._reading = threading.Lock()
        like = _metadata_of(files[0]).schema.to_arrow_schema()
        self._groups = [group for file in files
                        for group in _groups_of(file, table.chosen.names, like)]
        self._starts = np.cumsum([0, *(group.rows for group in self._groups)])
        if not len(self):
            raise DataError(f"{self.name}: there are no rows; at least one is needed.")
        self._find_record()
        self.check_fields()

    def _find_record(self) -> None:
        for number in range(len(self._groups)):
            records, problems = self._kept(number)
            if records.dtype.names:
                self.set_record(records.dtype)
                return
            if self.on_error == "raise":
                raise DataError(f"{problems[0]} Write the file anew, or give its rows the weight 0 "
                                "with on_error='skip'.")
            self._kept.cache_clear()
        raise DataError(f"{self.name}: no row group can be read.")

    def _part(self, number: int) -> tuple[Array, Problems]:
        with self._reading:
            return self._kept(number)

    def _load(self, number: int) -> tuple[Array, Problems]:
        group = self._groups[number]
        where = f"{group.file}, row group {group.number}"
        names = self._table.chosen.names
        self.count_bytes(group.bytes)
        try:
            with require("pyarrow.parquet", _PURPOSE).ParquetFile(
                    group.file, page_checksum_verification=True) as opened:
                table = opened.read_row_group(group.number, columns=names)
        except (OSError, ValueError) as error:
            reason = f"{where}: it cannot be read: {str(error).splitlines()[0]}."
            return (np.zeros(group.rows, self._record),
                    dict.fromkeys(range(group.rows), reason))
        columns, problems = {}, {}
        for name in names:
            columns[name], there = _values(table.column(name).combine_chunks(),
                                           f"{group.file}, column {name!r}")
            problems.update({row: f"{where}, row {row} of it: column {name!r} has no value."
                             for row in np.flatnonzero(~there).tolist()})
        records = self._table.records(columns, self.name)
        if self._record.names and records.dtype != self._record:
            raise DataError(f"{where} has lists of another length than the first row group; all "
                            "must be equal. Pad them.")
        return records, problems


class _Group(NamedTuple):
    """A row group of a Parquet file; `bytes` are those of the used columns, compressed."""

    file: Path
    number: int
    rows: int
    bytes: int


def _metadata_of(file: Path) -> Any:
    try:
        return require("pyarrow.parquet", _PURPOSE).read_metadata(file)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DataError(f"{file} cannot be read as a Parquet file: "
                        f"{str(error).splitlines()[0]}") from error


def _groups_of(file: Path, names: Sequence[str], like: Any) -> Iterator[_Group]:
    """The row groups of a file; its columns must have the types of the schema `like`."""
    metadata = _metadata_of(file)
    schema = metadata.schema.to_arrow_schema()
    for name in names:
        if name not in schema.names:
            raise DataError(f"{file} has no column {name!r}. It has: {', '.join(schema.names)}.")
        if schema.field(name).type != like.field(name).type:
            raise DataError(f"{file}: column {name!r} holds {schema.field(name).type}; expected "
                            f"{like.field(name).type}, as in the first file.")
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(place) for place in range(group.num_columns)]
        size = sum(column.total_compressed_size for column in columns
                   if column.path_in_schema.split(".")[0] in names)
        yield _Group(file=file, number=number, rows=group.num_rows, bytes=size)


def _values(column: Any, where: str) -> tuple[Array, Array]:
    types = require("pyarrow", _PURPOSE).types
    kind, there = column.type, np.asarray(column.is_valid())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _lists(column, there, where)
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise DataError(f"{where} holds {kind}; expected numbers or lists of numbers. Choose "
                        "columns with columns=[...], or write numbers.")
    if not there.all():
        column = column.fill_null(False if types.is_boolean(kind) else 0)
    return column.to_numpy(zero_copy_only=False), there


def _lists(column: Any, there: Array, where: str) -> tuple[Array, Array]:
    values, inner = _values(column.flatten(), where)
    if values.ndim != 1:
        raise DataError(f"{where} holds lists of lists; expected lists of numbers. Write them "
                        "flat, and give shape=[...].")
    length = len(values) // max(1, int(there.sum()))
    compute = require("pyarrow.compute", _PURPOSE)
    lengths = np.asarray(compute.list_value_length(column).fill_null(length))
    if (lengths[there] != length).any():
        raise DataError(f"{where} has lists of different lengths, such as "
                        f"{int(lengths[there].min())} and {int(lengths[there].max())}; all must "
                        "be equal. Pad them.")
    result = np.zeros((len(column), length), values.dtype)
    result[there] = values.reshape(-1, length)
    complete = there.copy()
    complete[there] = inner.reshape(-1, length).all(axis=1)
    return result, complete

"""Row groups of Parquet files: their sizes, and their columns as arrays. Without TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hvdtrain.errors import DataError
from hvdtrain.optional import require

Column: TypeAlias = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""The values of a column, and which of them are there."""

_PURPOSE = "reading Parquet files"


def metadata_of(file: Path) -> Any:
    """The metadata of a file.

    Raises:
        DataError: It cannot be read as Parquet.
        MissingExtraError: `pyarrow` is not installed.
    """
    try:
        return require("pyarrow.parquet", _PURPOSE).read_metadata(file)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DataError(f"{file} cannot be read as a Parquet file: "
                        f"{str(error).splitlines()[0]}") from error


def groups_of(file: Path, names: Sequence[str], like: Any) -> list[tuple[int, int]]:
    """Rows, and compressed bytes of the named columns, of each row group of a file.

    Args:
        file: The file.
        names: Columns.
        like: The `pyarrow.Schema` of the first file.

    Raises:
        DataError: It cannot be read, lacks a column, or has another type in one.
    """
    metadata = metadata_of(file)
    schema = metadata.schema.to_arrow_schema()
    for name in names:
        if name not in schema.names:
            raise DataError(f"{file} has no column {name!r}. It has: {', '.join(schema.names)}.")
        if schema.field(name).type != like.field(name).type:
            raise DataError(f"{file}: column {name!r} holds {schema.field(name).type}; expected "
                            f"{like.field(name).type}, as in the first file.")
    groups = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(i) for i in range(group.num_columns)]
        size = sum(column.total_compressed_size for column in columns
                   if column.path_in_schema.split(".")[0] in names)
        groups.append((group.num_rows, size))
    return groups


def read_group(file: Path, number: int, names: Sequence[str]) -> dict[str, Column] | str:
    """The named columns of a row group; or what is wrong with it.

    Raises:
        DataError: A column holds something else than numbers or lists of one length.
    """
    pq = require("pyarrow.parquet", _PURPOSE)
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            table = opened.read_row_group(number, columns=list(names))
    except (OSError, ValueError) as error:
        return f"it cannot be read: {str(error).splitlines()[0]}"
    return {name: _values(table.column(name).combine_chunks(), f"{file}, column {name!r}")
            for name in names}


def _values(column: Any, where: str) -> Column:
    """A column as an array; zeros where it has no value."""
    pa = require("pyarrow", _PURPOSE)
    kind = column.type
    there = np.asarray(column.is_valid())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists(column, there, where)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise DataError(f"{where} holds {kind}; expected numbers or lists of numbers. Choose "
                        "columns with columns=[...], or write numbers.")
    if not there.all():
        column = column.fill_null(False if pa.types.is_boolean(kind) else 0)
    return column.to_numpy(zero_copy_only=False), there


def _lists(column: Any, there: np.ndarray[Any, Any], where: str) -> Column:
    flat = column.flatten()
    values, inner = _values(flat, where)
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

"""Where the rows of CSV files begin. Without TensorFlow.

A row may go over several lines, where a field in quotes has line ends in it. What is quoted is
told by Python's `csv` module; only parts without any quote are divided at line ends directly.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from hvdtrain.data.files import ByteCount, cached_index, fingerprint
from hvdtrain.errors import DataError

CHUNK_BYTES = 8 << 20
_BOM = b"\xef\xbb\xbf"
_LF, _CR = 10, 13


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How a CSV file is written.

    Raises:
        DataError: A character is not one ASCII character.
    """

    delimiter: str = ","
    quote: str = '"'

    def __post_init__(self) -> None:
        for name in ("delimiter", "quote"):
            value = getattr(self, name)
            if len(value) != 1 or not value.isascii() or value in "\r\n":
                raise DataError(f"{name} must be one ASCII character. Received: {value!r}")

    def rows(self, lines: Iterator[str]) -> Iterator[list[str]]:
        """The rows in some lines.

        Raises:
            csv.Error: While iterating; quotes are not as they should be.
        """
        return csv.reader(lines, delimiter=self.delimiter, quotechar=self.quote, strict=True)


@dataclass(frozen=True, kw_only=True)
class RowIndex:
    """The places of all rows of some CSV files, without their headers and blank lines."""

    starts: np.ndarray[Any, Any]
    """int64 `(files + 1,)`: the number of the first row of each file, and of all rows."""
    offsets: np.ndarray[Any, Any]
    """int64 `(rows,)`: the offset of each row in its file."""
    ends: np.ndarray[Any, Any]
    """int64 `(rows,)`: the offset at which each row ends, its line end included."""

    def __len__(self) -> int:
        return len(self.offsets)

    def file_of(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Which file each row is in."""
        return np.searchsorted(self.starts, rows, side="right") - 1


def read_header(file: Path, dialect: Dialect, *, has_header: bool) -> tuple[list[str], int]:
    """The first row of a file.

    Returns:
        Its fields; and the offset of the first row of data: behind it, or with
        `has_header=False` before it.

    Raises:
        DataError: The file is empty, or is no UTF-8 text in quotes that match.
    """
    with file.open("rb") as stream:
        begin = len(_BOM) if stream.read(len(_BOM)) == _BOM else 0
        rows = _Rows(stream, begin, dialect)
        try:
            for start, end, fields in rows:
                if not fields:
                    continue  # a blank line
                names = [field.encode("latin-1").decode() for field in fields]
                return names, end if has_header else start
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{file}, offset {begin}: the first row cannot be read: {error}. "
                            "Expected UTF-8 text.") from error
    raise DataError(f"{file} is empty; expected a CSV file{' with a header' * has_header}.")


def index_rows(files: Sequence[Path], begins: Sequence[int], dialect: Dialect, cache: Path,
               count: ByteCount) -> RowIndex:
    """The index of some files: from the cache, or built by one process of this host.

    Args:
        files: CSV files, in UTF-8 or another encoding that keeps ASCII characters.
        begins: For each file, the offset of its first row of data.
        dialect: How they are written.
        cache: Folder in which the index is kept.
        count: Counts the bytes that this process has read for it.

    Raises:
        DataError: A file cannot be read, or the index cannot be written.
    """
    name = f"csv-{fingerprint(files, 1, tuple(begins), dialect)}"
    table = np.asarray(cached_index(
        cache, name, lambda: _build(files, begins, dialect, count)))
    number = len(files)
    rows = (len(table) - number - 1) // 2
    return RowIndex(starts=table[:number + 1], offsets=table[number + 1:number + 1 + rows],
                    ends=table[number + 1 + rows:])


def _build(files: Sequence[Path], begins: Sequence[int], dialect: Dialect,
           count: ByteCount) -> np.ndarray[Any, Any]:
    starts, offsets, ends = [0], array("q"), array("q")
    for file, begin in zip(files, begins, strict=True):
        try:
            _scan(file, begin, dialect, offsets, ends)
            count.add(file.stat().st_size - begin)
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}.") from error
        starts.append(len(offsets))
    return np.concatenate([np.asarray(part, np.int64) for part in (starts, offsets, ends)])


def _scan(file: Path, begin: int, dialect: Dialect, offsets: array[int],
          ends: array[int]) -> None:
    """Add the places of a file's rows."""
    quote = dialect.quote.encode()
    with file.open("rb") as stream:
        while True:
            stream.seek(begin)
            chunk = stream.read(CHUNK_BYTES)
            chunk += stream.readline() if chunk and not chunk.endswith(b"\n") else b""
            if not chunk:
                return
            if quote in chunk:
                begin = _scan_quoted(stream, begin, begin + len(chunk), dialect, offsets, ends)
            else:
                _scan_plain(chunk, begin, offsets, ends)
                begin += len(chunk)


def _scan_plain(chunk: bytes, begin: int, offsets: array[int], ends: array[int]) -> None:
    """Divide whole lines without quotes at their ends."""
    codes = np.frombuffer(chunk, np.uint8)
    last = np.flatnonzero(codes == _LF) + 1
    if not len(last) or last[-1] != len(codes):
        last = np.append(last, len(codes))  # the last line of a file without a line end
    first = np.concatenate([[0], last[:-1]])
    length = last - first
    blank = (length == 1) & (codes[first] == _LF)
    blank |= (length == 2) & (codes[first] == _CR) & (codes[last - 1] == _LF)
    offsets.frombytes((first[~blank] + begin).astype(np.int64).tobytes())
    ends.frombytes((last[~blank] + begin).astype(np.int64).tobytes())


def _scan_quoted(stream: IO[bytes], begin: int, until: int, dialect: Dialect,
                 offsets: array[int], ends: array[int]) -> int:
    """Divide as the `csv` module does, up to the first row end from `until` on.

    Returns:
        The offset of that row end.
    """
    while begin < until:
        rows = _Rows(stream, begin, dialect)
        try:
            for start, end, fields in rows:
                if fields:
                    offsets.append(start)
                    ends.append(end)
                begin = end
                if begin >= until:
                    break
            else:
                return begin
        except csv.Error:
            # A row that cannot be read is one line: it is found out when it is asked for.
            stream.seek(begin)
            offsets.append(begin)
            begin += len(stream.readline())
            ends.append(begin)
    return begin


class _Rows:
    """Iterates over rows of a stream: offset, offset of the end, fields as Latin-1."""

    def __init__(self, stream: IO[bytes], begin: int, dialect: Dialect) -> None:
        stream.seek(begin)
        self._stream = stream
        self._offset = begin
        self._rows = dialect.rows(self._lines())

    def __iter__(self) -> Iterator[tuple[int, int, list[str]]]:
        start = self._offset
        for fields in self._rows:
            yield start, self._offset, fields
            start = self._offset

    def _lines(self) -> Iterator[str]:
        for line in self._stream:
            self._offset += len(line)
            yield line.decode("latin-1")

"""Where the records of TFRecord files are. Without TensorFlow.

A record is: its length (8 bytes, little-endian), a checksum of those (4 bytes), the data, a
checksum of the data (4 bytes). The index is built from the first 12 bytes of every record; a
checksum of a length that is wrong, or a record that goes beyond the end of its file, ends the
index of that file, since nothing tells where the next record begins.
"""

from __future__ import annotations

import functools
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.files import ByteCount, PartReader, cached_index, fingerprint
from hvdtrain.errors import DataError
from hvdtrain.optional import require

HEADER = struct.Struct("<QI")
FOOTER = struct.Struct("<I")
FRAME_BYTES = HEADER.size + FOOTER.size
"""What a record takes beside its data."""

_MASK_DELTA = 0xa282ead8
_RUN_BYTES = 8 << 20
"""Records that follow each other are read together, up to about so many bytes."""


def masked_crc(data: bytes) -> int:
    """The checksum of a TFRecord: CRC-32C, rotated and shifted.

    Raises:
        MissingExtraError: `google-crc32c` is not installed.
    """
    crc = _crc32c()(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xffffffff


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
    found: Callable[[bytes], int] = require("google_crc32c", "reading TFRecord files").value
    return found


@dataclass(frozen=True, kw_only=True)
class RecordIndex:
    """The places of all records of some files.

    Records are numbered through all files, in the order of the files.
    """

    starts: np.ndarray[Any, Any]
    """int64 `(files + 1,)`: the number of the first record of each file, and of all records."""
    ends: np.ndarray[Any, Any]
    """int64 `(files,)`: the offset at which the last intact record of each file ends."""
    damaged: np.ndarray[Any, Any]
    """Boolean `(files,)`: something follows there that is no record."""
    offsets: np.ndarray[Any, Any]
    """int64 `(records,)`: the offset of each record in its file."""

    def __len__(self) -> int:
        return len(self.offsets)

    def file_of(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Which file each record is in."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def end_of(self, row: int, file: int) -> int:
        """The offset at which a record ends."""
        if row + 1 < self.starts[file + 1]:
            return int(self.offsets[row + 1])
        return int(self.ends[file])


def index_records(files: Sequence[Path], cache: Path, count: ByteCount) -> RecordIndex:
    """The index of some files: from the cache, or built by one process of this host.

    Args:
        files: Uncompressed TFRecord files.
        cache: Folder in which the index is kept.
        count: Counts the bytes that this process has read for it.

    Raises:
        DataError: A file cannot be read, or the index cannot be written.
    """
    name = f"tfrecord-{fingerprint(files, 1)}"
    table = np.asarray(cached_index(cache, name, lambda: _build(files, count)))
    number = len(files)
    starts, ends, damaged = table[:number + 1], table[number + 1:2 * number + 1], \
        table[2 * number + 1:3 * number + 1]
    return RecordIndex(starts=starts, ends=ends, damaged=damaged != 0,
                       offsets=table[3 * number + 1:])


def _build(files: Sequence[Path], count: ByteCount) -> np.ndarray[Any, Any]:
    starts, ends, damaged, offsets = [0], [], [], array("q")
    for file in files:
        try:
            end, size = _scan(file, offsets, count)
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}.") from error
        starts.append(len(offsets))
        ends.append(end)
        damaged.append(int(end != size))
    return np.concatenate([np.asarray(part, np.int64) for part in (starts, ends, damaged, offsets)])


def _scan(file: Path, offsets: array[int], count: ByteCount) -> tuple[int, int]:
    """Add the offsets of a file's records; return where they end, and the file's size."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size, offset, headers = os.fstat(descriptor).st_size, 0, 0
        while offset < size:
            header = os.pread(descriptor, HEADER.size, offset)
            headers += 1
            if header_problem(header, offset, size):
                break
            offsets.append(offset)
            offset += HEADER.unpack(header)[0] + FRAME_BYTES
    finally:
        os.close(descriptor)
    count.add(headers * HEADER.size)
    return offset, size


def header_problem(header: bytes, offset: int, size: int) -> str | None:
    """What is wrong with the first bytes of a record, in words; None if nothing is.

    Args:
        header: The first 12 bytes.
        offset: Integer, where the record begins.
        size: Integer, bytes of the file.
    """
    if len(header) < HEADER.size:
        return f"the file ends after {len(header)} bytes of a record's first {HEADER.size}"
    length, crc = HEADER.unpack(header)
    if masked_crc(header[:8]) != crc:
        return "the checksum of the record's length is wrong"
    if offset + length + FRAME_BYTES > size:
        return (f"the record needs {length + FRAME_BYTES} bytes, and the file has "
                f"{size - offset} left")
    return None


def damage(file: Path, end: int) -> str:
    """What follows the last intact record of a file, for messages."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        problem = header_problem(os.pread(descriptor, HEADER.size, end), end, size)
    finally:
        os.close(descriptor)
    return (f"{file}, offset {end}: {problem or 'no record'}. What follows in this file, "
            f"{size - end} bytes, cannot be read.")


class RecordReader:
    """Reads records by number, and checks them. Any thread.

    Args:
        files: The files.
        index: Their index.
        count: Counts the bytes read.
    """

    def __init__(self, files: Sequence[Path], index: RecordIndex, count: ByteCount) -> None:
        self._files = tuple(files)
        self._index = index
        self._parts = PartReader(files, count)

    def read(self, rows: np.ndarray[Any, Any]) -> tuple[list[bytes], dict[int, str]]:
        """Read some records; those that follow each other in a file in one go.

        Args:
            rows: int64 array, ascending, without repetition.

        Returns:
            The data of the records, empty for bad ones; and for each bad one, by its position in
            `rows`, what is wrong with it.
        """
        records: list[bytes] = []
        problems: dict[int, str] = {}
        for file, run in self._runs(rows):
            begin = int(self._index.offsets[run[0]])
            end = self._index.end_of(int(run[-1]), file)
            try:
                block = self._parts.read(file, begin, end - begin)
            except OSError as error:
                raise DataError(f"{self._files[file]} cannot be read: {error.strerror}.") from error
            for row in run:
                first = int(self._index.offsets[row])
                frame = block[first - begin:self._index.end_of(int(row), file) - begin]
                data, problem = _unframe(frame)
                if problem:
                    problems[len(records)] = f"{self._files[file]}, offset {first}: {problem}."
                records.append(data)
        return records, problems

    def place_of(self, row: int) -> str:
        """File and offset of a record, for messages."""
        file = int(self._index.file_of(np.asarray([row]))[0])
        return f"{self._files[file]}, offset {int(self._index.offsets[row])}"

    def _runs(self, rows: np.ndarray[Any, Any]) -> list[tuple[int, np.ndarray[Any, Any]]]:
        """The rows, divided where file or neighborhood ends, or enough bytes are together."""
        files = self._index.file_of(rows)
        megabytes = np.asarray(self._index.offsets[rows]) // _RUN_BYTES
        new = (np.diff(rows) != 1) | (np.diff(files) != 0) | (np.diff(megabytes) != 0)
        cuts = np.flatnonzero(new) + 1
        return [(int(part[0]), run) for part, run in zip(
            np.split(files, cuts), np.split(rows, cuts), strict=True) if len(run)]


def _unframe(frame: bytes) -> tuple[bytes, str]:
    """The data of a record; or nothing, and what is wrong."""
    if len(frame) < FRAME_BYTES:
        return b"", "the file has become shorter"
    length, crc = HEADER.unpack_from(frame)
    data = frame[HEADER.size:-FOOTER.size]
    if length != len(data) or masked_crc(frame[:8]) != crc:
        return b"", "the length of the record has changed since the index was made"
    if masked_crc(data) != FOOTER.unpack_from(frame, len(frame) - FOOTER.size)[0]:
        return b"", "the checksum of the data is wrong"
    return data, ""

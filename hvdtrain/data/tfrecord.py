"""`load_tfrecord`: TFRecord files as a source, any record in any order.

A record is: its length (8 bytes, little-endian), a checksum of those (4 bytes), the data, a
checksum of the data (4 bytes). A wrong checksum of a length, or a record beyond the end of its
file, ends the index of that file, since the next record cannot be found. A compressed file has no
random access: one process of each host unpacks it once into the cache folder.
"""

from __future__ import annotations

import functools
import os
import struct
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, get_args

import numpy as np
import tensorflow as tf

from hvdtrain.data.build_once import (
    cache_folder,
    cached_array,
    each_in_own_order,
    fingerprint,
    once_per_host,
)
from hvdtrain.data.examples import ExampleParser
from hvdtrain.data.files import (
    NAMED_BAD_SAMPLES,
    Array,
    BadSamplesError,
    FileSource,
    OnError,
    Paths,
    Problems,
    find_files,
    name_of,
)
from hvdtrain.data.images import first_line
from hvdtrain.data.source import Structure, signature_of
from hvdtrain.errors import DataError
from hvdtrain.log import get_logger
from hvdtrain.optional import require

Compression = Literal["auto", "none", "gzip", "zlib"]
_CHUNK_BYTES = 1 << 16

HEADER = struct.Struct("<QI")
FOOTER = struct.Struct("<I")
FRAME_BYTES = HEADER.size + FOOTER.size
_MASK_DELTA = 0xa282ead8
OPEN_FILES = 64
_RUN_BYTES = 8 << 20
"""Consecutive records are read together, up to about this size."""


def load_tfrecord(paths: Paths, features: Mapping[str, Any] | None = None, *,
                  target: str | None = None, sample_weight: str | None = None,
                  parse: Callable[[Any], Structure] | None = None,
                  compression: Compression = "auto", on_error: OnError = "raise",
                  threads: int = 4, cache: str | Path | None = None) -> TFRecordSource:
    """Open TFRecord files as a source.

    The index is built from the first 12 bytes of each record, in one process per host, and kept in
    `cache` until a file changes in size or time. Reading a sample verifies its checksum.

    Args:
        paths: Path, pattern or sequence of them.
        features: Mapping from names of features to `tf.io.FixedLenFeature` or mappings; see
            `hvdtrain.data.examples.ExampleParser`. All others than `target` and `sample_weight` are
            the input: an array if it is one, else a dictionary of arrays.
        target: String or None, the feature that is the target.
        sample_weight: String or None, the feature that is the sample weight.
        parse: Callable instead of `features`: takes a string tensor of shape `(n,)`, the data of n
            records, and returns `x`, `(x, y)` or `(x, y, sample_weight)` of tensors `(n, ...)`. It
            is called eagerly, on the CPU, from several threads.
        compression: `"auto"`, `"none"`, `"gzip"` or `"zlib"`. `"auto"` reads the first bytes of
            each file.
        on_error: `"raise"`, or `"skip"`: damaged records have sample weight 0.
        threads: Integer, images (features with `encoding="image"`) decoded at the same time.
        cache: Folder for the index and unpacked files; see `hvdtrain.data.build_once.cache_folder`.

    Raises:
        DataError: Files are missing or damaged, or a feature is not as described.
        MissingExtraError: `google-crc32c` is not installed.
    """
    if (features is None) == (parse is None):
        raise DataError("load_tfrecord needs either features or parse. features is a mapping from "
                        "names to tf.io.FixedLenFeature; parse is a function.")
    if compression not in get_args(Compression):
        raise DataError(f"Unknown compression {compression!r}. Expected one of: "
                        f"{', '.join(get_args(Compression))}.")
    folder, files = cache_folder(cache), find_files(paths)
    plain = each_in_own_order(files, lambda file: _plain(file, compression, folder))
    parser = parse if features is None else ExampleParser(
        features, target=target, sample_weight=sample_weight, threads=threads)
    return TFRecordSource(plain, parser, names=files, on_error=on_error, cache=folder,
                          content_key=None if parse else lambda: fingerprint(
                              files, "tfrecord", repr(features), target, sample_weight))


class TFRecordSource(FileSource):
    """The records of uncompressed TFRecord files. Made by `load_tfrecord`."""

    def __init__(self, files: Sequence[Path], parser: Any, *, names: Sequence[Path],
                 on_error: OnError, cache: Path, content_key: Callable[[], str] | None) -> None:
        super().__init__(name_of(names), on_error, content_key)
        self._parser = parser
        self._records = RecordFiles(files, cache)
        self.index_bytes_read = self._records.index_bytes
        for damage in self._records.damages():
            if on_error == "raise":
                raise DataError(f"{damage} Write the file anew, or take the records before that "
                                "place only, with on_error='skip'.")
            get_logger().warning(damage)
        if not len(self):
            raise DataError(f"{self.name}: there are no records; at least one is needed.")
        self.fields = self._find_fields()
        self.check_fields()

    def __len__(self) -> int:
        return len(self._records)

    def read_rows(self, rows: Array) -> Structure:
        distinct, position_of = np.unique(rows, return_inverse=True)
        records, problems, size = self._records.read(distinct)
        self.count_bytes(size)
        if not problems:
            try:
                parsed = self._parse(records)
            except BadSamplesError as error:
                problems = {place: f"{self._records.place_of(int(distinct[place]))}: {message}."
                            for place, message in error.messages.items()}
        if problems:
            raise BadSamplesError({position: problems[place] for position, place
                                   in enumerate(position_of.tolist()) if place in problems})
        return tf.nest.map_structure(lambda array: array[position_of], parsed)

    def _parse(self, records: Sequence[bytes]) -> Structure:
        """Parse records together, or alone to find the bad ones for a BadSamplesError."""
        is_own = isinstance(self._parser, ExampleParser)
        errors = (tf.errors.OpError, ValueError if is_own else UnicodeDecodeError)
        try:
            return self._call(records)
        except errors as error:
            problems = {}
            for position, record in enumerate(records):
                try:
                    self._call([record])
                except errors as alone:
                    problems[position] = first_line(alone)
            if problems:
                raise BadSamplesError(problems) from error
            if not is_own:
                raise
            raise DataError(f"The examples cannot be parsed together: {first_line(error)}. A "
                            "feature of variable length must have the same length in all, or "
                            "be a tf.io.FixedLenSequenceFeature.") from error

    def _call(self, records: Sequence[bytes]) -> Structure:
        with tf.device("CPU:0"):
            found = self._parser(tf.constant(list(records), tf.string))
            found = tuple(found) if isinstance(found, list) else found
            arrays = tf.nest.map_structure(np.asarray, found)
        if any(array.shape[:1] != (len(records),) for array in tf.nest.flatten(arrays)):
            raise DataError(
                f"{self.name}: parse was given {len(records)} records, and returned arrays of "
                f"shape {', '.join(str(a.shape) for a in tf.nest.flatten(arrays))}. Each must "
                "have one element per record along its first axis.")
        return arrays

    def _find_fields(self) -> Structure:
        if isinstance(self._parser, ExampleParser):
            return self._parser.signature
        for row in range(min(len(self), NAMED_BAD_SAMPLES)):
            try:
                return signature_of(self.read_rows(np.asarray([row])))
            except BadSamplesError as error:
                if self.on_error == "raise":
                    raise DataError(str(error)) from error
        raise DataError(f"{self.name}: none of the first {NAMED_BAD_SAMPLES} records can be "
                        "parsed; they are needed to find out what parse returns.")


def masked_crc(data: bytes) -> int:
    """The checksum of a TFRecord: CRC-32C, rotated and shifted."""
    crc = _crc32c()(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xffffffff


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
    value: Callable[[bytes], int] = require("google_crc32c", "reading TFRecord files").value
    return value


class RecordFiles:
    """The records of uncompressed TFRecord files by their index over all files. Any thread."""

    def __init__(self, files: Sequence[Path], cache: Path) -> None:
        self._files = tuple(files)
        self._opened = functools.lru_cache(OPEN_FILES)(_OpenFile)
        self.index_bytes = 0
        """Bytes that this process has read to build the index."""
        index = np.asarray(cached_array(cache / f"tfrecord-{fingerprint(files, 2)}.npy",
                                        self._index))
        self._starts, self._offsets = np.split(index, [len(files) + 1])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _index(self) -> Array:
        """The index of the first record of each file, and of all records; then their offsets."""
        # For each file there is one more offset, at which its last intact record ends.
        starts, offsets = [0], array("q")
        for number, file in enumerate(self._files):
            try:
                opened, size, offset = _OpenFile(file), file.stat().st_size, 0
                offsets.append(0)
                while offset < size:
                    header = opened.read(offset, HEADER.size)
                    self.index_bytes += HEADER.size
                    if _header_problem(header, offset, size):
                        break
                    offset += HEADER.unpack(header)[0] + FRAME_BYTES
                    offsets.append(offset)
            except OSError as error:
                raise _cannot_read(file, error) from error
            starts.append(len(offsets) - number - 1)
        return np.concatenate([np.asarray(starts, np.int64), np.asarray(offsets, np.int64)])

    def damages(self) -> Iterator[str]:
        """For each file that does not end with an intact record, what follows the last one."""
        for file, end in zip(self._files, self._offsets[self._starts[1:] + np.arange(
                len(self._files))].tolist(), strict=True):
            size = file.stat().st_size
            if end != size:
                problem = _header_problem(_OpenFile(file).read(end, HEADER.size), end, size)
                yield (f"{file}, offset {end}: {problem or 'no record'}. What follows in this "
                       f"file, {size - end} bytes, cannot be read.")

    def place_of(self, row: int) -> str:
        """File and offset of a record, for messages."""
        file = self._file_of(row)
        return f"{self._files[file]}, offset {self._offsets[row + file]}"

    def _file_of(self, rows: Any) -> Any:
        return np.searchsorted(self._starts, rows, side="right") - 1

    def read(self, rows: Array) -> tuple[list[bytes], Problems, int]:
        """Read records at ascending `rows` without repetition; consecutive ones in one go."""
        # Returns the data, empty for bad ones; the errors by their position in `rows`; the bytes
        # read.
        records: list[bytes] = []
        problems: Problems = {}
        size = 0
        files = self._file_of(rows)
        begins, ends = self._offsets[rows + files], self._offsets[rows + files + 1]
        cuts = 1 + np.flatnonzero((np.diff(rows) != 1) | (np.diff(files) != 0)
                                  | (np.diff(begins // _RUN_BYTES) != 0))
        for run in np.split(np.arange(len(rows)), cuts):
            file, begin = self._files[files[run[0]]], int(begins[run[0]])
            try:
                block = self._opened(file).read(begin, int(ends[run[-1]]) - begin)
            except OSError as error:
                raise _cannot_read(file, error) from error
            size += len(block)
            cut_at = [*(begins[run] - begin).tolist(), len(block)]
            for place, first, last in zip(run.tolist(), cut_at[:-1], cut_at[1:], strict=True):
                data, problem = _unframe(block[first:last])
                if problem:
                    problems[place] = f"{file}, offset {begin + first}: {problem}."
                records.append(data)
        return records, problems, size


class _OpenFile:
    """A file that is closed when neither its reader nor a reading thread refers to it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, begin: int, size: int) -> bytes:
        parts: list[bytes] = []
        while size and (part := os.pread(self._descriptor, size, begin)):
            parts.append(part)
            begin, size = begin + len(part), size - len(part)
        return b"".join(parts)


def _cannot_read(file: Path, error: OSError) -> DataError:
    return DataError(f"{file} cannot be read: {error.strerror}.")


def _header_problem(header: bytes, offset: int, size: int) -> str:
    """The error in the first 12 bytes of a record, in words."""
    if len(header) < HEADER.size:
        return f"the file ends after {len(header)} bytes of a record's first {HEADER.size}"
    length, crc = HEADER.unpack(header)
    if masked_crc(header[:8]) != crc:
        return "the checksum of the record's length is wrong"
    if offset + length + FRAME_BYTES > size:
        return (f"the record needs {length + FRAME_BYTES} bytes, and the file has "
                f"{size - offset} left")
    return ""


def _unframe(frame: bytes) -> tuple[bytes, str]:
    """The data of a record; or nothing, and the error."""
    if len(frame) < FRAME_BYTES:
        return b"", "the file has become shorter"
    length, crc = HEADER.unpack_from(frame)
    data = frame[HEADER.size:-FOOTER.size]
    if length != len(data) or masked_crc(frame[:8]) != crc:
        return b"", "the length of the record has changed since the index was made"
    if masked_crc(data) != FOOTER.unpack_from(frame, len(frame) - FOOTER.size)[0]:
        return b"", "the checksum of the data is wrong"
    return data, ""


def _plain(file: Path, compression: Compression, folder: Path) -> Path:
    kind = _kind(file) if compression == "auto" else compression
    if kind == "none":
        return file

    def work(path: Path) -> None:
        get_logger().info("unpacking %s into %s", file, folder)
        try:
            with file.open("rb") as packed, path.open("wb") as out:
                out.writelines(_unpacked(packed, kind))
        except (zlib.error, EOFError) as error:
            raise DataError(f"{file} cannot be unpacked as {kind}: {error}. Write the file anew; a "
                            "file that is not compressed needs compression='none'.") from error
    return once_per_host(folder / "unpacked" / f"{fingerprint([file])}-{file.name}", work)


def _kind(file: Path) -> str:
    with file.open("rb") as stream:
        head = stream.read(HEADER.size)
    # The length of an uncompressed record may begin as a compressed file does.
    if len(head) < 2 or (
            len(head) == HEADER.size and masked_crc(head[:8]) == HEADER.unpack(head)[1]):
        return "none"
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    is_zlib = head[0] & 0x0f == zlib.DEFLATED and not (head[0] * 256 + head[1]) % 31
    return "zlib" if is_zlib else "none"


def _unpacked(packed: IO[bytes], kind: str) -> Iterator[bytes]:
    bits = zlib.MAX_WBITS + (16 if kind == "gzip" else 0)
    unpacker = zlib.decompressobj(bits)
    while chunk := packed.read(_CHUNK_BYTES):
        while chunk:
            yield unpacker.decompress(chunk)
            chunk = unpacker.unused_data.lstrip(b"\0")  # another part, or zeros that fill a block
            if chunk:
                unpacker = zlib.decompressobj(bits)
    if not unpacker.eof:
        raise EOFError(f"the compressed data ends too early, at offset {packed.tell()}")

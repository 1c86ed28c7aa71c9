"""`load_tfrecord`: TFRecord files as a source, any record in any order.

The records of a compressed file cannot be reached singly: one process of each host unpacks it
once into the cache folder.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import tensorflow as tf

from hvdtrain.data.examples import ExampleParser
from hvdtrain.data.file_source import NAMED_BAD_SAMPLES, BadSamplesError, FileSource, OnError
from hvdtrain.data.files import Paths, cache_folder, find_files, fingerprint, name_of
from hvdtrain.data.once import once_per_host
from hvdtrain.data.pictures import first_line
from hvdtrain.data.source import Structure
from hvdtrain.data.tfrecord_index import (
    HEADER,
    RecordReader,
    damage,
    index_records,
    masked_crc,
)
from hvdtrain.errors import DataError
from hvdtrain.log import get_logger

Compression = Literal["auto", "none", "gzip", "zlib"]
_COMPRESSIONS = ("auto", "none", "gzip", "zlib")
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20


def load_tfrecord(paths: Paths, features: Mapping[str, Any] | None = None, *,
                  target: str | None = None, sample_weight: str | None = None,
                  parse: Callable[[Any], Structure] | None = None,
                  compression: Compression = "auto", on_error: OnError = "raise",
                  threads: int = 4, cache: str | Path | None = None) -> TFRecordSource:
    """Open TFRecord files as a source.

    Where the records are is found out by reading the first 12 bytes of each, in one process per
    host; the index is kept in `cache` until a file changes in size or time. A sample is read
    with its checksum compared.

    Args:
        paths: Path, pattern or sequence of them; see `hvdtrain.data.files.find_files`.
        features: Mapping from names of features to `tf.io.FixedLenFeature` or mappings; see
            `hvdtrain.data.examples.ExampleParser`. All that is not `target` or `sample_weight`
            is input: an array if it is one, else a dictionary of arrays.
        target: String or None, the feature that is the target.
        sample_weight: String or None, the feature that is the sample weight.
        parse: Callable in place of `features`: takes a string tensor of shape `(n,)`, the data of
            n records, and returns `x`, `(x, y)` or `(x, y, sample_weight)` of tensors `(n, ...)`.
            It is called eagerly, on the CPU.
        compression: `"auto"`, `"none"`, `"gzip"` or `"zlib"`. `"auto"` looks at the first bytes
            of each file.
        on_error: `"raise"`, or `"skip"`: damaged records have sample weight 0.
        threads: Integer, images (features with `encoding="image"`) that are decoded at the same
            time.
        cache: Folder for the index and for unpacked files; see
            `hvdtrain.data.files.cache_folder`.

    Raises:
        DataError: Files are missing or damaged, or a feature is not as described.
        MissingExtraError: `google-crc32c` is not installed.
    """
    if (features is None) == (parse is None):
        raise DataError("load_tfrecord needs either features or parse. features is a mapping from "
                        "names to tf.io.FixedLenFeature; parse is a function.")
    if compression not in _COMPRESSIONS:
        raise DataError(f"Unknown compression {compression!r}. Expected one of: "
                        f"{', '.join(_COMPRESSIONS)}.")
    folder, files = cache_folder(cache), find_files(paths)
    plain = _all_plain(files, compression, folder)
    parser = parse if features is None else ExampleParser(
        features, target=target, sample_weight=sample_weight, threads=threads)
    settings = (repr(features), target, sample_weight)
    return TFRecordSource(plain, parser, names=files, on_error=on_error, cache=folder,
                          content_key=None if parse else lambda: fingerprint(
                              files, "tfrecord", *settings))


class TFRecordSource(FileSource):
    """The records of uncompressed TFRecord files. Made by `load_tfrecord`."""

    def __init__(self, files: Sequence[Path], parser: Any, *, names: Sequence[Path],
                 on_error: OnError, cache: Path, content_key: Callable[[], str] | None) -> None:
        super().__init__(name_of(names), on_error, content_key)
        self._index = index_records(files, cache, self.index_count)
        self._parser = parser
        self._reader = RecordReader(files, self._index, self.count)
        self._say_damage(files)
        if not len(self._index):
            raise DataError(f"{self.name}: there are no records; at least one is needed.")
        self._fields = self._find_fields()
        self.check_fields()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def fields(self) -> Structure:
        """See `FileSource.fields`."""
        return self._fields

    def read_rows(self, rows: np.ndarray[Any, Any]) -> Structure:
        """See `FileSource.read_rows`."""
        distinct, position_of = np.unique(rows, return_inverse=True)
        records, problems = self._reader.read(distinct)
        if not problems:
            try:
                parsed = self._parse(records)
            except BadSamplesError as error:
                problems = {place: f"{self._reader.place_of(int(distinct[place]))}: {message}."
                            for place, message in error.messages.items()}
        if problems:
            raise BadSamplesError({position: problems[place] for position, place
                                   in enumerate(position_of.tolist()) if place in problems})
        return tf.nest.map_structure(lambda array: array[position_of], parsed)

    def _parse(self, records: Sequence[bytes]) -> Structure:
        if isinstance(self._parser, ExampleParser):
            return self._parser(records)
        try:
            return self._call(records)
        except (tf.errors.OpError, UnicodeDecodeError) as error:
            problems = {}
            for position, record in enumerate(records):
                try:
                    self._call([record])
                except (tf.errors.OpError, UnicodeDecodeError) as own:
                    problems[position] = first_line(own)
            if not problems:
                raise
            raise BadSamplesError(problems) from error

    def _call(self, records: Sequence[bytes]) -> Structure:
        """The user's function, eagerly."""
        with tf.device("CPU:0"):
            found = self._parser(tf.constant(list(records), tf.string))
            found = tuple(found) if isinstance(found, list) else found
            arrays = tf.nest.map_structure(lambda value: np.asarray(value), found)
        if any(array.ndim == 0 or len(array) != len(records)
               for array in tf.nest.flatten(arrays)):
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
                sample = self.read_rows(np.asarray([row]))
            except BadSamplesError as error:
                if self.on_error == "raise":
                    raise DataError(str(error)) from error
            else:
                return tf.nest.map_structure(
                    lambda array: tf.TensorSpec(array.shape[1:], tf.as_dtype(array.dtype)), sample)
        raise DataError(f"{self.name}: none of the first {NAMED_BAD_SAMPLES} records can be "
                        "parsed; they are needed to find out what parse returns.")

    def _say_damage(self, files: Sequence[Path]) -> None:
        for file in np.flatnonzero(self._index.damaged).tolist():
            text = damage(files[file], int(self._index.ends[file]))
            if self.on_error == "raise":
                raise DataError(f"{text} Write the file anew, or take the records before that "
                                "place only, with on_error='skip'.")
            get_logger().warning(text)


def _all_plain(files: Sequence[Path], compression: Compression, folder: Path) -> tuple[Path, ...]:
    """The files, unpacked where they are compressed."""
    # In another order in each process, so that those of a host unpack different files.
    order = np.random.default_rng(os.getpid()).permutation(len(files)).tolist()
    plain = {i: _plain(files[i], compression, folder) for i in order}
    return tuple(plain[i] for i in range(len(files)))


def _plain(file: Path, compression: Compression, folder: Path) -> Path:
    """The file itself, or the unpacked one where it is compressed."""
    kind = _kind(file) if compression == "auto" else compression
    if kind == "none":
        return file

    def work(path: Path) -> None:
        get_logger().info("unpacking %s into %s", file, folder)
        _unpack(file, kind, path)
    return once_per_host(folder / "unpacked" / f"{fingerprint([file])}-{file.name}", work)


def _kind(file: Path) -> str:
    """Which compression a file has, by its first bytes."""
    with file.open("rb") as stream:
        head = stream.read(HEADER.size)
    if not head:
        return "none"
    # The length of an uncompressed record may begin as a compressed file does.
    if len(head) == HEADER.size and masked_crc(head[:8]) == HEADER.unpack(head)[1]:
        return "none"
    if head.startswith(_GZIP_MAGIC):
        return "gzip"
    is_zlib = len(head) > 1 and head[0] & 0x0f == zlib.DEFLATED and not (
        head[0] * 256 + head[1]) % 31
    return "zlib" if is_zlib else "none"


def _unpack(file: Path, kind: str, path: Path) -> None:
    try:
        with file.open("rb") as packed, path.open("wb") as out:
            for chunk in _gzip_chunks(packed) if kind == "gzip" else _zlib_chunks(packed):
                out.write(chunk)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(f"{file} cannot be unpacked as {kind}: {error}. Write the file anew; a "
                        "file that is not compressed needs compression='none'.") from error


def _gzip_chunks(packed: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=packed) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


def _zlib_chunks(packed: IO[bytes]) -> Iterator[bytes]:
    unpacker = zlib.decompressobj()
    while chunk := packed.read(_CHUNK_BYTES):
        yield unpacker.decompress(chunk)
    yield unpacker.flush()
    if not unpacker.eof:
        raise EOFError(f"the compressed data ends too early, at offset {packed.tell()}")

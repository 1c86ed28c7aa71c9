"""Data sources: rows by number. A source knows no rank.

`Source` is the interface; `ArraySource` serves arrays in memory (or memory-mapped); `load_npz`
opens an `.npz` file, memory-mapped where it is not compressed.
"""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.files import ByteCount
from hvdtrain.errors import DataError

Structure = Any
"""`x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`; each may be nested as Keras allows."""


class Source(ABC):
    """Samples that can be read by their number, in any order, many times."""

    name: str

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @property
    @abstractmethod
    def signature(self) -> Structure:
        """Structure of `tf.TensorSpec`, one per array, shapes without the batch axis."""

    @abstractmethod
    def read(self, rows: np.ndarray[Any, Any]) -> Structure:
        """Read some samples.

        Args:
            rows: int64 array of shape `(n,)`, numbers of samples.

        Returns:
            The structure of `signature` with arrays of shape `(n, ...)`.
        """

    @property
    def bytes_read(self) -> int:
        """Bytes of files that this process has read for samples; 0 for data in memory."""
        return 0

    @property
    def index_bytes_read(self) -> int:
        """Bytes that this process has read to find out where the samples are."""
        return 0

    def targets(self) -> np.ndarray[Any, Any] | None:
        """The targets of all samples, if they are at hand without reading the samples."""
        return None


class Stream(ABC):
    """Samples that come one after another; see `data.stream`."""

    name: str


@dataclass(frozen=True)
class DataSplits:
    """Training data, and validation data where there is some."""

    train: Source | Any
    validation: Source | Any | None = None


class ArraySource(Source):
    """Samples along the first axis of arrays.

    Args:
        data: Structure of arrays: `x`, `(x, y)` or `(x, y, sample_weight)`. Memory-mapped
            arrays are read row by row.
        name: String for messages.

    Raises:
        DataError: No samples, or arrays of different lengths.
    """

    def __init__(self, data: Structure, *, name: str = "arrays") -> None:
        self.name = name
        self._data = tf.nest.map_structure(lambda a: _as_array(a, name), keras_like(data))
        lengths = {len(a) for a in tf.nest.flatten(self._data)}
        if len(lengths) > 1:
            raise DataError(
                f"{name}: the arrays have different numbers of samples: "
                f"{', '.join(map(str, sorted(lengths)))}. All must be equal along the first axis.")
        if not lengths or lengths == {0}:
            raise DataError(f"{name}: the data set is empty; at least one sample is needed.")
        self._length = lengths.pop()
        self._count = ByteCount()

    def __len__(self) -> int:
        return self._length

    @property
    def signature(self) -> Structure:
        """See `Source.signature`."""
        return tf.nest.map_structure(
            lambda a: tf.TensorSpec(a.shape[1:], tf.as_dtype(a.dtype)), self._data)

    @property
    def arrays(self) -> Structure | None:
        """The arrays, if all of them are in memory (then TensorFlow gathers rows itself)."""
        mapped = any(isinstance(a, np.memmap) for a in tf.nest.flatten(self._data))
        return None if mapped else self._data

    def read(self, rows: np.ndarray[Any, Any]) -> Structure:
        """See `Source.read`."""
        def take(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            taken = np.asarray(array[rows])
            if isinstance(array, np.memmap):
                self._count.add(taken.nbytes)
            return taken
        return tf.nest.map_structure(take, self._data)

    @property
    def bytes_read(self) -> int:
        """Bytes of the rows read from memory-mapped arrays; the system reads whole pages."""
        return self._count.value

    def targets(self) -> np.ndarray[Any, Any] | None:
        """See `Source.targets`."""
        is_pair = isinstance(self._data, tuple) and len(self._data) > 1
        return self._data[1] if is_pair and isinstance(self._data[1], np.ndarray) else None


def as_source(data: Any, name: str) -> Any:
    """Arrays and a `keras.utils.PyDataset` as a source, a `tf.data.Dataset` as a stream.

    Sources, streams and None stay as they are.
    """
    if data is None or isinstance(data, (Source, Stream)):
        return data
    # By name: whoever made one has imported Keras, and nobody else needs to.
    if any(cls.__name__ == "PyDataset" for cls in type(data).__mro__):
        from hvdtrain.data.py_dataset import PyDatasetSource
        return PyDatasetSource(data, name=name)
    if isinstance(data, tf.data.Dataset):
        from hvdtrain.data.stream import StreamSource
        return StreamSource(data, name=name)
    return ArraySource(data, name=name)


def keras_like(data: Any) -> Any:
    """The structure of data as Keras hands it on: lists are tuples."""
    return keras.tree.lists_to_tuples(data)


def splits_of(data: Any) -> DataSplits:
    """What `Job.data` returns, as sources."""
    if not isinstance(data, DataSplits):
        data = DataSplits(train=data)
    return DataSplits(train=as_source(data.train, "train"),
                      validation=as_source(data.validation, "validation"))


def check_source(source: Source | Stream, *, streams: bool = False) -> None:
    """Read one sample and compare it with what the source says of itself.

    Args:
        source: The source.
        streams: Boolean, whether it may be a stream.

    Raises:
        DataError: Structure, shape or dtype differ, and TensorFlow would fail on it later; or it
            is a stream.
    """
    if isinstance(source, Stream):
        if not streams:
            raise DataError(f"{source.name}: a stream cannot be read by sample numbers, as this "
                            "engine does. Use engine allreduce, or give arrays or files (shared by "
                            "sample, not by_file).")
        return
    if isinstance(source, ArraySource):
        return
    expected, sample = source.signature, source.read(np.zeros(1, np.int64))
    try:
        tf.nest.assert_same_structure(expected, sample)
    except (ValueError, TypeError) as error:
        raise DataError(f"{source.name}: read() gives another structure than signature tells. "
                        f"Expected {expected}. {str(error).splitlines()[0]}") from error
    for spec, array in zip(tf.nest.flatten(expected), tf.nest.flatten(sample), strict=True):
        found = np.asarray(array)
        if tf.as_dtype(found.dtype) != spec.dtype or not spec.shape.is_compatible_with(
                found.shape[1:]) or len(found) != 1:
            raise DataError(
                f"{source.name}: read() of one row gives an array of shape {found.shape} and dtype "
                f"{found.dtype}, but signature tells {spec.dtype.name} and shape "
                f"(n, {', '.join(map(str, spec.shape))}). Correct one of the two.")


def _as_array(value: Any, name: str) -> np.ndarray[Any, Any]:
    if isinstance(value, (tf.data.Dataset, str, Iterator)) or callable(value):
        raise DataError(
            f"{name}: expected arrays x, (x, y) or (x, y, sample_weight), or a hvdtrain Source. "
            f"Received: {type(value).__name__}. Give the arrays or the files that the data set is "
            "made of, so that each rank can read its share; or hvdtrain.load_dataset(dataset) if "
            "it fits into memory, else hvdtrain.StreamSource.")
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)) or hasattr(value, "tocsr"):
        raise DataError(
            f"{name}: expected dense arrays. Received: {type(value).__name__}. Make it dense "
            "(value.to_tensor() of a RaggedTensor, tf.sparse.to_dense(value) of a SparseTensor, "
            "value.toarray() of a SciPy matrix), or give hvdtrain.StreamSource a dataset that "
            "makes each sample dense.")
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.ndim == 0 or array.dtype == object:
        raise DataError(
            f"{name}: every array needs a first axis over the samples and numbers in it. "
            f"Received: an array of shape {array.shape} and dtype {array.dtype}. A plain list is "
            "taken as a list of arrays; wrap it in numpy.array().")
    return array


def load_npz(path: str | Path, *, x: str = "x", y: str | None = "y",
             sample_weight: str | None = None) -> ArraySource:
    """Open an `.npz` file as a source.

    Members that are not compressed (`np.savez`) are memory-mapped, so that each rank reads
    only the rows it trains on; compressed ones are loaded whole.

    Args:
        path: Path of the file.
        x: String, the name of the inputs' array.
        y: String or None, the name of the targets' array.
        sample_weight: String or None, the name of the weights' array.

    Raises:
        DataError: The file is missing, unreadable, empty or lacks an array.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"The data file {file} does not exist. Expected an .npz file with the "
                        f"arrays {', '.join(n for n in (x, y, sample_weight) if n)}.")
    names = [n for n in (x, y, sample_weight) if n is not None]
    try:
        arrays = [_load_member(file, name) for name in names]
    except KeyError as error:
        with zipfile.ZipFile(file) as archive:
            there = [n.removesuffix(".npy") for n in archive.namelist()]
        raise DataError(f"{file} has no array {error.args[0]!r}; it has {', '.join(there)}. "
                        "Name the arrays with x = ... and y = ...") from None
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        raise DataError(f"{file} cannot be read as an .npz file ({error}). "
                        "Write it with numpy.savez(file, x=..., y=...).") from error
    return ArraySource(tuple(arrays) if len(arrays) > 1 else arrays[0], name=str(file))


def _load_member(file: Path, name: str) -> np.ndarray[Any, Any]:
    member = f"{name}.npy"
    with zipfile.ZipFile(file) as archive:
        if member not in archive.namelist():
            raise KeyError(name)
        info = archive.getinfo(member)
        if info.compress_type != zipfile.ZIP_STORED:
            with archive.open(member) as stream:
                return np.lib.format.read_array(stream, allow_pickle=False)
    with file.open("rb") as stream:
        # Local header: 30 bytes, then name and extra field, whose lengths stand at 26 and 28.
        stream.seek(info.header_offset + 26)
        skip = int.from_bytes(stream.read(2), "little") + int.from_bytes(stream.read(2), "little")
        stream.seek(info.header_offset + 30 + skip)
        version = np.lib.format.read_magic(stream)
        read_header = (np.lib.format.read_array_header_1_0 if version == (1, 0)
                       else np.lib.format.read_array_header_2_0)
        shape, fortran, dtype = read_header(stream)
        if dtype.hasobject:
            raise ValueError(f"array {name!r} holds Python objects")
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(file, dtype=dtype, mode="r", offset=stream.tell(), shape=shape,
                         order="F" if fortran else "C")

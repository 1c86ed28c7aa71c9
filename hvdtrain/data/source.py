"""Data sources: samples that are read by their index. A source knows no rank."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import DataError

if TYPE_CHECKING:
    from hvdtrain.data.stream import StreamSource

Structure = Any
"""`x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`; each may be nested as Keras allows."""
_COUNTING = threading.Lock()


class Source(ABC):
    """Samples that can be read by their index, in any order, many times, from any thread."""

    name: str
    bytes_read = 0
    """Bytes of files that this process has read for samples; 0 for data in memory."""
    index_bytes_read = 0
    """Bytes that this process has read to index the samples."""

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
            rows: int64 array of shape `(n,)`, indices of samples.

        Returns:
            The structure of `signature` with arrays of shape `(n, ...)`.
        """

    def count_bytes(self, number: int) -> None:
        """Add to `bytes_read`. Any thread."""
        with _COUNTING:
            self.bytes_read += number

    def targets(self) -> np.ndarray[Any, Any] | None:
        """The targets of all samples, if available without reading the samples."""
        return None


@dataclass(frozen=True)
class DataSplits:
    """Training data, and validation data or None."""

    train: Source | Any
    validation: Source | Any | None = None


class ArraySource(Source):
    """Samples along the first axis of arrays. Memory-mapped ones are read row by row.

    Args:
        data: Structure of arrays: `x`, `(x, y)` or `(x, y, sample_weight)`.
        name: String for messages.

    Raises:
        DataError: No samples, or arrays of different lengths.
    """

    signature: Structure = None

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
        self.signature = signature_of(self._data)

    def __len__(self) -> int:
        return self._length

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
                self.count_bytes(taken.nbytes)
            return taken
        return tf.nest.map_structure(take, self._data)

    def targets(self) -> np.ndarray[Any, Any] | None:
        """See `Source.targets`."""
        is_pair = isinstance(self._data, tuple) and len(self._data) > 1
        return self._data[1] if is_pair and isinstance(self._data[1], np.ndarray) else None


class PyDatasetSource(Source):
    """The samples of a `keras.utils.PyDataset`, in batches of one size but for the last.

    Reading a sample makes its whole batch, so with shuffling a step costs about as many batches as
    it has samples: where batches are expensive use `shuffle=False` and small batches. Sample i must
    be the same in each epoch, and on each rank (`on_epoch_begin` and `on_epoch_end` are not
    called). One thread at a time calls it, without its `workers`. `kept` batches stay in memory.
    """

    signature: Structure = None

    def __init__(self, dataset: Any, *, kept: int = 8, name: str = "PyDataset") -> None:
        self.name = name
        self._dataset = dataset
        self._lock = threading.Lock()
        self._cached = functools.lru_cache(max(1, kept))(self._made)
        if dataset.num_batches is None:
            raise DataError(f"{name}: the PyDataset has no end (num_batches is None). Give it a "
                            "known number of batches.")
        self._number = int(dataset.num_batches)
        if self._number < 1:
            raise DataError(f"{name}: the PyDataset has no batches; at least one is needed.")
        self._first: Structure = None
        self._size = 0
        self._cached(0)
        last = len(tf.nest.flatten(self._cached(self._number - 1))[0])
        if not 0 < last <= self._size:
            raise DataError(f"{name}: the last batch has {last} samples; expected 1 to "
                            f"{self._size}, as many as the first one has.")
        self._length = (self._number - 1) * self._size + last
        self.signature = signature_of(self._first)

    def __len__(self) -> int:
        return self._length

    def read(self, rows: np.ndarray[Any, Any]) -> Structure:
        """See `Source.read`."""
        batches, places = np.divmod(np.asarray(rows, np.int64), self._size)
        result = tf.nest.map_structure(
            lambda array: np.empty((len(rows), *array.shape[1:]), array.dtype), self._first)
        for number in np.unique(batches).tolist():
            chosen = batches == number
            with self._lock:
                batch = self._cached(number)
            for into, array in zip(tf.nest.flatten(result), tf.nest.flatten(batch), strict=True):
                into[chosen] = array[places[chosen]]
        return result

    def _made(self, number: int) -> Structure:
        batch = tf.nest.map_structure(np.asarray, keras_like(self._dataset[number]))
        lengths = {len(array) if array.ndim else 0 for array in tf.nest.flatten(batch)}
        if len(lengths) != 1:
            raise DataError(f"{self.name}: the arrays of batch {number} have different numbers of "
                            f"samples: {', '.join(map(str, sorted(lengths)))}.")
        looks, samples = _looks(batch), lengths.pop()
        if self._first is None:
            self._first, self._size = batch, samples
        expected = _looks(self._first)
        if looks != expected:
            raise DataError(f"{self.name}: batch {number} has samples of {looks}; expected "
                            f"{expected}, as in the first one.")
        if number < self._number - 1 and samples != self._size:
            raise DataError(f"{self.name}: batch {number} has {samples} samples; expected "
                            f"{self._size}, as in the first one. Only the last batch "
                            "may be smaller.")
        return batch


def _looks(batch: Structure) -> str:
    return ", ".join(f"{array.dtype} {array.shape[1:]}" for array in tf.nest.flatten(batch))


def signature_of(arrays: Structure) -> Structure:
    """The `Source.signature` of samples in arrays."""
    return tf.nest.map_structure(
        lambda array: tf.TensorSpec(array.shape[1:], tf.as_dtype(array.dtype)), arrays)


def keras_like(data: Any) -> Any:
    """The structure of data as Keras passes it on: lists are tuples."""
    return keras.tree.lists_to_tuples(data)


def tensors_of(batch: Structure) -> Structure:
    """Arrays as tensors; ragged and sparse tensors, and None, stay the same."""
    def tensor(value: Any) -> Any:
        kept = value is None or isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
        return value if kept else tf.convert_to_tensor(value)
    return tf.nest.map_structure(tensor, batch)


def as_source(data: Any, name: str) -> Any:
    """Arrays and a `keras.utils.PyDataset` as a source, a `tf.data.Dataset` as a stream."""
    from hvdtrain.data.stream import StreamSource
    if data is None or isinstance(data, (Source, StreamSource)):
        return data
    if isinstance(data, keras.utils.PyDataset):
        return PyDatasetSource(data, name=name)
    if isinstance(data, tf.data.Dataset):
        return StreamSource(data, name=name)
    return ArraySource(data, name=name)


def splits_of(data: Any) -> DataSplits:
    """What `Job.data` returns, as sources."""
    if not isinstance(data, DataSplits):
        data = DataSplits(train=data)
    return DataSplits(train=as_source(data.train, "train"),
                      validation=as_source(data.validation, "validation"))


def one_sample(source: Source | StreamSource) -> Structure:
    """One sample, with a first axis of length 1."""
    return source.read(np.zeros(1, np.int64)) if isinstance(source, Source) else source.first()


def check_source(source: Source | StreamSource, *, streams: bool = False) -> None:
    """Read one sample and compare it with the source's signature; DataError where they differ."""
    # TensorFlow would fail on it later. Also an error: a stream, unless `streams`.
    if not isinstance(source, Source) and not streams:
        raise DataError(f"{source.name}: a stream cannot be read by sample numbers, as this engine "
                        "does. Use engine allreduce, or give arrays or files (shared by sample, "
                        "not by_file).")
    if not isinstance(source, Source) or isinstance(source, ArraySource):
        return
    expected, sample = source.signature, one_sample(source)
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

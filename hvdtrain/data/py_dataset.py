"""`PyDatasetSource`: a `keras.utils.PyDataset` as a source."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.source import Source, Structure
from hvdtrain.errors import DataError


class PyDatasetSource(Source):
    """The samples of a `keras.utils.PyDataset`, which yields batches.

    Samples are numbered through its batches: all but the last have as many samples as the first.
    To read a sample its whole batch is made, so with shuffling a step costs about as many batches
    as it has samples. Where batches are expensive give `shuffle=False`, and let the data set
    yield small ones. What the data set does in `on_epoch_begin` and `on_epoch_end` is not done:
    sample i must be the same in each epoch, and on each rank. It is called in one thread at a
    time, in this process: its `workers` are not used.

    Args:
        dataset: The data set, of a known number of batches.
        kept: Integer, batches that are kept in memory for the next reading.
        name: String for messages.

    Raises:
        DataError: It is empty or infinite, or its batches are not as described.
    """

    def __init__(self, dataset: Any, *, kept: int = 8, name: str = "PyDataset") -> None:
        self.name = name
        self._dataset = dataset
        self._kept = max(1, kept)
        self._batches: OrderedDict[int, Structure] = OrderedDict()
        self._lock = threading.Lock()
        number = dataset.num_batches
        if number is None:
            raise DataError(f"{name}: the PyDataset has no end (num_batches is None). Give it a "
                            "known number of batches.")
        if number < 1:
            raise DataError(f"{name}: the PyDataset has no batches; at least one is needed.")
        self._number = int(number)
        self._first: Structure = None
        self._first = self._batch(0)
        self._size = _length(self._first)
        last = _length(self._batch(self._number - 1))
        if not 0 < last <= self._size:
            raise DataError(f"{name}: the last batch has {last} samples; expected 1 to "
                            f"{self._size}, as many as the first one has.")
        self._length = (self._number - 1) * self._size + last

    def __len__(self) -> int:
        return self._length

    @property
    def signature(self) -> Structure:
        """See `Source.signature`."""
        return tf.nest.map_structure(
            lambda array: tf.TensorSpec(array.shape[1:], tf.as_dtype(array.dtype)), self._first)

    def read(self, rows: np.ndarray[Any, Any]) -> Structure:
        """See `Source.read`."""
        rows = np.asarray(rows, np.int64)
        batches, places = np.divmod(rows, self._size)
        result = tf.nest.map_structure(
            lambda array: np.empty((len(rows), *array.shape[1:]), array.dtype), self._first)
        for number in np.unique(batches).tolist():
            chosen = batches == number
            batch = self._batch(number)
            for into, array in zip(tf.nest.flatten(result), tf.nest.flatten(batch), strict=True):
                into[chosen] = array[places[chosen]]
        return result

    def _batch(self, number: int) -> Structure:
        with self._lock:
            if number in self._batches:
                self._batches.move_to_end(number)
                return self._batches[number]
            batch = tf.nest.map_structure(np.asarray, _as_tuple(self._dataset[number]))
            self._check(batch, number)
            self._batches[number] = batch
            if len(self._batches) > self._kept:
                self._batches.popitem(last=False)
            return batch

    def _check(self, batch: Structure, number: int) -> None:
        """Refuse a batch that does not look like the first one."""
        lengths = {len(array) if array.ndim else 0 for array in tf.nest.flatten(batch)}
        if len(lengths) != 1:
            raise DataError(f"{self.name}: the arrays of batch {number} have different numbers of "
                            f"samples: {', '.join(map(str, sorted(lengths)))}.")
        if self._first is None:
            return
        looks, expected = _looks(batch), _looks(self._first)
        if looks != expected:
            raise DataError(f"{self.name}: batch {number} has samples of {looks}; expected "
                            f"{expected}, as in the first one.")
        if number < self._number - 1 and lengths != {_length(self._first)}:
            raise DataError(f"{self.name}: batch {number} has {lengths.pop()} samples; expected "
                            f"{_length(self._first)}, as in the first one. Only the last batch "
                            "may be smaller.")


def _as_tuple(batch: Any) -> Any:
    """Lists as tuples: `tf.data` takes a list for an array."""
    return tuple(map(_as_tuple, batch)) if isinstance(batch, (list, tuple)) else batch


def _length(batch: Structure) -> int:
    return len(tf.nest.flatten(batch)[0])


def _looks(batch: Structure) -> str:
    """Shapes and types of samples, to be compared and shown."""
    return ", ".join(f"{array.dtype} {array.shape[1:]}" for array in tf.nest.flatten(batch))

"""`load_dataset`: a `tf.data.Dataset` or a generator, read into arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.source import ArraySource
from hvdtrain.errors import DataError

MAX_BYTES = 1 << 30


def load_dataset(dataset: Iterable[Any] | Callable[[], Iterable[Any]], *, batched: bool = False,
                 max_bytes: int = MAX_BYTES, name: str = "dataset") -> ArraySource:
    """Read a data set of known order, but unknown length, into arrays. Every rank reads it whole.

    What can only be read from its beginning cannot be shared out over ranks; in memory it can.
    All ranks must read the same samples in the same order: do not shuffle in `dataset`.

    Args:
        dataset: A `tf.data.Dataset`, a generator, another iterable, or a function that returns
            one of these. It yields samples: `x`, `(x, y)` or `(x, y, sample_weight)`, each an
            array or a structure of arrays.
        batched: Boolean; it yields batches of samples.
        max_bytes: Integer, what all samples may take; for a moment twice that is used.
        name: String for messages.

    Raises:
        DataError: It is larger, infinite or empty, or its samples differ in structure or shape.
    """
    first: Any = None
    columns: list[list[np.ndarray[Any, Any]]] = []
    size = count = 0
    for element in _elements(dataset, name):
        element = tuple(element) if isinstance(element, list) else element
        if first is None:
            first, columns = element, [[] for _ in tf.nest.flatten(element)]
        try:
            tf.nest.assert_same_structure(first, element)
        except (ValueError, TypeError) as error:
            raise DataError(f"{name}: element {count} has another structure than the first: "
                            f"{str(error).splitlines()[0]}") from error
        for column, value in zip(columns, tf.nest.flatten(element), strict=True):
            column.append(np.asarray(value))
            size += column[-1].nbytes
        count += 1
        if size > max_bytes:
            raise DataError(
                f"{name}: {count} elements take {size} bytes, more than max_bytes={max_bytes}, and "
                "there are more. Give more, if every rank has that memory; else write the data to "
                "files once (numpy.save, TFRecord), and open those with load_npy or "
                "load_tfrecord.")
    if not count:
        raise DataError(f"{name}: the data set is empty; at least one sample is needed. A "
                        "generator can be read only once.")
    arrays = [_joined(column, batched, name) for column in columns]
    return ArraySource(tf.nest.pack_sequence_as(first, arrays), name=name)


def _elements(dataset: Any, name: str) -> Iterator[Any]:
    """The elements of what was given."""
    if callable(dataset) and not isinstance(dataset, tf.data.Dataset):
        dataset = dataset()
    if isinstance(dataset, tf.data.Dataset):
        if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise DataError(f"{name}: the data set has no end. Take some of it: "
                            "dataset.take(number).")
        for spec in tf.nest.flatten(dataset.element_spec):
            if not isinstance(spec, tf.TensorSpec):
                raise DataError(f"{name}: elements hold a {type(spec).__name__}; expected dense "
                                "tensors. Use to_dense or to_tensor in a map.")
        dataset = dataset.as_numpy_iterator()
    if isinstance(dataset, (str, bytes)) or not isinstance(dataset, Iterable):
        raise DataError(f"{name}: expected a tf.data.Dataset, a generator or a function that "
                        f"returns one. Received: {type(dataset).__name__}")
    return iter(dataset)


def _joined(column: list[np.ndarray[Any, Any]], batched: bool, name: str) -> np.ndarray[Any, Any]:
    try:
        return np.concatenate(column) if batched else np.stack(column)
    except ValueError as error:
        raise DataError(f"{name}: samples cannot be put into one array: {error}. All must have "
                        "the same shape; pad them. Say batched=True if it yields batches.",
                        ) from error

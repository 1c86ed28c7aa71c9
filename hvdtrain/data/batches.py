"""Batches as Keras takes them, in any structure: how many samples, some of them, several as one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.data.part import Part
from hvdtrain.data.tf_steps import as_it_is
from hvdtrain.errors import DataError


def count(batch: Any) -> Any:
    """The samples of a batch, an int64 tensor."""
    first = next(each for each in tf.nest.flatten(batch) if each is not None)
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first, tf.int64)[0]


def rows(batch: Any, begin: Any, length: Any) -> Any:
    """Samples of a batch that follow each other."""
    def cut(tensor: Any) -> Any:
        if tensor is None:
            return None
        if isinstance(tensor, tf.SparseTensor):
            rest = tensor.dense_shape[1:]
            return tf.sparse.slice(tensor, tf.concat([[begin], tf.zeros_like(rest)], 0),
                                   tf.concat([[length], rest], 0))
        # A copy: of arrays of a script a slice would be a view, in which later steps may write.
        return tf.gather(tensor, begin + tf.range(length))
    return tf.nest.map_structure(cut, batch)


def part_of(batch: Any, part: Part) -> Any:
    """The number of samples of a batch, and one rank's of them: one where it has none."""
    samples = count(batch)
    begin, length = part.begin(samples), tf.maximum(part.count(samples), 1)
    if part.remainder != "pad":
        return samples, rows(batch, begin, length)
    first = rows(batch, begin, tf.minimum(length, samples - begin))
    again = rows(batch, tf.constant(0, tf.int64), tf.maximum(begin + length - samples, 0))
    return samples, tf.nest.map_structure(_joined, first, again)


def _joined(one: Any, other: Any) -> Any:
    if one is None:
        return None
    if isinstance(one, tf.SparseTensor):
        return tf.sparse.concat(0, [one, other])
    return tf.concat([one, other], 0)


def static_count(dataset: Any) -> int | None:
    """The samples of each batch of a dataset, where it is written in the shape of its elements.

    Raises:
        DataError: Its elements are no batches.
    """
    found = None
    for spec in tf.nest.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is None or shape.rank is None:
            continue
        if shape.rank == 0:
            raise DataError(
                "The tf.data.Dataset gives samples, or something beside them that has no sample "
                f"axis: {dataset.element_spec}. Expected batches, as fit of Keras takes them: call "
                "dataset.batch(batch_size) before.")
        found = found or shape[0]
    return found


def together(batches: Any, number: int) -> Any:
    """So many following batches of a dataset as one each; what is shorter is padded with zeros."""
    shape = batches.element_spec
    flat = [spec is not None and hasattr(spec, "shape") for spec in tf.nest.flatten(shape)]

    @as_it_is
    def without_nothing(*batch: Any) -> Any:
        leaves = tf.nest.flatten(batch if isinstance(shape, tuple) else batch[0])
        return tuple(leaf for leaf in leaves if leaf is not None)

    @as_it_is
    def one(*windows: Any) -> Any:
        # What is in a window has been read: it is counted without being made again.
        samples = windows[0].reduce(tf.constant(0, tf.int64), lambda total, batch:
                                    total + count(batch))
        return tf.data.Dataset.zip(tuple(_joined_window(each, samples) for each in windows))

    @as_it_is
    def with_nothing(*leaves: Any) -> Any:
        left = iter(leaves)
        return tf.nest.pack_sequence_as(shape, [next(left) if is_there else None
                                                for is_there in flat])
    return batches.map(without_nothing).window(number).flat_map(one).map(with_nothing)


def _joined_window(window: Any, samples: Any) -> Any:
    spec = window.element_spec
    if isinstance(spec, tf.TensorSpec) and not spec.shape[1:].is_fully_defined():
        return window.unbatch().padded_batch(samples)
    return window.unbatch().batch(samples)

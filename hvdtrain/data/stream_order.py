"""What decides the order of a `tf.data` pipeline: its shuffles and the files it begins with.

Ranks that share one pipeline sample by sample must see one order, and a run that goes on within
an epoch the order that the run before it saw.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.data import tf_steps
from hvdtrain.data.source import Structure
from hvdtrain.data.tf_steps import nodes_of
from hvdtrain.errors import DataError
from hvdtrain.log import get_logger

_SAMPLES = 3
"""How many samples are compared over the ranks."""
_MOST_BYTES = 1 << 20
_UNSEEDED = (0, 0)


def is_batched(dataset: Any) -> bool:
    """Whether the elements of a dataset are batches, as Keras wants them, and not samples."""
    for node in _along(dataset):
        name = type(node).__name__
        if any(part in name for part in ("Unbatch", "FlatMap", "Interleave", "Window", "Concat")):
            return False
        if "Batch" in name:
            return True
    return False


def is_tuned(dataset: Any) -> bool:
    """Whether some part of a pipeline runs as parallel as `tf.data` finds best."""
    return any(_is_auto(getattr(node, "_num_parallel_calls", None)) for node in nodes_of(dataset))


def _is_auto(value: Any) -> bool:
    return value is not None and int(value) == tf.data.AUTOTUNE


def order_of(dataset: Any) -> tuple[Any, ...]:
    """The shuffles of a pipeline with their seeds, and a checksum of what it begins with.

    Random orders within functions (`interleave`, `map`) are not in it.
    """
    found: list[Any] = []
    for node in nodes_of(dataset):
        if hasattr(node, "_seed") and hasattr(node, "_seed2"):
            found.append((type(node).__name__.strip("_"), int(node._seed), int(node._seed2)))
        tensors = getattr(node, "_tensors", None)
        if tensors is not None:
            found.append(_checksum(tensors))
    return tuple(found)


def check_order(dataset: Any, first: Sequence[Structure], collective: Collective,
                name: str) -> None:
    """Refuse a pipeline whose order differs between the ranks. All ranks.

    Args:
        dataset: Of which each rank takes every N-th sample.
        first: The first samples that this rank sees of it.
        collective: The collective of the run.
        name: String for messages.

    Raises:
        DataError: On every rank: some samples would be seen twice in an epoch and others never.
    """
    if collective.size == 1:
        return
    order = order_of(dataset)
    loose = any(part[1:] == _UNSEEDED for part in order if isinstance(part, tuple))
    exact, floats = checksums(first)
    everyone = collective.gather_objects((order, loose, exact, floats))
    odd = next((rank for rank, theirs in enumerate(everyone)
                if theirs[0] != everyone[0][0] or theirs[2] != everyone[0][2]), None)
    if odd is not None or any(theirs[1] for theirs in everyone):
        which = ("a shuffle has no seed" if odd is None else
                 f"rank {odd} reads another order than rank 0")
        raise DataError(
            f"{name}: the ranks share the samples of a pipeline, which must have the same order on "
            f"all of them, but {which}: some samples would be trained on twice in an epoch and "
            "others never. Make the dataset after hvdtrain.init(), which sets the same seeds on "
            "all ranks; or give shuffle(..., seed=...) and the function that lists the files a "
            "seed.")
    if collective.rank == 0 and any(theirs[3] != everyone[0][3] for theirs in everyone):
        get_logger().warning(
            "%s: the first %d samples differ between the ranks, though their order seems to be "
            "the same. That is right for random augmentation; if the stream has an order of its "
            "own on each rank (map or interleave with deterministic=False), give it one.",
            name, len(first))


def first_samples(dataset: Any) -> list[Structure]:
    """The first samples of a dataset, each with a first axis of length 1."""
    return list(dataset.take(_SAMPLES).batch(1).as_numpy_iterator())


def first_before_shuffles(dataset: Any) -> list[Structure]:
    """Some of the first elements of what a pipeline shuffles or caches, or of all of it.

    Iterating a shuffle would change the order that comes next; the first elements of a cache
    would be all that it keeps.
    """
    if _is_quiet(dataset):
        number = 1 if is_batched(dataset) else _SAMPLES
        return list(dataset.take(number).as_numpy_iterator())
    return [element for part in tf_steps.inputs(dataset) for element in first_before_shuffles(part)]


def _is_quiet(dataset: Any) -> bool:
    return not any(tf_steps.kind(node) in ("Shuffle", "Cache") for node in nodes_of(dataset))


def some_batch(dataset: Any) -> Structure:
    """A batch of a pipeline of batches, made without its shuffles and caches where it can be.

    Its samples need not be the first ones.
    """
    try:
        return next(iter(_unshuffled(dataset).take(1)))
    except tf_steps.NOT_UNDERSTOOD:
        return next(iter(dataset.take(1)))


def _unshuffled(dataset: Any) -> Any:
    if _is_quiet(dataset):
        return dataset
    name, parts = tf_steps.kind(dataset), [_unshuffled(d) for d in tf_steps.inputs(dataset)]
    if name == "Map":
        function = tf_steps.Mapped(dataset).function()
        is_tuple = isinstance(parts[0].element_spec, tuple)

        @tf_steps.as_it_is
        def mapped(*element: Any) -> Any:
            return function(element if is_tuple else element[0])
        return parts[0].map(mapped)
    if name == "Zip":
        return tf.data.Dataset.zip(tf_steps.zipped_as(dataset, parts))
    if name in ("Batch", "PaddedBatch"):
        numbered = tf.data.Dataset.zip((tf.data.Dataset.counter(), parts[0]))
        return tf_steps.batched(numbered, dataset, tf_steps.batch_size(dataset)).map(
            tf_steps.as_it_is(lambda numbers, batch: batch))
    if name in ("Shuffle", "Cache", "Prefetch", "Options", "Repeat"):
        return parts[0]
    return tf_steps.again(dataset, parts[0])



def _along(dataset: Any) -> Iterator[Any]:
    """A dataset, what it is made of, and so on; of several inputs the first."""
    while dataset is not None:
        yield dataset
        inputs = dataset._inputs()
        dataset = inputs[0] if inputs and inputs[0] is not dataset else None


def _checksum(tensors: Any) -> int:
    checksum = 0
    for tensor in tf.nest.flatten(tensors):
        if isinstance(tensor, tf.Tensor) and tensor.dtype != tf.variant:
            array = tensor.numpy()
            array = array if isinstance(array, np.ndarray) else np.asarray(array)
            step = max(1, array.nbytes // _MOST_BYTES)
            checksum = _add(array.reshape(-1)[::step], checksum)
    return checksum


def checksums(samples: Sequence[Structure]) -> tuple[int, int]:
    """Of numbers that augmentation leaves alone (labels, texts), and of floats."""
    exact = floats = 0
    for value in tf.nest.flatten(list(samples)):
        if not isinstance(value, (np.ndarray, np.generic, tf.Tensor, bytes)):
            continue
        array = np.asarray(value)
        if array.dtype.kind == "f":
            floats = _add(array, floats)
        else:
            exact = _add(array, exact)
    return exact, floats


def _add(array: np.ndarray[Any, Any], checksum: int) -> int:
    data = (b"\0".join(map(bytes, array.reshape(-1))) if array.dtype.hasobject
            else np.ascontiguousarray(array).tobytes())
    return zlib.crc32(data, checksum)

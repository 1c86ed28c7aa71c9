"""What decides the order of a `tf.data` pipeline: its shuffles and the files it begins with.

All ranks that share it must see one order, and a resumed run the order of the run before.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.data import tf_pipeline
from hvdtrain.data.source import Structure
from hvdtrain.data.tf_pipeline import nodes_of
from hvdtrain.errors import DataError
from hvdtrain.log import get_logger

SAMPLES = 3
"""How many samples are compared over the ranks."""
_MOST_BYTES = 1 << 20
_UNSEEDED = (0, 0)


def is_batched(dataset: Any) -> bool:
    """Whether the elements of a dataset are batches, as Keras wants them, and not samples."""
    name = tf_pipeline.kind(dataset)
    if any(part in name for part in ("Unbatch", "FlatMap", "Interleave", "Window", "Concat")):
        return False
    inputs = tf_pipeline.inputs(dataset)
    return "Batch" in name or (bool(inputs) and is_batched(inputs[0]))


def is_tuned(dataset: Any) -> bool:
    """Whether some part of a pipeline has its parallelism tuned by `tf.data`."""
    calls = [getattr(node, "_num_parallel_calls", None) for node in nodes_of(dataset)]
    return any(number is not None and int(number) == tf.data.AUTOTUNE for number in calls)


def order_of(dataset: Any) -> tuple[Any, ...]:
    """The shuffles of a pipeline with their seeds, and a checksum of what it begins with."""
    # Random orders within functions (`interleave`, `map`) are not in it.
    found: list[Any] = []
    for node in nodes_of(dataset):
        if hasattr(node, "_seed") and hasattr(node, "_seed2"):
            found.append((type(node).__name__.strip("_"), int(node._seed), int(node._seed2)))
        if hasattr(node, "_tensors"):
            checksum = 0
            for tensor in tf.nest.flatten(node._tensors):
                if isinstance(tensor, tf.Tensor) and tensor.dtype != tf.variant:
                    array = np.asarray(tensor.numpy())
                    step = max(1, array.nbytes // _MOST_BYTES)
                    checksum = _add(array.reshape(-1)[::step], checksum)
            found.append(checksum)
    return tuple(found)


def check_order(dataset: Any, first: Sequence[Structure], collective: Collective,
                name: str) -> None:
    """DataError on every rank where their `first` samples show different orders. All ranks."""
    # Some samples would be seen twice in an epoch and others never.
    if collective.size == 1:
        return
    order = order_of(dataset)
    loose = any(part[1:] == _UNSEEDED for part in order if isinstance(part, tuple))
    exact, floats = _checksums(first)
    odd, others = _odd_rank(collective, (order, exact), floats)
    if odd is not None or loose:
        which = ("a shuffle has no seed" if odd is None else
                 f"rank {odd} reads another order than rank 0")
        raise DataError(
            f"{name}: the ranks share the samples of a pipeline, which must have the same order on "
            f"all of them, but {which}: some samples would be trained on twice in an epoch and "
            "others never. Make the dataset after hvdtrain.init(), which sets the same seeds on "
            "all ranks; or give shuffle(..., seed=...) and the function that lists the files a "
            "seed.")
    if collective.rank == 0 and others:
        get_logger().warning(
            "%s: the first %d samples differ between the ranks, though their order seems to be "
            "the same. That is right for random augmentation; if the stream has an order of its "
            "own on each rank (map or interleave with deterministic=False), give it one.",
            name, len(first))


def check_alike(some: Structure, collective: Collective, name: str, *, exactly: bool,
                samples: int | None = None) -> None:
    """DataError on every rank where samples differ; a warning for inexact floats. All ranks."""
    if collective.size == 1:
        return
    dense = [v for v in tf.nest.flatten(some) if isinstance(v, tf.Tensor)]
    exact, floats = _checksums(dense)
    shapes = [v.shape[1:].as_list() for v in dense]
    odd, others = _odd_rank(collective, (exact, shapes, samples, floats if exactly else 0), floats)
    if odd is not None:
        numbers = collective.gather_objects(samples)
        counts = "" if samples is None else f" ({numbers[odd]} samples, and {numbers[0]})"
        raise DataError(
            f"The {name} data of rank {odd} differ from those of rank 0{counts}. All ranks must be "
            "given the same data, of which each takes its part: read or make them with equal seeds "
            "on all ranks (hvdtrain.init() sets those of Python, NumPy and TensorFlow alike), and "
            "do not divide them yourself. Data of which each rank has its own: "
            "hvdtrain.StreamSource(make) with a function make(rank, size).")
    if collective.rank == 0 and others:
        get_logger().warning(
            "The first batch of the %s data differs between the ranks in its floats. That is right "
            "for random augmentation; else make the data alike on all ranks.", name)


def _odd_rank(collective: Collective, exact: Any, floats: int) -> tuple[int | None, bool]:
    """The first rank whose `exact` values are not those of rank 0; whether any floats differ."""
    everyone = collective.gather_objects((exact, floats))
    odd = next((rank for rank, theirs in enumerate(everyone) if theirs[0] != everyone[0][0]), None)
    return odd, any(theirs[1] != everyone[0][1] for theirs in everyone)


def first_before_shuffles(dataset: Any) -> list[Structure]:
    """Some of the first elements of what a pipeline shuffles or caches, or of all of it."""
    # Iterating a shuffle would change the order that comes next; the first elements of a cache
    # would be all that it keeps.
    if any(tf_pipeline.kind(node) in ("Shuffle", "Cache") for node in nodes_of(dataset)):
        return [element for part in tf_pipeline.inputs(dataset)
                for element in first_before_shuffles(part)]
    number = 1 if is_batched(dataset) else SAMPLES
    return list(dataset.take(number).as_numpy_iterator())


def _checksums(samples: Sequence[Structure]) -> tuple[int, int]:
    """Of numbers that augmentation does not change (labels, texts), and of floats."""
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

"""What a training loop of one's own needs of the other ranks: who am I, share, add, tell.

`DistributedOptimizer`, `DistributedGradientTape` and `broadcast_variables` do the rest; `fit` does
all of it by itself. Each function begins a session where `hvdtrain.init()` was not called.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import ReduceOp
from hvdtrain.data.divided import divided
from hvdtrain.data.part import Part
from hvdtrain.errors import DataError
from hvdtrain.optim.names import CallNames
from hvdtrain.session import init

_names = {kind: CallNames(f"hvdtrain.own.{kind}") for kind in ("allreduce", "allgather")}


def rank() -> int:
    """The number of this process among all, counted from 0."""
    return init().world.rank


def size() -> int:
    """The number of processes."""
    return init().world.size


def is_chief() -> bool:
    """Whether this process is rank 0, which prints and writes."""
    return init().world.is_chief


def print_on_chief(*values: Any, **options: Any) -> None:
    """`print` on rank 0, at once; nothing on the others."""
    if is_chief():
        print(*values, **{"flush": True, **options})  # noqa: T201 - what it is for


def allreduce(values: Any, op: ReduceOp = "average") -> Any:
    """Reduce numbers over all ranks, element by element. All ranks, in the same order.

    Args:
        values: A number, an array, a tensor, or a structure of them; shapes and types are equal
            on all ranks.
        op: String, `"average"` (of whole numbers a float64), `"sum"`, `"min"` or `"max"`.

    Returns:
        The same structure of tensors, equal on all ranks.
    """
    collective, flat = init().collective, []
    for value in tf.nest.flatten(values):
        tensor = tf.convert_to_tensor(value)
        if op == "average" and not tensor.dtype.is_floating:
            tensor = tf.cast(tensor, tf.float64)
        name = _names["allreduce"].next()
        flat.append(collective.reduce([tensor], name=name, op=op)[0])
    return tf.nest.pack_sequence_as(values, flat)


def allgather(values: Any) -> Any:
    """Concatenate arrays of all ranks along their first axis. All ranks, in the same order.

    Args:
        values: An array, a tensor, or a structure of them, of at least one axis; the first may
            have another length on each rank.

    Returns:
        The same structure of tensors, equal on all ranks: rank after rank.
    """
    collective = init().collective
    return tf.nest.map_structure(
        lambda value: collective.allgather(tf.convert_to_tensor(value),
                                           name=_names["allgather"].next()), values)


def gather(value: Any) -> list[Any]:
    """What each rank has, in a list. All ranks; not within a `tf.function`.

    Args:
        value: Numbers, strings, arrays, and lists, tuples and dictionaries of them.
    """
    return init().collective.gather_objects(value)


def broadcast(value: Any, *, root: int = 0) -> Any:
    """What one rank has, on all. All ranks; not within a `tf.function`.

    Args:
        value: As for `gather`; of rank `root` it counts, of the others it is not looked at. An
            array has the same shape and type on all. Variables: `broadcast_variables`.
        root: Integer, the rank.
    """
    collective = init().collective
    if isinstance(value, (np.ndarray, tf.Tensor)):
        return collective.broadcast_array(np.asarray(value), root=root)
    return collective.gather_objects(value if collective.rank == root else None)[root]


def shard(data: Any, *, remainder: Literal["drop", "pad"] = "drop") -> Any:
    """This rank's part of data that all ranks have alike, for a loop of one's own. Every rank.

    All ranks have as many samples and take the same steps, so that the mean over the ranks of
    means over their samples is the mean over all samples.

    Args:
        data: A `tf.data.Dataset` of batches, the same on all ranks: each rank has its part of
            each batch, and reads and decodes its own samples only where the pipeline allows it.
            Or arrays, or a structure of them: the rows `rank`, `rank + size`, ...
        remainder: String, what is done where a batch, or the number of rows, does not divide by
            the ranks: up to N-1 samples are left out (`drop`) or repeated (`pad`).

    Returns:
        A `tf.data.Dataset` of batches; or the same structure of arrays.

    Raises:
        DataError: `remainder` is unknown, or there are fewer rows than ranks.
    """
    if remainder not in ("drop", "pad"):
        raise DataError(f"remainder must be 'drop' or 'pad'. Received: {remainder!r}")
    world = init().world
    if isinstance(data, tf.data.Dataset):
        part = Part(rank=world.rank, size=world.size, remainder=remainder)
        return divided(data, part).dataset.prefetch(2)
    rows = len(tf.nest.flatten(data)[0])
    if rows < world.size:
        raise DataError(f"There are {rows} rows for {world.size} ranks; every rank needs at least "
                        f"one. Start at most {rows} ranks, or add data.")
    each = rows // world.size if remainder == "drop" else -(-rows // world.size)
    own = (world.rank + world.size * np.arange(each)) % rows
    return tf.nest.map_structure(
        lambda array: tf.gather(array, own) if isinstance(array, tf.Tensor) else
        np.asarray(array)[own], data)

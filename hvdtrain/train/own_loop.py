"""For your own training loop: the rank, shares of data, reductions, printing on the chief.

`DistributedOptimizer`, `DistributedGradientTape` and `broadcast_variables` do the rest; `fit` does
all of it. Each function starts a session if `hvdtrain.init()` was not called.
"""

from __future__ import annotations

import os
import random
import zlib
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from hvdtrain.collectives.base import Collective, ReduceOp
from hvdtrain.data.divided import divided
from hvdtrain.data.plans import Part
from hvdtrain.errors import DataError
from hvdtrain.optim.tracing import CallNames
from hvdtrain.session import init

_names = {kind: CallNames(f"hvdtrain.own.{kind}") for kind in ("allreduce", "allgather")}
_drawn: list[int] = []


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
    collective = init().collective

    def reduced(value: Any) -> Any:
        tensor = tf.convert_to_tensor(value)
        if op == "average" and not tensor.dtype.is_floating:
            tensor = tf.cast(tensor, tf.float64)
        return collective.reduce([tensor], name=_names["allreduce"].next(), op=op)[0]
    return tf.nest.map_structure(reduced, values)


def allgather(values: Any) -> Any:
    """Concatenate arrays of all ranks along their first axis. All ranks, in the same order.

    Args:
        values: An array, a tensor, or a structure of them, of at least one axis; the first may
            have another length on each rank.

    Returns:
        The same structure of tensors, equal on all ranks: rank after rank.

    Raises:
        DataError: A value has no axis.
    """
    collective = init().collective

    def gathered(value: Any) -> Any:
        tensor = tf.convert_to_tensor(value)
        if tensor.shape.rank == 0:
            raise DataError("allgather takes arrays and tensors of at least one axis. Received a "
                            "number; lists are structures. Write allgather(np.array(...)), or "
                            "gather(value), which gives a list.")
        return collective.allgather(tensor, name=_names["allgather"].next())
    return tf.nest.map_structure(gathered, values)


def gather(value: Any) -> list[Any]:
    """Gather one value from each rank in a list. All ranks; not within a `tf.function`.

    Args:
        value: Numbers, strings, arrays, and lists, tuples and dictionaries of them.
    """
    return init().collective.gather_objects(value)


def broadcast(value: Any, *, root: int = 0) -> Any:
    """Copy the value of one rank to all. All ranks; not within a `tf.function`.

    Args:
        value: As for `gather`; only that of rank `root` is used. An array has the same shape and
            type on all ranks. For variables, use `broadcast_variables`.
        root: Integer, the rank.
    """
    collective = init().collective
    if isinstance(value, (np.ndarray, tf.Tensor)):
        return collective.broadcast_array(np.asarray(value), root=root)
    return collective.gather_objects(value if collective.rank == root else None)[root]


def shard(data: Any, *, remainder: Literal["drop", "pad"] = "drop") -> Any:
    """This rank's part of data that is the same on all ranks, for your own loop. All ranks.

    All ranks have equally many samples and steps, so that the mean of the ranks' means is the
    mean over all samples.

    Args:
        data: A `tf.data.Dataset` of batches, the same on all ranks: each rank has its part of
            each batch, and reads and decodes its own samples only where the pipeline allows it.
            Or arrays, or a structure of them: the rows `rank`, `rank + size`, ...
        remainder: String, what to do if a batch, or the number of rows, does not divide by the
            ranks: `"drop"` leaves out up to N-1 samples, `"pad"` repeats them.

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


def drawn_seed() -> int | None:
    """The seed that the ranks agreed on, if the script has set none of its own."""
    return _drawn[0] if _drawn and context.global_seed() == _drawn[0] else None


def agree_on_seeds(collective: Collective) -> None:
    """Seed the random generators alike, unless they are, before data are made. All ranks.

    Python and NumPy if they differ; TensorFlow also if it has no seed, as each rank would shuffle
    in another order. Seeds that the user set alike stay. The seed is new in each run.
    """
    own = zlib.crc32(repr((random.getstate(), np.random.get_state())).encode())  # noqa: NPY002
    drawn = int.from_bytes(os.urandom(4), "little")
    everyone = collective.gather_objects((own, context.global_seed(), drawn))
    states, seeds, (seed, *_) = zip(*everyone, strict=True)
    _drawn[:] = [seed]
    if len(set(states)) > 1:
        keras.utils.set_random_seed(seed)
    elif len(set(seeds)) > 1 or None in seeds:
        tf.random.set_seed(seed)

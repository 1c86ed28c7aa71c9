"""Variables and Python objects between ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.errors import ConfigError
from hvdtrain.optim import state
from hvdtrain.optional import require
from hvdtrain.tensorflow import current
from hvdtrain.tensorflow.basics import collective_of
from hvdtrain.tensorflow.calls import unconverted
from hvdtrain.tensorflow.mpi_ops import broadcast_
from hvdtrain.tensorflow.process_sets import ProcessSet, global_process_set


@unconverted
def broadcast_variables(variables: Sequence[Any], root_rank: int,
                        process_set: ProcessSet = global_process_set,
                        inplace: bool = False) -> None:
    """Set variables to the values of one rank. All ranks.

    Eagerly, the ranks compare shapes and types before, and refuse those that differ. Within a
    `tf.function` the values are sent each time it runs.

    Args:
        variables: Sequence of variables of Keras or TensorFlow, in the same order on all ranks.
        root_rank: Integer, the rank whose values are copied, counted among all.
        process_set: A `ProcessSet`, whose ranks take part; by default all.
        inplace: Boolean; both ways set the variables here, so it changes nothing.

    Raises:
        RanksDifferError: The ranks have other variables.
    """
    del inplace
    variables = list(variables)
    if not tf.executing_eagerly():
        broadcast_(variables, root_rank, process_set=process_set)
        return
    state.broadcast_variables(variables, root=_root(root_rank, process_set),
                              collective=collective_of(process_set))


def _root(root_rank: int, process_set: ProcessSet) -> int:
    """The number of a rank within a process set."""
    process_set.check(member=True)
    members = process_set.ranks or []
    if root_rank not in members:
        raise ConfigError(f"root_rank={root_rank} is none of the ranks {members}.")
    return members.index(root_rank)


def broadcast_global_variables(root_rank: int) -> None:
    """Refused: TensorFlow 2 has no collection of global variables."""
    raise ConfigError(
        "TensorFlow 2 has no global variables, so hvd.broadcast_global_variables("
        f"{root_rank}) would broadcast nothing. Write hvd.broadcast_variables(model.variables, "
        f"root_rank={root_rank}) and the same for optimizer.variables; with model.fit use "
        f"hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank}).")


def broadcast_object(obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """Return the object of one rank on all ranks. All ranks; not within a `tf.function`.

    It is sent as a pickle, which can run code where it is read.

    Args:
        obj: Any object that cloudpickle can write; only that of `root_rank` is used.
        root_rank: Integer, the rank, counted among all.
        session: Not used: there are no sessions in TensorFlow 2.
        name: Not used: the ranks send one object at a time.
        process_set: A `ProcessSet`, whose ranks take part; by default all.
    """
    del session, name
    root, collective = _root(root_rank, process_set), collective_of(process_set)
    mine = collective.rank == root
    if collective.size == 1:
        return obj
    sent = collective.gather_objects(written(obj) if mine else b"")[root]
    return obj if mine else pickle.loads(sent)  # noqa: S301 - from a rank of this job


def broadcast_object_fn(root_rank: int = 0, session: Any = None, name: str | None = None,
                        process_set: ProcessSet = global_process_set) -> Callable[[Any], Any]:
    """Return a function of an object that does `broadcast_object`; arguments as there."""
    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)
    return broadcast


def allgather_object(obj: Any, session: Any = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in rank order. All ranks; not within a `tf.function`.

    The arguments are those of `broadcast_object`.
    """
    del session, name
    process_set.check(member=True)
    if current.is_alone():
        return [obj]
    return [pickle.loads(sent)  # noqa: S301 - from ranks of this job
            for sent in collective_of(process_set).gather_objects(written(obj))]


def written(obj: Any) -> bytes:
    """An object as bytes, by cloudpickle."""
    written: bytes = require("cloudpickle", "sending objects between ranks").dumps(obj)
    return written

"""Keras' own `model.fit` on several ranks: refused where each rank would train alone.

A script that was written for one process calls it, and N ranks would train N times on all data.
Those that take care themselves may call it: the optimizer is distributed or the `train_step`
reduces, weights are equal or broadcast by a callback, and each rank gives data of its own.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.data.tf_steps import nodes_of
from hvdtrain.errors import ConfigError
from hvdtrain.optim import keras_seam, reducer, state
from hvdtrain.optim.distributed import is_distributed
from hvdtrain.train.loop import RankCallbacks

_alone: list[bool] = []
_HOW = (
    "Write model = hvdtrain.distribute(model) before: then model.fit, as it is written, divides "
    "the data and does the rest. To train a model on this rank alone on purpose: "
    "with hvdtrain.alone(): model.fit(...)")


@contextmanager
def alone() -> Iterator[None]:
    """While it is entered, Keras' own `model.fit` trains on this rank alone, as Keras does."""
    _alone.append(True)
    try:
        yield
    finally:
        _alone.pop()


def watch_plain_fit(collective: Collective) -> Callable[[], None]:
    """Look at each call of Keras' own `fit`. Every rank of several, once.

    Returns:
        A function that undoes it.
    """
    original = keras.Model.fit

    @functools.wraps(original)
    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        if _alone or isinstance(kwargs.get("callbacks"), RankCallbacks):
            return original(model, *args, **kwargs)
        given = dict(zip(("x", "y", "batch_size", "epochs", "verbose", "callbacks"), args,
                         strict=False)) | kwargs
        with _checked(model, given, collective):
            return original(model, *args, **kwargs)
    keras.Model.fit = fit

    def undo() -> None:
        if keras.Model.fit is fit:
            del keras.Model.fit
    return undo


@contextmanager
def _checked(model: Any, given: Mapping[str, Any], collective: Collective) -> Iterator[None]:
    """Refuse a training that nobody has divided over the ranks.

    Raises:
        ConfigError: On every rank that calls it, with the line to write.
    """
    optimizers = keras_seam.found_optimizers(model)
    distributed = any(is_distributed(part) for o in optimizers
                      for part in [o, *keras_seam.leaf_optimizers(o)])
    own_step = type(model).train_step is not keras.Model.train_step
    if not distributed and not own_step:
        raise ConfigError(
            f"model.fit was called on one of {collective.size} ranks with an optimizer that is "
            f"not distributed: each rank would train alone, on all of its data. {_HOW}")
    broadcasts = any("Broadcast" in type(c).__name__
                     for c in keras.tree.flatten(given.get("callbacks") or []))
    weights = state.digests(model.weights).values
    everyone = collective.gather_objects((weights, data_checksum(given)))
    if not broadcasts and any(theirs[0] != everyone[0][0] for theirs in everyone):
        raise ConfigError(
            "model.fit was called with other weights on each rank, and no callback broadcasts "
            "them: they would stay different. Call hvdtrain.broadcast_variables(model.weights) "
            f"before, once the model is built. Or let hvdtrain do it. {_HOW}")
    if everyone[0][1] is not None and all(theirs[1] == everyone[0][1] for theirs in everyone):
        raise ConfigError(
            f"model.fit was called with the same data on all {collective.size} ranks: each would "
            f"train on all of it. Give each rank its share, e.g. x[rank::size]. Or let hvdtrain "
            f"do it. {_HOW}")
    with _reducing(model) if own_step and not distributed else nullcontext():
        yield


@contextmanager
def _reducing(model: Any) -> Iterator[None]:
    """Refuse a `train_step` that reduces nothing, when it is traced."""
    original = model.train_step

    def train_step(data: Any) -> Any:
        before = reducer.calls()
        result = original(data)
        if reducer.calls() == before:
            raise ConfigError(
                f"The train_step of {type(model).__name__} reduces no gradients over the ranks: "
                "each would train alone. Compile with hvdtrain.DistributedOptimizer(optimizer), "
                f"or use hvdtrain.DistributedGradientTape in it. Or let hvdtrain do it. {_HOW}")
        return result
    keras_seam.set_on_instance(model, "train_step", train_step)
    try:
        yield
    finally:
        keras_seam.restore_method(model, "train_step", original)


def data_checksum(given: Mapping[str, Any]) -> int | None:
    """A checksum of what `fit` is given to train on; None where nothing can be said.

    Of arrays some of the samples, of a `tf.data.Dataset` what it is made of.
    """
    checksum = 0
    for name in ("x", "y"):
        data = given.get(name)
        if isinstance(data, tf.data.Dataset):
            found = _of_dataset(data)
            if found is None:
                return None
            checksum = zlib.crc32(found.encode(), checksum)
            continue
        for array in tf.nest.flatten(data):
            if not hasattr(array, "__array__") or not hasattr(array, "shape"):
                if array is None:
                    continue
                return None
            rows = np.asarray(array)
            some = rows[::max(1, len(rows) // 16)] if rows.ndim else rows
            checksum = zlib.crc32(repr((rows.shape, some.tolist())).encode(), checksum)
    return checksum


def _of_dataset(dataset: Any) -> str | None:
    parts = []
    for node in nodes_of(dataset):
        name = type(node).__name__
        if "Generator" in name or "FlatMap" in name or "Interleave" in name:
            return None  # its functions may hold what a rank has for itself
        tensors = [getattr(node, key, None) for key in ("_tensors", "_tensor", "_index", "_count")]
        parts.append((name, [np.asarray(t).tobytes()[:4096] for t in tf.nest.flatten(tensors)
                             if isinstance(t, tf.Tensor)]))
    return repr(parts)

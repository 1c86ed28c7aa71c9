"""Keras' own methods in a plain script: on all ranks, on the chief, or refused.

They are replaced on Keras' classes, so that models of every class are served, also those whose
`fit` calls `super().fit`. Within a door they are Keras' own again.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import TrainConfig
from hvdtrain.errors import ConfigError, RanksDifferError
from hvdtrain.optim.state import digests
from hvdtrain.script.inside import (
    SAVING,
    inside,
    is_inside,
    is_saving,
    replace_attribute,
)
from hvdtrain.session import Session
from hvdtrain.train import keras_door
from hvdtrain.train.chief import is_alone, needs_all, on_chief
from hvdtrain.train.coordinator import Coordinator
from hvdtrain.train.distribute import is_training_alone, save_on_chief

_DIVIDED = ("fit", "evaluate", "predict")
_SAVED = ("save", "save_weights", "export")
_CHIEF_WRITES = ((tf.train.Checkpoint, "save"), (tf.train.Checkpoint, "write"),
                 (tf.train.CheckpointManager, "save"), (tf.saved_model, "save"))
"""What of TensorFlow writes files: the chief does it, and all ranks get its result."""
_KERAS = ("keras", "keras._tf_keras.keras")  # the modules of `tf.keras` are others


def install(session: Session, config: TrainConfig, settle: Callable[[], None]
            ) -> Callable[[], None]:
    """Open the doors of a plain script; gives a function that closes them. All ranks.

    `settle` ends a loop with a tape that the script has left (`loops`).
    """
    with ExitStack() as stack:
        def put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            original = getattr(owner, name)
            stack.callback(replace_attribute(owner, name, functools.wraps(original)(
                make(original))))

        for name in _DIVIDED:
            put(keras.Model, name, functools.partial(
                _divided, getattr(keras_door, name), config, session, settle))
        for name in _SAVED:
            put(keras.Model, name, functools.partial(_saved, session, settle))
        if session.world.size > 1:
            put(keras.Model, "train_on_batch", _refused)
            for name, part in itertools.product(_KERAS, ("saving", "models")):
                module = importlib.import_module(f"{name}.{part}")
                put(module, "save_model", functools.partial(_through, "save"))
                if hasattr(module, "save_weights"):
                    put(module, "save_weights", functools.partial(_through, "save_weights"))
            for owner, name in _CHIEF_WRITES:
                put(owner, name, functools.partial(_on_chief, session))
            for layer in {kind for kind in vars(keras.layers).values()
                          if isinstance(kind, type) and hasattr(kind, "adapt")}:
                put(layer, "adapt", functools.partial(_compared, session))
        if not session.world.is_chief:
            stack.enter_context(_silent())
            put(tf.summary, "create_file_writer",
                lambda _: lambda *args, **kwargs: tf.summary.create_noop_writer())
        return stack.pop_all().close


def _divided(door: Callable[..., Any], config: TrainConfig, session: Session,
             settle: Callable[[], None], original: Any) -> Callable[..., Any]:
    def method(model: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = tf.distribute.has_strategy() or (
            getattr(model, "_distribute_strategy", None) is not None)
        if is_inside() or is_alone() or is_training_alone() or isinstance(
                kwargs.get("callbacks"), Coordinator) or (
                strategy and session.world.size == 1):
            return original(model, *args, **kwargs)
        if strategy:
            raise ConfigError(
                "The model was made within a tf.distribute strategy. Each rank of hvdtrain has one "
                "device: take the strategy and its scope() out of the script.")
        settle()
        with inside(original.__name__):
            return door(model, *args, config=config, **kwargs)
    return method


def _saved(session: Session, settle: Callable[[], None], original: Any) -> Callable[..., Any]:
    def method(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if is_saving() or is_alone():
            return original(model, filepath, *args, **kwargs)
        if not is_inside():
            settle()
        with inside(SAVING):
            return save_on_chief(model, functools.partial(original, model), session, filepath,
                                 *args, **kwargs)
    return method


def _through(method: str, original: Any) -> Callable[..., Any]:
    """A function that saves a model, by the model's own method."""
    def function(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if is_saving() or is_alone():
            return original(model, filepath, *args, **kwargs)
        return getattr(model, method)(filepath, *args, **kwargs)
    return function


def _on_chief(session: Session, original: Any) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        if is_saving() or is_alone():
            return original(*args, **kwargs)
        with inside(SAVING), needs_all("saves"):
            result = on_chief(session.collective, lambda: _plain(original(*args, **kwargs)))
        if not session.world.is_chief and result is not None:
            _count_save(args[0], result)
        return result
    return function


def _count_save(writer: Any, path: Any) -> None:
    """Let a writer of TensorFlow know of what the chief has written."""
    manager = isinstance(writer, tf.train.CheckpointManager)
    checkpoint = writer.checkpoint if manager else writer
    if manager:
        writer._latest_checkpoint = path
    if isinstance(checkpoint, tf.train.Checkpoint):
        checkpoint.save_counter.assign_add(1)


def _plain(result: Any) -> Any:
    return result if isinstance(result, (str, int, float, type(None))) else None


def _compared(session: Session, original: Any) -> Callable[..., Any]:
    """`adapt` on every rank; refuses results that differ, as from data in another order."""
    def adapt(layer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(layer, *args, **kwargs)
        if is_inside():  # one layer adapts another
            return result
        words = layer.get_vocabulary() if hasattr(layer, "get_vocabulary") else []
        beside = repr([list(map(str, words)), list(getattr(layer, "bin_boundaries", None) or [])])
        with needs_all("adapts a layer"):
            everyone = session.collective.gather_objects(
                (digests(layer.variables), zlib.crc32(beside.encode())))
        odd = next((r for r, theirs in enumerate(everyone) if theirs != everyone[0]), None)
        if odd is not None:
            raise RanksDifferError(
                f"The layer `{layer.name}` ({type(layer).__name__}) was adapted to other data on "
                f"rank {odd} than on rank 0. Give adapt the same data on all ranks, in the same "
                "order: a shuffle needs a seed, and a generator must not depend on the time.")
        return result
    return adapt


def _refused(original: Any) -> Callable[..., Any]:
    def train_on_batch(model: Any, *args: Any, **kwargs: Any) -> Any:
        if is_inside():
            return original(model, *args, **kwargs)
        raise ConfigError(
            "train_on_batch would train each rank alone, on the whole batch. Write "
            "model.fit(x, y, batch_size=len(x), verbose=0), or a loop over a tf.data.Dataset "
            "with a GradientTape.")
    return train_on_batch


class _silent:  # noqa: N801 - a context manager
    """While entered, nothing is printed. Errors and warnings go to standard error as ever."""

    def __enter__(self) -> None:
        self._before, self._null = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
        sys.stdout = self._null
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars write to standard error

    def __exit__(self, *error: Any) -> None:
        if sys.stdout is self._null:
            sys.stdout = self._before
        self._null.close()

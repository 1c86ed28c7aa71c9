"""The user's callbacks on N ranks: which rank runs them, what is restored and what is saved.

All ranks run every callback, with the figures of all ranks, so that decisions are equal. Callbacks
that only write files run on the chief: Keras' own, listed here, and any with `chief_only = True`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.plain import encode
from hvdtrain.log import get_logger
from hvdtrain.optim.state import broadcast_variables, training_state
from hvdtrain.session import Session
from hvdtrain.train.checkpoint import RunState
from hvdtrain.train.chief import alone_on_chief, on_chief

_WRITERS = ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint",
            "RemoteMonitor", "TensorBoard")
_HOOKS = tuple(name for name in vars(keras.callbacks.Callback) if name.startswith("on_"))
_SLOW_HOOKS = ("on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end")
_KEPT_OF_WRITERS = ("best",)  # of writers: `ModelCheckpoint` keeps the best figure
_SETTINGS = ("model", "_model", "params", "_params", "min_delta")
"""Never kept; Keras' `EarlyStopping` flips the sign of its `min_delta` when it begins."""
_UNKNOWN = object()


def is_chief_only(callback: Any) -> bool:
    """Whether only the chief runs it: `chief_only`, or a callback of Keras that writes files."""
    asked = getattr(callback, "chief_only", None)
    if asked is not None:
        return bool(asked)
    writers = tuple(getattr(keras.callbacks, name) for name in _WRITERS
                    if hasattr(keras.callbacks, name))
    return isinstance(callback, writers)


def divide(callbacks: Sequence[Any], session: Session) -> list[Any]:
    """This rank's callbacks, in order. All ranks, with the same list."""
    # Stand-ins for those that only the chief runs tell the watchdog what a rank waits for.
    if session.world.size == 1:
        return list(callbacks)
    return [_watched(c, session) if is_chief_only(c) else c for c in callbacks]


def _watched(callback: Any, session: Session) -> Any:
    """A stand-in for a callback that only the chief runs, which is not changed itself."""
    stands, is_chief = keras.callbacks.Callback(), session.world.is_chief
    stands.async_safe = getattr(callback, "async_safe", False)
    if is_chief:
        stands.set_model, stands.set_params = callback.set_model, callback.set_params

    def standing_for(name: str, hook: Any) -> Any:
        def runs(*args: Any, **kwargs: Any) -> None:
            with ExitStack() as stack:
                if name in _SLOW_HOOKS:
                    stack.enter_context(session.progress.phase(
                        f"running the callback {type(callback).__name__}"))
                if is_chief:
                    stack.enter_context(alone_on_chief())
                    hook(*args, **kwargs)
        return runs

    for name in _HOOKS:
        hook = getattr(callback, name)
        if not getattr(hook, "_is_default", False) and (is_chief or name in _SLOW_HOOKS):
            setattr(stands, name, standing_for(name, hook))
    return stands


def restore_backup(model: Any, callbacks: Sequence[Any], session: Session) -> int:
    """Let `BackupAndRestore` load on the chief, for all; gives the first epoch or 0. All ranks."""
    # Keras would load when training begins: on one rank, and after the data were made.
    backups = [c for c in callbacks if isinstance(c, keras.callbacks.BackupAndRestore)]
    if not backups:
        return 0

    def load() -> int:
        for callback in backups:
            callback.set_model(model)
            callback._load_model()
        return int(model._initial_epoch or 0)
    epoch = on_chief(session.collective, load)
    model._initial_epoch = epoch or None
    broadcast_variables(training_state(model), collective=session.collective)
    if epoch and session.world.is_chief:
        get_logger().info("BackupAndRestore goes on after epoch %d.", epoch)
    return epoch


@contextmanager
def logs_going_on(callbacks: Sequence[Any], begin: RunState, session: Session) -> Iterator[None]:
    """Let the files of `CSVLogger` go on where a run is resumed, whatever its `append`."""
    found = [c for c in callbacks if isinstance(c, keras.callbacks.CSVLogger)
             and session.world.is_chief and begin.step and tf.io.gfile.exists(c.filename)]
    given = [callback.append for callback in found]
    for callback in found:
        with tf.io.gfile.GFile(callback.filename) as file:
            rows = file.read().splitlines(keepends=True)
        # Epochs after the checkpoint are done again.
        while rows and (first := rows[-1].partition(callback.sep)[0]).isdecimal() and (
                int(first) >= begin.epoch):
            rows.pop()
        with tf.io.gfile.GFile(callback.filename, "w") as file:
            file.write("".join(rows))
        callback.append = True
    try:
        yield
    finally:
        for callback, append in zip(found, given, strict=True):
            callback.append = append


class CallbackStates:
    """The state of the user's callbacks, for checkpoints. Equal on all ranks; made before training.

    A callback with `get_state() -> dict` and `set_state(dict)` decides itself what it keeps. Of any
    other, the attributes changed since the run began are kept if they are numbers, strings, arrays,
    or lists and dictionaries of those. An unchanged one is a setting, which the job may change.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = list(callbacks)
        self._initial = [_attributes(c) for c in self._callbacks]

    def collect(self) -> tuple[dict[str, Any], ...]:
        """The state of each callback, in order: `{"class": its name, "state": a dict}`."""
        found = []
        for callback, initial in zip(self._callbacks, self._initial, strict=True):
            state = dict(callback.get_state()) if _has_protocol(callback) else {
                name: value for name, value in _attributes(callback).items()
                if name not in initial or encode(value) != encode(initial[name])}
            found.append({"class": type(callback).__name__, "state": state})
        return tuple(found)

    def restore(self, saved: Sequence[dict[str, Any]]) -> None:
        """Give each callback its state, by class and in order. After `on_train_begin`."""
        left = list(saved)
        for callback in self._callbacks:
            name = type(callback).__name__
            entry = next((e for e in left if e["class"] == name), None)
            if entry is None:
                get_logger().warning("The checkpoint holds no state of the callback %s: it "
                                     "begins anew.", name)
                continue
            left.remove(entry)
            if _has_protocol(callback):
                callback.set_state(entry["state"])
                continue
            for attribute, value in entry["state"].items():
                setattr(callback, attribute, copy.deepcopy(value))


def _has_protocol(callback: Any) -> bool:
    return callable(getattr(callback, "get_state", None)) and callable(
        getattr(callback, "set_state", None))


def _attributes(callback: Any) -> dict[str, Any]:
    only = _KEPT_OF_WRITERS if is_chief_only(callback) and not _has_protocol(callback) else None
    return {name: plain for name, value in vars(callback).items()
            if name not in _SETTINGS and (only is None or name in only)
            and (plain := _plain(value)) is not _UNKNOWN}


def _plain(value: Any) -> Any:
    """A copy made of numbers, strings, arrays, lists and dictionaries; or `_UNKNOWN`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _UNKNOWN if value.dtype.hasobject or value.dtype.fields else value.copy()
    if isinstance(value, (list, tuple)):
        parts: Any = [_plain(v) for v in value]
    elif isinstance(value, dict) and all(isinstance(k, str) for k in value):
        parts = {k: _plain(v) for k, v in value.items()}
    else:
        return _UNKNOWN
    values = parts.values() if isinstance(parts, dict) else parts
    return _UNKNOWN if any(v is _UNKNOWN for v in values) else parts

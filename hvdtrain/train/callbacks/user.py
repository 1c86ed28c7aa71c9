"""The user's callbacks on N ranks: which rank runs them, and a backup that they restore.

Every callback runs on every rank, after the figures of all ranks are in, so that decisions are
the same everywhere. Callbacks that only write files run on the chief: those of Keras that are
listed here, and any that has an attribute `chief_only = True`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvdtrain.log import get_logger
from hvdtrain.optim.state import broadcast, training_state
from hvdtrain.runtime.progress import Progress
from hvdtrain.session import Session
from hvdtrain.train.chief import alone_on_chief, on_chief

_WRITERS = ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint",
            "RemoteMonitor", "TensorBoard")
_HOOKS = tuple(name for name in vars(keras.callbacks.Callback) if name.startswith("on_"))
_SLOW_HOOKS = ("on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end")


def is_chief_only(callback: Any) -> bool:
    """Whether only the chief runs it: `chief_only`, or a callback of Keras that writes files."""
    asked = getattr(callback, "chief_only", None)
    if asked is not None:
        return bool(asked)
    writers = tuple(getattr(keras.callbacks, name) for name in _WRITERS
                    if hasattr(keras.callbacks, name))
    return isinstance(callback, writers)


def divide(callbacks: Sequence[Any], session: Session) -> list[Any]:
    """The callbacks that this rank runs, in the order given. Every rank, with the same list.

    On the other ranks an empty callback stands for one that only the chief runs. It passes the
    same points, so that the watchdog knows that they wait for a chief that writes.

    Args:
        callbacks: The user's callbacks.
        session: This rank.
    """
    if session.world.size == 1:
        return list(callbacks)
    return [_watched(c, session) if is_chief_only(c) else c for c in callbacks]


def _watched(callback: Any, session: Session) -> Any:
    """What stands for a callback that only the chief runs; it is left as it is."""
    stands = keras.callbacks.Callback()
    stands.async_safe = getattr(callback, "async_safe", False)
    if session.world.is_chief:
        stands.set_model, stands.set_params = callback.set_model, callback.set_params
    for name in _HOOKS:
        hook = getattr(callback, name)
        if getattr(hook, "_is_default", False):
            continue
        if name in _SLOW_HOOKS:
            runs = _alone(hook) if session.world.is_chief else getattr(stands, name)
            setattr(stands, name, _in_phase(runs, type(callback).__name__, session.progress))
        elif session.world.is_chief:
            setattr(stands, name, _alone(hook))
    return stands


def _in_phase(hook: Callable[..., None], name: str, progress: Progress) -> Callable[..., None]:
    def watched(*args: Any, **kwargs: Any) -> None:
        with progress.phase(f"running the callback {name}"):
            hook(*args, **kwargs)
    return watched


def _alone(hook: Callable[..., None]) -> Callable[..., None]:
    def runs(*args: Any, **kwargs: Any) -> None:
        with alone_on_chief():
            hook(*args, **kwargs)
    return runs


def restore_backup(model: Any, callbacks: Sequence[Any], session: Session) -> int:
    """Let `BackupAndRestore` callbacks load what they have, on the chief, for all. All ranks.

    Keras would do it when training begins, on one rank only, when the data are made already.

    Args:
        model: A built, compiled model.
        callbacks: The user's callbacks, the same on all ranks.
        session: This rank.

    Returns:
        The epoch to begin with, on every rank; 0 where nothing was restored.
    """
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
    broadcast(session.collective, training_state(model))
    if epoch and session.world.is_chief:
        get_logger().info("BackupAndRestore goes on after epoch %d.", epoch)
    return epoch

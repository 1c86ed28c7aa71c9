"""What the user's callbacks remember, for checkpoints: the patience of `EarlyStopping` and so on.

A callback with methods `get_state() -> dict` and `set_state(dict)` says itself what it keeps.
Of any other, the attributes that have changed since the run began are kept, as far as they are
numbers, strings, arrays, or lists and dictionaries of those. What was not changed is a setting,
which the job may change between two runs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.log import get_logger
from hvdtrain.train.callbacks.user import is_chief_only

_KEPT_OF_WRITERS = ("best",)
"""Of a callback that only writes files: `ModelCheckpoint` keeps the best figure."""
_SETTINGS = ("model", "_model", "params", "_params", "min_delta")
"""Never kept; Keras' `EarlyStopping` turns the sign of its `min_delta` when it begins."""
_UNKNOWN = object()


class CallbackStates:
    """The states of the user's callbacks. Equal on all ranks, as their decisions are.

    Args:
        callbacks: The user's callbacks, before training begins.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = list(callbacks)
        self._initial = [_attributes(c) for c in self._callbacks]

    def collect(self) -> tuple[dict[str, Any], ...]:
        """What each has to remember, in order: `{"class": its name, "state": a dict}`."""
        found = []
        for callback, initial in zip(self._callbacks, self._initial, strict=True):
            if _has_protocol(callback):
                state = dict(callback.get_state())
            else:
                state = {name: value for name, value in _attributes(callback).items()
                         if name not in initial or not _same(value, initial[name])}
            found.append({"class": type(callback).__name__, "state": state})
        return tuple(found)

    def restore(self, saved: Sequence[dict[str, Any]]) -> None:
        """Give each what it had: by class, in order. Every rank; after `on_train_begin`.

        Args:
            saved: What `collect` gave when the checkpoint was written.
        """
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
    """Its attributes that can be kept, as copies."""
    kept = {name: _plain(value) for name, value in vars(callback).items()
            if name not in _SETTINGS}
    if is_chief_only(callback) and not _has_protocol(callback):
        kept = {name: value for name, value in kept.items() if name in _KEPT_OF_WRITERS}
    return {name: value for name, value in kept.items() if value is not _UNKNOWN}


def _plain(value: Any) -> Any:
    """A copy made of numbers, strings, arrays, lists and dictionaries; or `_UNKNOWN`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _UNKNOWN if value.dtype.hasobject else value.copy()
    if isinstance(value, (list, tuple)):
        parts: Any = [_plain(v) for v in value]
    elif isinstance(value, dict) and all(isinstance(k, str) for k in value):
        parts = {k: _plain(v) for k, v in value.items()}
    else:
        return _UNKNOWN
    values = parts.values() if isinstance(parts, dict) else parts
    return _UNKNOWN if any(v is _UNKNOWN for v in values) else parts


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
                and one.shape == other.shape and bool(np.array_equal(one, other)))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return bool(one == other)

"""Keras' downloads in a script: one rank of a host after the other, so that one of them loads."""

from __future__ import annotations

import fcntl
import functools
import importlib
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from hvdtrain.script.inside import replace_attribute

_NAME = "get_file"
_PLACES = ("keras.utils", "keras._tf_keras.keras.utils", "keras.src.utils.file_utils",
           *(f"keras.src.datasets.{name}" for name in (
               "boston_housing", "california_housing", "cifar10", "cifar100", "fashion_mnist",
               "imdb", "mnist", "reuters")))


def install() -> Callable[[], None]:
    """Let `get_file` wait for that of other ranks; gives a function that undoes it."""
    path = os.path.join(tempfile.gettempdir(), f"hvdtrain-downloads-{os.geteuid()}.lock")
    with ExitStack() as stack:
        for place in _PLACES:
            try:
                module = importlib.import_module(place)
                original = getattr(module, _NAME)
            except (ImportError, AttributeError):
                continue  # of another version of Keras

            @functools.wraps(original)
            def get_file(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(held, fcntl.LOCK_EX)
                    return _original(*args, **kwargs)
                finally:
                    os.close(held)
            stack.callback(replace_attribute(module, _NAME, get_file))
        return stack.pop_all().close

"""`CallNames`: names of the collectives of one step."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from hvdtrain.optim import keras_seam


class CallNames:
    """Names that are equal on all ranks and unique among the calls of one traced step.

    Args:
        base: String, unique to what calls, equal on all ranks.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def next(self) -> str:
        """The name of one more call."""
        call = 0
        if not tf.executing_eagerly():
            graph = keras_seam.outermost_graph()
            call = self._calls.get(graph, 0)
            self._calls[graph] = call + 1
        return f"{self._base}.{call}"

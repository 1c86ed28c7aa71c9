"""`InFlight`: the closures that workers have not finished yet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from hvdtrain.engines.parameter_server import tf_seam

_CHECK_S = 0.5


class InFlight:
    """Sends closures and takes their results. One thread; the chief's.

    Args:
        coordinator: The `ClusterCoordinator`.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator
        self._closures: list[tuple[Any, Any]] = []
        self._ended = threading.Event()

    def __len__(self) -> int:
        return len(self._closures)

    def send(self, tag: Any, function: Any, arguments: Sequence[Any]) -> None:
        """Send a closure to whichever worker is free.

        Args:
            tag: What `take` gives back with the result.
            function: A `tf.function`.
            arguments: Its arguments.
        """
        self._closures.append((tag, tf_seam.schedule(self._coordinator, function, arguments,
                                                     self._ended.set)))

    def take(self, *, in_order: bool = False) -> list[tuple[Any, Any]]:
        """Wait a moment, and take the closures that have ended.

        Args:
            in_order: Boolean, whether one counts only when all before it have ended.

        Returns:
            Pairs of tag and result, perhaps none.

        Raises:
            Exception: What a closure has raised.
        """
        self._ended.wait(_CHECK_S)
        self._ended.clear()
        taken = []
        for item in list(self._closures):
            tag, value = item
            if tf_seam.has_ended(value):
                self._closures.remove(item)
                taken.append((tag, tf_seam.result(value)))
            elif in_order:
                break
        return taken

    def drain(self) -> list[tuple[Any, Any]]:
        """Wait for all of them, and take them."""
        taken = []
        while self._closures:
            taken += self.take()
        return taken

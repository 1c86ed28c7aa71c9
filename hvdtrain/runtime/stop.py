"""`StopFlag`: a request to stop, made by a signal and answered at the next step."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

from hvdtrain.errors import EXIT_SIGNALLED
from hvdtrain.runtime.descendants import kill_descendants

_installed: list[StopFlag] = []
_REPEAT_S = 1.0
"""A scheduler and a launcher may both pass on one request: a second signal counts after this."""


class StopFlag:
    """Set by SIGTERM or SIGUSR1; a second signal ends the process at once.

    The flag of one rank says nothing about the others: they agree on it with a collective.
    """

    def __init__(self) -> None:
        self._signal = 0
        self._since_s = 0.0
        self._former: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._signal != 0

    @property
    def signal_number(self) -> int:
        """The signal that asked, 0 if none did."""
        return self._signal

    def request(self, number: int = signal.SIGUSR1) -> None:
        """Ask this rank to stop, as the signal does."""
        if not self._signal:
            self._signal, self._since_s = number, time.monotonic()

    def install(self) -> None:
        """Set the signal handlers; main thread only."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._former[number] = signal.signal(number, self._handle)
        _installed.append(self)

    def uninstall(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()
        if self in _installed:
            _installed.remove(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal and time.monotonic() - self._since_s > _REPEAT_S:
            kill_descendants()
            os._exit(EXIT_SIGNALLED + number)
        self.request(number)


def stop_signal() -> int:
    """The signal that asked this process to stop, where a `StopFlag` is installed; 0 if none."""
    return next((flag.signal_number for flag in _installed if flag.requested), 0)

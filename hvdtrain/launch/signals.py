"""Signals as something a loop can wait for, with the former handlers put back at the end."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
WITH_STOP = (*FORWARDED, signal.SIGTSTP)


class SignalInbox:
    """Collects the signals sent to this process; readable when there are some.

    A context manager. Outside the main thread, where Python allows no handlers, it stays empty.
    """

    def __init__(self, numbers: tuple[int, ...] = FORWARDED) -> None:
        self._numbers = numbers
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._former: dict[int, Any] = {}

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        os.close(self._read_end)
        os.close(self._write_end)

    def fileno(self) -> int:
        """For `selectors`."""
        return self._read_end

    def take(self) -> list[int]:
        """The signals since the last call, in order."""
        try:
            return list(os.read(self._read_end, 4096))
        except BlockingIOError:
            return []

    def _note(self, number: int, frame: FrameType | None) -> None:
        os.write(self._write_end, bytes([number]))

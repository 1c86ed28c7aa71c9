"""What the launcher says while nothing happens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

FIRST_WORDS_S = 5.0
"""After which it is said what the launcher waits for; then again at each doubling."""


class WaitingWords:
    """Says what is waited for, after a while and ever more seldom.

    Args:
        say: Writes a line to the user.
        first_s: Float, after how long.
    """

    def __init__(self, say: Callable[[str], None], first_s: float = FIRST_WORDS_S) -> None:
        self._say = say
        self._began_s = time.monotonic()
        self._next_s = first_s

    def tick(self, words: Callable[[], str]) -> None:
        """To be called often; `words` is called only when it is time, and "" says nothing."""
        waited_s = time.monotonic() - self._began_s
        if waited_s < self._next_s:
            return
        self._next_s = 2 * waited_s
        text = words()
        if text:
            self._say(f"waiting for {text}: {waited_s:.0f} s so far")


def runs_below(pid: int, command: Sequence[str]) -> bool:
    """Whether a process below `pid` on this host runs a command."""
    wanted = b"\0".join(os.fsencode(word) for word in command)
    left = [pid]
    while left:
        for child in _children(left.pop()):
            with suppress(OSError):
                if Path(f"/proc/{child}/cmdline").read_bytes().rstrip(b"\0") == wanted:
                    return True
            left.append(child)
    return False


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found

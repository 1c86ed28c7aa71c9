"""`Progress`: how far this rank has come, for the watchdog to compare with the other ranks.

All ranks pass the same points in the same order, so a count of the points passed tells which
rank the others wait for. A point is a step (`advance`) or an end of a phase that is known to be
slow (`phase`, `enter`): a rank in such a phase is never called hung.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

IDLE = "outside training"
"""Where nothing is known of what a rank does: before, between and after trainings."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What `Progress` holds at one moment."""

    count: int
    """Points passed."""
    at: str
    """The last point, or the phase, in words."""
    slow: bool
    """Whether it is in a phase that is known to be slow."""
    busy: str
    """What some thread does that the training may wait for; empty for nothing."""
    busy_thread: int | None
    """The `threading.get_ident()` of that thread."""


class Progress:
    """The progress of this process.

    One thread, the one that trains, calls `advance`, `enter` and `phase`; every thread may call
    `busy` and `snapshot`. Nothing blocks: each change is one assignment.

    Example:
        ```python
        progress = hvdtrain.init().progress
        for step, batch in enumerate(batches):
            progress.advance(step)
            train(batch)
            if step % 1000 == 0:
                with progress.phase("saving"):
                    save()
        ```
    """

    def __init__(self) -> None:
        self._position: tuple[int, int | str, bool] = (0, IDLE, True)
        self._busy: dict[int, tuple[float, str]] = {}

    def advance(self, at: int | str | None = None) -> None:
        """A point that all ranks pass: ends a slow phase.

        Args:
            at: Integer, a step; or a string, the point in words. None: one point more, and
                everything else as it was.
        """
        count, former, slow = self._position
        self._position = (count + 1, former, slow) if at is None else (count + 1, at, False)

    def enter(self, phase: str) -> None:
        """From here to the next `advance` or `enter` this rank may be slow.

        Args:
            phase: String, what it does, to be read after "rank 0 has been": "saving the model".
        """
        self._position = (self._position[0] + 1, phase, True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part that may be slow; after it everything is as it was. Names as in `enter`."""
        _, at, slow = self._position
        self.enter(name)
        try:
            yield
        finally:
            self._position = (self._position[0] + 1, at, slow)

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Work in any thread that the training may have to wait for, such as reading data.

        It does not excuse the rank: it is named where all ranks have come equally far.
        """
        thread = threading.get_ident()
        self._busy[thread] = (time.monotonic(), name)
        try:
            yield
        finally:
            self._busy.pop(thread, None)

    def snapshot(self) -> Snapshot:
        """How far it is now."""
        count, at, slow = self._position
        busy = sorted((since, name, thread) for thread, (since, name) in list(self._busy.items()))
        return Snapshot(count=count, at=f"step {at}" if isinstance(at, int) else at, slow=slow,
                        busy=busy[0][1] if busy else "", busy_thread=busy[0][2] if busy else None)

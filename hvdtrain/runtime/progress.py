"""`Progress`: how far this rank has come, for the watchdog to compare with the other ranks.

All ranks pass the same points in the same order, so a count of the points passed tells which rank
the others wait for. A point is a step (`advance`) or an end of a phase that is known to be slow
(`phase`, `enter`): a rank in such a phase is never reported as hanging.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

IDLE = "outside training"  # before, between and after trainings


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What `Progress` holds at one moment, and where the rank is then.

    `count` points were passed; `at` is the last point or phase in words, `slow` whether that phase
    is known to be slow. `busy` is work in some thread that the training may wait for, or empty.
    `place` is the function in which it is, e.g. `load (data.py:12)`, reported only after a while;
    `waits`: it belongs to TensorFlow or a collective.
    """

    count: int = 0
    at: str = IDLE
    slow: bool = True
    busy: str = ""
    busy_thread: int | None = None
    place: str = ""
    waits: bool = False


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
        self.seconds: dict[str, float] = defaultdict(float)
        """How long phases have taken, by name."""

    def advance(self, at: int | str | None = None) -> None:
        """Pass a point that all ranks pass: a step, or words. With `at` it ends a slow phase."""
        count, former, slow = self._position
        self._position = (count + 1, former, slow) if at is None else (count + 1, at, False)

    def enter(self, phase: str) -> None:
        """Until the next `advance` or `enter` this rank may be slow: `"saving the model"`."""
        self._position = (self._position[0] + 1, phase, True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part that may be slow; afterwards the state is restored. Names as in `enter`."""
        _, at, slow = self._position
        self.enter(name)
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin
            self._position = (self._position[0] + 1, at, slow)

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Work in any thread that the training may have to wait for, such as reading data."""
        # It does not excuse the rank: it is named where all ranks have come equally far.
        thread = threading.get_ident()
        self._busy[thread] = (time.monotonic(), name)
        try:
            yield
        finally:
            self._busy.pop(thread, None)

    def snapshot(self) -> RankReport:
        """How far it is now."""
        count, at, slow = self._position
        _, busy, thread = min(((since, name, thread) for thread, (since, name) in list(
            self._busy.items())), default=(0.0, "", None))
        return RankReport(count=count, at=f"step {at}" if isinstance(at, int) else at, slow=slow,
                          busy=busy, busy_thread=thread)

"""How long the watchdog waits, and how often ranks report."""

from __future__ import annotations

from dataclasses import dataclass

_REPORTS_PER_S = 200
"""That rank 0 takes in a large job."""


@dataclass(kw_only=True)
class Settings:
    """Shared by the thread of the watchdog and the one that trains, which may change it."""

    hang_timeout_s: float
    """How long nothing may happen; 0: nothing is judged."""
    size: int

    @property
    def interval_s(self) -> float:
        """Between two reports: a second, or more for many ranks, or less for a short limit."""
        wanted = max(1.0, self.size / _REPORTS_PER_S)
        return wanted if self.hang_timeout_s <= 0 else min(wanted, self.hang_timeout_s / 10)

    @property
    def place_after_s(self) -> float:
        """A rank that has not advanced for so long tells where it is."""
        return 3 * self.interval_s

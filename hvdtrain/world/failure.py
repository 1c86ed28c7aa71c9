"""The lines by which a rank tells its launcher how it ends: `HVD-FAILED {json}`, `HVD-DONE`.

Written by `runtime/guard.py`, read by `launch/console.py`, so that the rank that broke is named
and not the one whose exit was seen first; and so that a starter which ends with 0 after it has
lost a host is not believed.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import asdict, dataclass

REPORT_VARIABLE = "HVDTRAIN_REPORT"
"""Set to `1` by a launcher that reads the line; a rank writes it for no one else."""

DONE_LINE = "HVD-DONE"
_MARK = "HVD-FAILED "
_SECONDARY = re.compile(
    r"HorovodInternalError|Horovod has been shut down|Connection (?:closed|reset) by peer|"
    r"MPI communication peer process has unexpectedly disconnected|An error occurred in Socket|"
    r"Broken pipe|(?:Read|Write) timeout|ncclSystemError|ncclRemoteError")


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """What a rank says about its own end."""

    rank: int
    host: str
    time_s: float
    """Seconds since the epoch, by the clock of the rank's host."""
    error: str
    """The name of the exception's class."""
    message: str
    primary: bool
    """False where another rank's end is the cause."""
    code: int = 1
    """The exit code that it leaves with."""

    def to_line(self) -> str:
        """The line, with its line end."""
        return f"{_MARK}{json.dumps(asdict(self))}\n"

    @classmethod
    def from_line(cls, line: str) -> FailureRecord | None:
        """The record in a line, or None where the line holds none."""
        if not line.startswith(_MARK):
            return None
        try:
            return cls(**json.loads(line[len(_MARK):]))
        except (ValueError, TypeError):
            return None


def is_secondary(text: str) -> bool:
    """Whether an error text is one that a rank prints because another rank has gone."""
    return _SECONDARY.search(text) is not None


def signal_name(number: int) -> str:
    """`SIGTERM` for 15; the number for one that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

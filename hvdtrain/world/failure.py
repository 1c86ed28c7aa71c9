"""The lines by which a rank tells its launcher how it ends: `HVD-FAILED {json}`, `HVD-DONE`.

With them the launcher names the rank that broke and not the one whose exit was seen first, and does
not trust a starter that ends with 0 after it has lost a host.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

REPORT_VARIABLE = "HVDTRAIN_REPORT"  # `1` where a launcher reads the lines; else none are written
DONE_LINE = "HVD-DONE"
_MARK = "HVD-FAILED "
_MESSAGE_CHARS = 300
_SECONDARY = re.compile(
    r"HorovodInternalError|Horovod has been shut down|Connection (?:closed|reset) by peer|"
    r"MPI communication peer process has unexpectedly disconnected|An error occurred in Socket|"
    r"has left the shared memory|Broken pipe|(?:Read|Write) timeout|ncclSystemError|"
    r"ncclRemoteError")


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """How a rank ended; `primary` is False where another rank's end is the cause."""
    # `time_s` is since the epoch, by the rank's host; `error` the name of the exception's class.

    rank: int
    host: str
    time_s: float
    error: str
    message: str
    primary: bool
    code: int = 1

    def to_line(self) -> str:
        """The line, with its line end; a long message is cut."""
        fields = asdict(self) | {"message": self.message[:_MESSAGE_CHARS]}
        return f"{_MARK}{json.dumps(fields)}\n"

    @classmethod
    def from_line(cls, line: str) -> FailureRecord | None:
        """The record in a line, or None."""
        if not line.startswith(_MARK):
            return None
        try:
            return cls(**json.loads(line[len(_MARK):]))
        except (ValueError, TypeError):
            return None


def is_secondary(text: str) -> bool:
    """Whether a rank prints this error text because another rank has gone."""
    return _SECONDARY.search(text) is not None

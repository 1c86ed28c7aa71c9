"""What other starters say: whose line it is, and which rank has ended how."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from hvdtrain.errors import EXIT_RUN_FAILED

RANK_LINES = {
    "srun": re.compile(rb" *(?P<rank>\d+): (?P<text>.*)"),
    "horovodrun": re.compile(rb"\[(?P<rank>\d+)\]<(?P<stream>stdout|stderr)>: ?(?P<text>.*)"),
    # Open MPI 4 and 5, with the job before the rank; hydra's -l.
    "mpirun": re.compile(rb"\[(?:[^,\]]+,)?(?P<rank>\d+)\]"
                         rb"(?:<(?P<stream>stdout|stderr)>:)? ?(?P<text>.*)"),
}
"""The line of a rank, as each starter marks it."""

# Open MPI spreads these over two lines, which are joined.
_ENDS = {
    "srun": (
        re.compile(r"srun: error: \S+: tasks? (?P<rank>\d+)\S*: Exited with exit code "
                   r"(?P<code>\d+)$"),
        re.compile(r"srun: error: \S+: tasks? (?P<rank>\d+)\S*: (?P<word>Killed|Aborted|"
                   r"Segmentation fault)")),
    "mpirun": (
        re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal "
                   r"(?P<signal>\d+)"),
        re.compile(r"Process name: \[.*,(?P<rank>\d+)\] +Exit code: +(?P<code>\d+)$"),
        re.compile(r"has exited due to process rank (?P<rank>\d+) with PID \d+ on node \S+ "
                   r"(?P<manner>exiting|calling)")),
    "horovodrun": (re.compile(r"Process (?P<rank>\d+) exit with status code (?P<code>\d+)\."),),
}
_SIGNALS = {"Killed": signal.SIGKILL, "Segmentation fault": signal.SIGSEGV,
            "Aborted": signal.SIGABRT}
_MANNERS = {"exiting": "left early with code 0", "calling": "called MPI_Abort"}


@dataclass(frozen=True)
class SaidEnd:
    """The end of a rank in a starter's words."""

    rank: int
    code: int
    """As in `subprocess`: the exit code, or minus the signal."""
    reason: str = ""
    """How it ended, where that is no code of its own."""


class StarterWords:
    """Reads the lines of a starter's own, in order."""

    def __init__(self, starter: str) -> None:
        self._patterns = _ENDS[starter]
        self._before = ""

    def read(self, line: str) -> SaidEnd | None:
        """The end that a line tells of, alone or with the line before it."""
        joined, self._before = f"{self._before} {line.strip()}", line.strip()
        for text in (line.strip(), joined):
            for pattern in self._patterns:
                found = pattern.search(text)
                if found is not None:
                    self._before = ""
                    said = found.groupdict()
                    return SaidEnd(int(found["rank"]), _code(said),
                                   _MANNERS.get(said.get("manner") or "", ""))
        return None


def _code(found: dict[str, str | None]) -> int:
    if found.get("code"):
        return int(found["code"] or 0)
    if found.get("manner"):
        return EXIT_RUN_FAILED
    word = found.get("word")
    return -(_SIGNALS[word] if word else int(found["signal"] or 0))

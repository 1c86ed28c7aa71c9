"""Runs a small program on this host and gives what it said; at its limit it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from hvdtrain.errors import EXIT_NOT_STARTED, EXIT_TIME_OVER


@dataclass(frozen=True, kw_only=True)
class Said:
    """How a program ended."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def last_line(self) -> str:
        """The last line it wrote, which is where the reason stands."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        if lines:
            return lines[-1]
        if self.code < 0:
            return f"it was ended by {signal.Signals(-self.code).name}"
        return f"it ended with code {self.code} and said nothing"


def ask(argv: Sequence[str], *, limit_s: float) -> Said:
    """Run a program without input. Its children end with it at the limit."""
    try:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, errors="replace",
                                   start_new_session=True)
    except OSError as error:
        return Said(code=EXIT_NOT_STARTED, err=str(error))
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one in an uninterruptible wait stays
            process.communicate(timeout=1.0)
        return Said(code=EXIT_TIME_OVER, err=f"no answer in {limit_s:g} s")
    return Said(code=process.returncode, out=out, err=err)

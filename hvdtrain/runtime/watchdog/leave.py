"""How a rank leaves after a verdict: stacks, one message, the line for the launcher, the end."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import NoReturn

from hvdtrain.errors import EXIT_COLLECTIVE, EXIT_TIME_OVER
from hvdtrain.log import rank_prefix
from hvdtrain.runtime.descendants import kill_descendants
from hvdtrain.runtime.guard import silence
from hvdtrain.runtime.watchdog.judge import Verdict
from hvdtrain.world.failure import FailureRecord

_ERRORS = {"deadlock": "Deadlock", "silent": "RankSilent", "lost": "RankLost"}
_MESSAGE_CHARS = 300
_CAUSE_WAIT_S, _OTHERS_WAIT_S = 0.2, 1.0
"""All print before the first one leaves, and the cause is seen to end first."""
_SAY_LIMIT_S = 3.0
"""A rank may hang because nobody reads its output."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who leaves."""

    rank: int
    size: int
    host: str
    report: bool
    """Whether a launcher reads the line `HVD-FAILED`."""


def leave(verdict: Verdict, me: Identity) -> NoReturn:
    """Say what was found and end this process, whatever its other threads do."""
    saying = threading.Thread(target=_say, args=(verdict, me), daemon=True)
    saying.start()
    saying.join(_SAY_LIMIT_S)
    silence()
    time.sleep(_CAUSE_WAIT_S if me.rank in verdict.causes else _OTHERS_WAIT_S)
    kill_descendants()
    os._exit(_code(verdict))


def _code(verdict: Verdict) -> int:
    return EXIT_COLLECTIVE if verdict.kind == "lost" else EXIT_TIME_OVER


def _say(verdict: Verdict, me: Identity) -> None:
    stream = sys.__stderr__ or sys.stderr
    if verdict.kind == "deadlock":
        stream.write(f"[{rank_prefix(me.rank, me.size, me.host)}] the Python stacks of this "
                     "rank:\n")
        stream.flush()
        faulthandler.dump_traceback(stream, all_threads=True)
    is_cause = me.rank in verdict.causes
    stream.write(f"hvdtrain: {'deadlock: ' if verdict.kind == 'deadlock' else ''}{verdict.text}\n")
    if me.report:
        message = verdict.text if is_cause else f"ended by the watchdog: {verdict.text}"
        stream.write(FailureRecord(
            rank=me.rank, host=me.host, time_s=time.time(), error=_ERRORS[verdict.kind],
            message=message[:_MESSAGE_CHARS], primary=is_cause, code=_code(verdict)).to_line())
    stream.flush()

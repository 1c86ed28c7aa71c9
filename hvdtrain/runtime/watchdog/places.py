"""Where a thread of this process is, in a few words; and this rank's report."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import FrameType

from hvdtrain.runtime.progress import Progress
from hvdtrain.runtime.watchdog.judge import Report

_LONGEST = 120
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_INSTALLED = (sysconfig.get_path("stdlib"), _PACKAGE, "<frozen")
_WAITING = (f"{os.sep}tensorflow{os.sep}", f"{os.sep}horovod{os.sep}",
            os.path.join(_PACKAGE, "collectives"))


def report_of(progress: Progress, *, with_place: bool) -> Report:
    """What this rank tells. The place costs a walk over a stack."""
    now = progress.snapshot()
    place, waits = "", False
    if with_place:
        place, waits = place_of(now.busy_thread or threading.main_thread().ident)
    return Report(count=now.count, at=now.at[:_LONGEST], slow=now.slow, busy=now.busy[:_LONGEST],
                  place=place, waits=waits)


def place_of(thread: int | None) -> tuple[str, bool]:
    """The innermost function of the user's in a thread, and whether a collective is in it.

    A thread inside TensorFlow or a collective is told by that function.
    """
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "", False
    file = frame.f_code.co_filename
    waits = any(part in file for part in _WAITING)
    return _words(frame if waits else _users_frame(frame)), waits


def _users_frame(innermost: FrameType) -> FrameType:
    frame: FrameType | None = innermost
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_INSTALLED) and "site-packages" not in file:
            return frame
        frame = frame.f_back
    return innermost


def _words(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"[:_LONGEST]

"""Ends what this process has started: a rank that leaves by `os._exit` must not leave workers."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def kill_descendants() -> None:
    """Kill the children of this process, theirs, and so on. Linux.

    Data loaders and the like end their workers in exit handlers, which `os._exit` skips; not every
    starter kills them.
    """
    for pid in _below(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return [*found, *(deeper for child in found for deeper in _below(child))]

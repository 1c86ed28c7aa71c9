"""This process: its signals, the programs it runs, and the children that must end with it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hvdtrain.errors import EXIT_NOT_STARTED, EXIT_SIGNALLED, EXIT_TIME_OVER, MachineError

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
WITH_STOP = (*FORWARDED, signal.SIGTSTP)
ANSWER_MARK = "HVDTRAIN-ANSWER "
_installed: list[StopFlag] = []
_REPEAT_S = 1.0  # a scheduler and a launcher may both pass on one request


class StopFlag:
    """Set by SIGTERM or SIGUSR1; a second signal ends the process at once.

    The flag of one rank says nothing about the others: they agree on it with a collective.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._since_s = 0.0
        self._former: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal_number != 0

    def request(self, number: int = signal.SIGUSR1) -> None:
        """Request a stop, as the signal does."""
        if not self.signal_number:
            self.signal_number, self._since_s = number, time.monotonic()

    def install(self) -> None:
        """Set the signal handlers; main thread only."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._former[number] = signal.signal(number, self._handle)
        _installed.append(self)

    def uninstall(self) -> None:
        """Restore the former handlers."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()
        if self in _installed:
            _installed.remove(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and time.monotonic() - self._since_s > _REPEAT_S:
            kill_descendants()
            os._exit(EXIT_SIGNALLED + number)
        self.request(number)


class SignalInbox:
    """Collects the signals sent to this process; readable when there are some.

    A context manager. Outside the main thread, where Python allows no handlers, it stays empty.
    """

    def __init__(self, numbers: tuple[int, ...] = FORWARDED) -> None:
        self._numbers = numbers
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._former: dict[int, Any] = {}

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(
                number, lambda number, frame: os.write(self._write_end, bytes([number])))
                for number in self._numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        os.close(self._read_end)
        os.close(self._write_end)

    def fileno(self) -> int:
        """For `selectors`."""
        return self._read_end

    def take(self) -> list[int]:
        """The signals since the last call, in order."""
        try:
            return list(os.read(self._read_end, 4096))
        except BlockingIOError:
            return []


def stop_signal() -> int:
    """The signal that asked this process to stop, if a `StopFlag` is installed; else 0."""
    return next((flag.signal_number for flag in _installed if flag.requested), 0)


def signal_name(number: int) -> str:
    """`SIGTERM` for 15; the number where there is no name."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def kill_descendants() -> None:
    """Kill the children of this process, theirs, and so on. Linux."""
    # Data loaders end their workers in exit handlers, which `os._exit` skips; not every starter
    # kills them.
    for pid in _descendants(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    # Not psutil: this runs in signal handlers and in ranks that are ending, where an import may
    # find its lock held.
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return [*found, *(deeper for child in found for deeper in _descendants(child))]


@dataclass(frozen=True, kw_only=True)
class FinishedProgram:
    """The exit code and the output of a program."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def text(self) -> str:
        """Standard output and error, one after the other."""
        return self.out + self.err

    @property
    def last_line(self) -> str:
        """The last line it wrote, which has the reason."""
        if lines := (self.err if self.err.strip() else self.out).strip().splitlines():
            return lines[-1].strip()
        if self.code < 0:
            return f"it was ended by {signal_name(-self.code)}"
        return f"it ended with code {self.code} and said nothing"


def run_program(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None,
                cwd: Path | None = None, limit_s: float | None = None,
                text: str = "") -> FinishedProgram:
    """Run a program that reads `text`; code 127 if it cannot be started, 124 at the limit.

    At the limit, or if this process is interrupted, it is killed with its children.
    """
    try:
        process = subprocess.Popen(
            list(map(str, command)), env=env, cwd=cwd, text=True, errors="replace",
            stdin=subprocess.PIPE if text else subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE)
    except OSError as error:
        return FinishedProgram(code=EXIT_NOT_STARTED, err=str(error))
    try:
        out, err = process.communicate(text or None, timeout=limit_s)
    except BaseException as error:
        for pid in (process.pid, *_descendants(process.pid)):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        out = err = ""
        with suppress(subprocess.TimeoutExpired):  # one in an uninterruptible wait stays
            out, err = process.communicate(timeout=1.0)
        return FinishedProgram(code=EXIT_TIME_OVER, out=out,
                               err=f"{err}\nno answer in {limit_s:g} s")
    return FinishedProgram(code=process.returncode, out=out, err=err)


def allow_open_files(count: int) -> tuple[int, int] | None:
    """Let this process have so many files open; the former limits, where they were less.

    MachineError where root has set a lower limit.
    """
    soft, hard = former = resource.getrlimit(resource.RLIMIT_NOFILE)
    if count <= soft or soft == resource.RLIM_INFINITY:
        return None
    if count > hard != resource.RLIM_INFINITY:
        raise MachineError(f"{count} open files are needed, but this login may have {hard} "
                           "(ulimit -Hn). Raise the limit in /etc/security/limits.conf and log in "
                           "anew, or use fewer hosts or ranks.")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    return former


def print_answer(value: Any) -> None:
    """Print a line for the program that started this one and reads its output: JSON."""
    print(ANSWER_MARK + json.dumps(value), flush=True)  # noqa: T201 - the answer


def answer_in(output: str) -> Any:
    """The last answer among other output; None where there is none."""
    lines = [text for line in output.splitlines() if (text := line.partition(ANSWER_MARK)[2])]
    return json.loads(lines[-1]) if lines else None

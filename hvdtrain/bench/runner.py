"""Runs one engine once: starts it, waits, hands signals on, keeps what it printed."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.errors import EXIT_SIGNALLED
from hvdtrain.launch.signals import SignalInbox
from hvdtrain.preload.client import Process, start_program

Status = Literal["ok", "failed", "timeout", "interrupted"]
LOG_NAME = "output.log"

_POLL_S = 0.5
_GRACE_S = 30.0
_TAIL_LINES = 12
_TAIL_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    status: Status
    exit_code: int
    wall_s: float
    """From the start of the command to its end."""
    lines: tuple[str, ...]
    """The last ones that were printed."""


def run_once(command: Sequence[str], *, folder: Path, env: Mapping[str, str], timeout_s: float,
             inbox: SignalInbox) -> Outcome:
    """Run a command to its end; what it prints goes to `output.log` in `folder`.

    It runs in a fork where `env` names a preloaded process.

    Args:
        command: The words.
        folder: Path of the run's own folder, which exists.
        env: The whole environment.
        timeout_s: Float; then the command is told to stop.
        inbox: Signals to this process; they stop the command, a second one at once.
    """
    log = folder / LOG_NAME
    began = time.monotonic()
    with log.open("wb") as stream:
        process = start_program(command, env=env, stdin=subprocess.DEVNULL,
                                stdout=stream.fileno(), stderr=subprocess.STDOUT)
        try:
            stopped = _wait(process, began + timeout_s, inbox)
        finally:
            if process.poll() is None:
                _kill(process)
    code = process.wait()
    status: Status = stopped or ("ok" if code == 0 else "failed")
    return Outcome(status=status, exit_code=EXIT_SIGNALLED - code if code < 0 else code,
                   wall_s=time.monotonic() - began, lines=tail(log))


def tail(log: Path) -> tuple[str, ...]:
    """The last lines of a file."""
    data = log.read_bytes()[-_TAIL_BYTES:]
    lines = [line.rpartition("\r")[2].rstrip() for line in
             data.decode("utf-8", "replace").split("\n")]
    return tuple([line for line in lines if line][-_TAIL_LINES:])


def _wait(process: Process, deadline: float,
          inbox: SignalInbox) -> Literal["timeout", "interrupted"] | None:
    """Wait for the end; why it was stopped, or None."""
    stopped: Literal["timeout", "interrupted"] | None = None
    with selectors.DefaultSelector() as selector, _ended(process.pid) as ended:
        selector.register(inbox, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while process.poll() is None:
            selector.select(_POLL_S)
            for number in inbox.take():
                if number in (signal.SIGINT, signal.SIGTERM):
                    if stopped is None:
                        deadline = time.monotonic() + _GRACE_S
                    stopped = "interrupted"
                    _tell(process, number)
            if time.monotonic() > deadline:
                if stopped is not None:
                    _kill(process)
                    return stopped
                stopped, deadline = "timeout", time.monotonic() + _GRACE_S
                _tell(process, signal.SIGTERM)
    return stopped


@contextlib.contextmanager
def _ended(pid: int) -> Iterator[int]:
    """A descriptor that becomes readable when a child has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _tell(process: Process, number: int) -> None:
    """Signal the command; on a virtual host, which `nsenter` has entered, the program there."""
    pids = [process.pid]
    if Path(str(process.args[0])).name == "nsenter":  # type: ignore[index]
        with contextlib.suppress(OSError):
            found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            pids = [int(pid) for pid in found.split()] or pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

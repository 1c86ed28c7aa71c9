"""`Fork`: a function of this program as a process of its own, without the start of a Python."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import select
import signal
import subprocess
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

_FIRST_FREE = 3  # after the standard streams
_ARGUMENTS = slice(45, 47)  # of proc_pid_stat(5), after the name: where the command line is


def can_fork() -> bool:
    """Whether this process has one thread; locks that others hold would stay locked in a fork."""
    return len(os.listdir("/proc/self/task")) == 1


class Fork:
    """A fork of this process that calls `run` and ends, with the names of `subprocess.Popen`.

    It leads a session, has the descriptors `keep` and its standard streams only, and handles no
    signal. `stdin` is a pipe; with `captured` so are `stdout` and `stderr`, which else are those of
    this process. `name` (at most 15 characters) is its command line. The caller has asked
    `can_fork`.
    """

    def __init__(self, run: Callable[[], object], *, name: str, keep: Sequence[int] = (),
                 captured: bool = False) -> None:
        self.args = [name]
        self.returncode: int | None = None
        pipes = [os.pipe(), *((os.pipe()[::-1], os.pipe()[::-1]) if captured else ())]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _be(run, name, [theirs for theirs, _ in pipes], keep, blocked)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for theirs, _ in pipes:
            os.close(theirs)
        self.stdin: IO[bytes] = os.fdopen(pipes[0][1], "wb")
        self.stdout, self.stderr = (
            os.fdopen(pipes[place][1], "rb", buffering=0) if captured else None for place in (1, 2))

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As in `subprocess`."""
        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                ended = select.poll()
                ended.register(pidfd, select.POLLIN)
                if not ended.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            finally:
                os.close(pidfd)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL; no effect if it has ended."""
        if self.returncode is None:  # not yet waited for, so the number is still its own
            os.kill(self.pid, signal.SIGKILL)


def _be(run: Callable[[], object], name: str, streams: Sequence[int], keep: Sequence[int],
        blocked: set[int | signal.Signals]) -> None:
    """The fork: never returns."""
    code = 1
    try:
        gc.freeze()  # what is left of the caller is not for it to finalize
        os.setsid()
        # Where this process was started without standard streams, pipes may have their numbers.
        for place, stream in enumerate([fcntl.fcntl(one, fcntl.F_DUPFD, _FIRST_FREE)
                                        for one in streams]):
            os.dup2(stream, place)
        first = _FIRST_FREE
        for kept in sorted({*keep}):
            os.closerange(first, kept)
            first = max(first, kept + 1)
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)  # drops one that came meanwhile
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        with suppress(OSError):
            _rename(name)
        run()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        with suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _rename(name: str) -> None:
    """Show `name` in place of the command line, by which people and scripts find the parent."""
    with open("/proc/self/comm", "w", encoding="ascii") as comm:
        comm.write(name)
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        start, end = map(int, stat.read().rpartition(")")[2].split()[_ARGUMENTS])
    if start and end - start > len(name):
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, name.encode(), len(name))

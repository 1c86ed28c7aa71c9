"""Makes the failure of a rank fast, and names the rank.

An uncaught error is printed (only the message where the user is to blame), reported to the launcher
in one line where it listens (HVDTRAIN_REPORT=1), and the process exits by `os._exit`:
`hvd.shutdown()`, which otherwise runs at exit, would make the *other* ranks fail, often before the
one that broke. SIGUSR2 prints the stacks of all threads. `install` is for a program of hvdtrain,
`ScriptGuard` for a user's script.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import NoReturn

from hvdtrain.errors import (
    EXIT_COLLECTIVE,
    EXIT_RUN_FAILED,
    EXIT_SIGNALLED,
    EXIT_STOPPED,
    HvdtrainError,
    LeftEarlyError,
)
from hvdtrain.process import StopFlag, kill_descendants
from hvdtrain.world import World
from hvdtrain.world.failure import DONE_LINE, REPORT_VARIABLE, FailureRecord, is_secondary

_SECONDARY_WAIT_S = 1.0  # so that the rank that is the cause is seen to end first
# So that ranks which fail alike print why before Horovod sees the first one leave.
_ALIKE_WAIT_S, _MISTAKE_WAIT_S = 0.2, 0.5
_STOPPED_WAIT_S = 0.1  # all ranks have agreed to end


class Guard:
    """The result of `install`. As a context manager it also catches what would be swallowed."""

    def __init__(self, world: World, *, report: bool) -> None:
        self._world, self._report = world, report
        self._hook = sys.excepthook
        self.enables_faulthandler = not faulthandler.is_enabled()
        self.stop = StopFlag()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if isinstance(error, SystemExit):
            # `sys.exit(3)` on one rank is a failure too, and so is 0 while others continue.
            if error.code not in (None, 0):
                self.leave_by(error)
            if self._world.size > 1:
                self.fail(LeftEarlyError())
        elif isinstance(error, (Exception, KeyboardInterrupt)):
            self.fail(error)
        if self._report:
            sys.stderr.write(f"{DONE_LINE}\n")
            _flush()
        self.uninstall()

    def fail(self, error: BaseException, *, told: bool = False) -> NoReturn:
        """Print (unless `told` elsewhere) and report an error, and end the process at once."""
        code, secondary = exit_code_of(error), _is_of_another_rank(error)
        interrupted = isinstance(error, KeyboardInterrupt)
        if code == EXIT_STOPPED:
            _ignore_further_requests()
        if not told and (interrupted or isinstance(error, HvdtrainError)):
            sys.stderr.write("interrupted\n" if interrupted else f"hvdtrain: {error}\n")
        elif not told:
            traceback.print_exception(error)
        self._tell(type(error).__name__, "" if told else str(error), code,
                   primary=not (secondary or interrupted))
        _flush()
        if self._world.size > 1:
            silence()
            wait_s = (_STOPPED_WAIT_S if code == EXIT_STOPPED else
                      _MISTAKE_WAIT_S if isinstance(error, HvdtrainError) else _ALIKE_WAIT_S)
            time.sleep(_SECONDARY_WAIT_S if secondary and not self.stop.requested else wait_s)
        _end(code)

    def leave_by(self, error: SystemExit) -> NoReturn:
        """Report an exit that is a failure, and end the process at once."""
        code = error.code if isinstance(error.code, int) else EXIT_RUN_FAILED
        message = "" if isinstance(error.code, int) else str(error.code)
        if message:
            sys.stderr.write(f"{message}\n")
        self._tell("SystemExit", message or str(code), code, primary=not self.stop.requested)
        _end(code)

    def leave(self, code: int) -> NoReturn:
        """End the process at once with a code whose reason another process has reported."""
        _ignore_further_requests()
        _end(code)

    def uninstall(self) -> None:
        """Restore hook, handlers and faulthandler."""
        sys.excepthook = self._hook
        self.stop.uninstall()
        faulthandler.unregister(signal.SIGUSR2)
        if self.enables_faulthandler:
            faulthandler.disable()

    def _tell(self, error: str, message: str, code: int, *, primary: bool) -> None:
        if self._report:
            sys.stderr.write(FailureRecord(
                rank=self._world.rank, host=self._world.host, time_s=time.time(), error=error,
                message=message, primary=primary, code=code).to_line())


def install(world: World, environ: Mapping[str, str]) -> Guard:
    """Guard this process from here on. Main thread, all ranks, before the training starts."""
    guard = Guard(world, report=environ.get(REPORT_VARIABLE) == "1")
    sys.excepthook = lambda kind, error, trace: guard.fail(error)
    guard.stop.install()
    stream = sys.__stderr__ or sys.stderr
    if guard.enables_faulthandler:
        faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR2, file=stream, all_threads=True, chain=False)
    return guard


class ScriptGuard:
    """Guards a user's script against uncaught errors only; signals stay the script's."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._report = environ.get(REPORT_VARIABLE) == "1"
        self.world: World | None = None  # which rank this is, once known

    def install(self) -> None:
        """Install the hook, in place of a former guard's."""
        # Not where `install`, a debugger or a notebook has set a hook, nor in an interactive
        # session.
        former = getattr(sys.excepthook, "__self__", None)
        own = sys.excepthook is sys.__excepthook__ or isinstance(former, ScriptGuard)
        if own and not hasattr(sys, "ps1"):
            sys.excepthook = self._hook

    def uninstall(self) -> None:
        """Restore Python's own hook, unless another one has been set since."""
        if sys.excepthook == self._hook:
            sys.excepthook = sys.__excepthook__

    def _hook(self, kind: type[BaseException], error: BaseException,
              trace: TracebackType | None) -> None:
        if self.world is not None and self.world.size > 1:
            Guard(self.world, report=self._report).fail(error)
        if not isinstance(error, HvdtrainError):
            sys.__excepthook__(kind, error, trace)
            return
        sys.stderr.write(f"hvdtrain: {error}\n")
        raise SystemExit(error.exit_code)  # Python ends with it, and runs its exit handlers


def leave_by(error: SystemExit, world: World, environ: Mapping[str, str]) -> None:
    """End a rank of several whose script has called `sys.exit` with an error, and report it."""
    if world.size > 1:
        Guard(world, report=environ.get(REPORT_VARIABLE) == "1").leave_by(error)


def silence() -> None:
    """Silence this rank: its collective fails as others leave, which it would print."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _is_of_another_rank(error: BaseException) -> bool:
    """Whether a collective raised this because another rank has gone, or similar."""
    if isinstance(error, HvdtrainError):
        return error.of_another_rank
    return is_secondary(f"{type(error).__name__}: {error}")


def exit_code_of(error: BaseException) -> int:
    """The code a process should leave with after an error."""
    if isinstance(error, HvdtrainError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_SIGNALLED + signal.SIGINT
    return EXIT_COLLECTIVE if _is_of_another_rank(error) else EXIT_RUN_FAILED


def _ignore_further_requests() -> None:
    """A starter may take the first rank that stops on request for a failure, and end the others."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(number, signal.SIG_IGN)


def _end(code: int) -> NoReturn:
    _flush()
    kill_descendants()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()

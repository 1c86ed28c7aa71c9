"""`ProbeClient`: the probe of one host, over pipes or ssh. Each question has a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hvdtrain.errors import EXIT_NOT_STARTED
from hvdtrain.launch.link import remote_command, sent_program
from hvdtrain.launch.options import RemoteOptions
from hvdtrain.process import ANSWER_MARK

OLDEST_PYTHON = (3, 11)  # as in pyproject.toml, which a test compares
TOO_OLD = "is too old"
_ANSWER_LIMIT_S, _REAP_S = 15.0, 2.0
_NOISE_LINES, _STDERR_LINES = 5, 5
# Sent, since ssh takes neither a directory nor an environment, and a command line can be read by
# everybody. Every Python 3 understands it, so that an old one is told from a broken one.
_START = """import os, sys
if sys.version_info < {oldest}:
    sys.exit("Python %d.%d.%d {too_old}" % sys.version_info[:3])
os.environ.update({environ})
try:
    os.chdir({directory})
except OSError:
    pass  # the probe tells
os.execv(sys.executable, [sys.executable, "-m", "hvdtrain.doctor.probe"])
"""


class HostSilentError(Exception):
    """A host that gives no answer.

    `code` is the exit code of the probe or of ssh, None while it runs; `words` are its last output.
    """

    def __init__(self, code: int | None, words: str) -> None:
        super().__init__(words)
        self.code = code
        self.words = words


def start_program(environ: Mapping[str, str], *, oldest: tuple[int, ...] = OLDEST_PYTHON) -> bytes:
    """The text of the program that becomes the probe, with its environment."""
    return _START.format(oldest=oldest, too_old=TOO_OLD, environ=dict(environ),
                         directory=repr(os.getcwd())).encode()


class ProbeClient:
    """One host (this one without `remote`); `environ` is added to that of a login there."""

    def __init__(self, host: str, remote: RemoteOptions | None,
                 environ: Mapping[str, str]) -> None:
        self.host = host
        self.remote = remote
        self.noise: list[str] = []  # output of login scripts
        self._program = start_program({} if remote is None else environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        # A file, since a connection that ssh shares (ControlPersist) keeps a pipe open.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it

    def start(self) -> None:
        """Start the probe; the first answer shows whether it runs. HostSilentError without ssh."""
        command = sent_program("hvdtrain-doctor", len(self._program))
        if self.remote is not None:
            command = remote_command(self.host, command, self.remote)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
                start_new_session=True)
        except OSError as error:
            self.close()
            raise HostSilentError(
                EXIT_NOT_STARTED, f"{command[0]} cannot be started: {error}") from error

    def ask(self, what: str, *, limit_s: float = _ANSWER_LIMIT_S, **details: Any) -> Any:
        """Ask, and wait for the answer; HostSilentError if the probe ends or the time is over."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise HostSilentError(None, "not asked, because an earlier question had no answer")
        # The probe's own limit is a little later, in case this side is gone.
        request = {"do": what, "limit_s": int(limit_s) + 60, **details}
        watch = threading.Timer(0.0 if self._is_killed else limit_s, self.kill)
        watch.start()  # it ends the process, and so the writing and reading below
        try:
            with suppress(OSError):  # the end of the process is seen on its output
                process.stdin.write(self._program + json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            self._program = b""
            for line in process.stdout:
                before, mark, text = line.decode(errors="replace").partition(ANSWER_MARK)
                if before.strip() and len(self.noise) < _NOISE_LINES:
                    self.noise.append(before.strip())
                if mark:
                    return json.loads(text)
        finally:
            watch.cancel()
        code = None if self._is_killed else self._reap()
        self._stderr.seek(0)
        lines = [text for line in self._stderr.read().decode(errors="replace").splitlines()
                 if (text := line.strip())]
        words = "; ".join(lines[-_STDERR_LINES:])
        self.close()
        silence = (f"no answer in {limit_s:g} s" if code is None else
                   f"it ended with code {code} and said nothing")
        raise HostSilentError(code, words or silence)

    def kill(self) -> None:
        """End the probe, so that a wait for its answer ends; from any thread."""
        self._is_killed = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the probe."""
        self._reap()
        self._stderr.close()

    def _reap(self) -> int | None:
        """Wait for the exit code of the process, None if it was killed."""
        process, self._process = self._process, None
        if process is None:
            return None
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        try:
            return process.wait(timeout=_REAP_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one in an uninterruptible wait stays
                process.wait(_REAP_S)
        return None

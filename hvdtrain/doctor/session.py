"""`HostSession`: a conversation with the probe of one host. Each question has a limit."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hvdtrain.doctor.probe.boot import MARK
from hvdtrain.errors import EXIT_NOT_STARTED
from hvdtrain.launch.remote_shell import RemoteOptions, remote_command, sent_program

_PACKAGE = Path(__file__).resolve().parents[1]
_SENT = ("errors.py", "horovod_check.py", "world/network.py", "launch/facts.py",
         "doctor/facts.py", "doctor/probe/command.py", "doctor/probe/files.py",
         "doctor/probe/libraries.py", "doctor/probe/machine.py", "doctor/probe/network.py",
         "doctor/probe/python.py", "doctor/probe/serve.py", "doctor/probe/slurm.py")
_PACKAGES = ("hvdtrain", "hvdtrain.world", "hvdtrain.launch", "hvdtrain.doctor",
             "hvdtrain.doctor.probe")
_REAP_S = 2.0
_CHUNK = 1 << 16
_NOISE_LINES, _STDERR_LINES = 5, 5


class HostSilentError(Exception):
    """A host that gives no answer.

    Attributes:
        code: Integer, the exit code of the probe or of ssh; None when it was still there.
        words: String, the last that was heard of it.
    """

    def __init__(self, code: int | None, words: str) -> None:
        super().__init__(words)
        self.code = code
        self.words = words


def bundle() -> bytes:
    """The modules that a probe is made of, as `boot.py` reads them.

    Packages are sent empty: their `__init__` would ask for modules that no probe needs.
    """
    sources = {f"{package}.__init__": "" for package in _PACKAGES}
    for name in _SENT:
        module = "hvdtrain." + name.removesuffix(".py").replace("/", ".")
        sources[module] = (_PACKAGE / name).read_text(encoding="utf-8")
    data = json.dumps(sources).encode()
    return b"%d\n%s" % (len(data), data)


class HostSession:
    """The probe of one host, over pipes or ssh. `close` ends it."""

    def __init__(self, host: str, remote: RemoteOptions | None) -> None:
        """Prepare it.

        Args:
            host: String, the host.
            remote: How to reach it; None for this host.
        """
        self.host = host
        self.is_local = remote is None
        self.noise: list[str] = []
        """Lines on standard output that are no answers: a login script's."""
        self._remote = remote
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._errors: deque[str] = deque(maxlen=_STDERR_LINES)
        self._received = b""
        self._unsent = b""

    def start(self) -> None:
        """Start the probe; whether that works is told by the first answer.

        Raises:
            HostSilentError: ssh is not there.
        """
        boot = (_PACKAGE / "doctor" / "probe" / "boot.py").read_bytes()
        command = sent_program("hvdtrain-doctor", len(boot))
        if self._remote is not None:
            command = remote_command(self.host, command, self._remote)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True)
        except OSError as error:
            raise HostSilentError(
                EXIT_NOT_STARTED, f"{command[0]} cannot be started: {error}") from error
        if self._is_killed:  # meanwhile, by another thread
            self._process.kill()
        for name in ("stdin", "stdout", "stderr"):
            os.set_blocking(self._stream(name).fileno(), False)
        self._unsent = boot + bundle()

    def ask(self, what: str, *, limit_s: float, **details: Any) -> dict[str, Any]:
        """Put a question and wait for the answer.

        Raises:
            HostSilentError: The probe has ended, or there is no answer in time.
        """
        if self._process is None:
            raise HostSilentError(None, "not asked, because an earlier question had no answer")
        # The probe itself is ended a little later, should this side be gone by then.
        request = {"do": what, "limit_s": int(limit_s) + 60, **details}
        self._unsent += json.dumps(request).encode() + b"\n"
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for name in ("stdout", "stderr", "stdin"):
                events = selectors.EVENT_WRITE if name == "stdin" else selectors.EVENT_READ
                selector.register(self._stream(name), events, name)
            while (left_s := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    if not self._serve(str(key.data)):
                        selector.unregister(key.fileobj)
                    answer = self._next_answer()
                    if answer is not None:
                        return answer
                    if key.data == "stdout" and key.fileobj not in selector.get_map():
                        raise self._ended()
        self.close()
        raise HostSilentError(None, self._last_words() or f"no answer in {limit_s:g} s")

    def kill(self) -> None:
        """Make whoever waits for an answer see its end; from any thread."""
        self._is_killed = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the probe and wait for it for a moment."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        try:
            process.wait(timeout=_REAP_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one in an uninterruptible wait stays
                process.wait(_REAP_S)

    def _serve(self, name: str) -> bool:
        """Send or take what is possible now; False when the stream is done."""
        descriptor = self._stream(name).fileno()
        try:
            if name == "stdin":
                self._unsent = self._unsent[os.write(descriptor, self._unsent[:_CHUNK]):]
                return bool(self._unsent)
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return True
        except OSError:  # the other side has gone; its output tells why
            return False
        if name == "stdout":
            self._received += data
        else:
            lines = data.decode(errors="replace").splitlines()
            self._errors.extend(line.strip() for line in lines if line.strip())
        return bool(data)

    def _next_answer(self) -> dict[str, Any] | None:
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            before, mark, text = line.decode(errors="replace").partition(MARK)
            if before.strip() and len(self.noise) < _NOISE_LINES:
                self.noise.append(before.strip())
            if mark:
                answer: dict[str, Any] = json.loads(text)
                return answer
        return None

    def _ended(self) -> HostSilentError:
        process = self._process
        if process is None:
            return HostSilentError(None, self._last_words())
        try:
            code = process.wait(timeout=_REAP_S)
        except subprocess.TimeoutExpired:
            code = None
        # A connection that ssh shares keeps this pipe open beyond the end.
        while self._serve("stderr") and self._has_errors():
            pass
        words = self._last_words() or f"it ended with code {code} and said nothing"
        self.close()
        return HostSilentError(code, words)

    def _has_errors(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stream("stderr"), selectors.EVENT_READ)
            return bool(selector.select(0))

    def _last_words(self) -> str:
        return "; ".join(self._errors)

    def _stream(self, name: str) -> IO[bytes]:
        stream: IO[bytes] | None = getattr(self._process, name, None)
        if stream is None:
            raise RuntimeError(f"the probe of {self.host} has no {name}")
        return stream

"""Starts a preloaded process, and runs programs in forks of it instead of new processes.

Standard library only, and nothing of hvdtrain: `launch/agent.py` gets it as text.

Protocol, over a Unix socket, one connection per program. The client sends a line of JSON with three
descriptors, for standard input, output and error. It reads `{"refused": WHY}`, or `{"pid": N}` and
at the end `{"code": N}` (as in `subprocess`: -N for signal N). Until the client closes the
connection the process stays a zombie, so that no other process can get its number; if it closes
earlier, the process is killed with its group.
"""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

SOCKET_VARIABLE = "HVDTRAIN_PRELOAD"
"""Names the socket of a preloaded process, for programs that would start a Python program."""

_CHUNK = 65536
_END_S = 1.0  # during its imports it does not see that its owner ends


class RefusedError(Exception):
    """The program cannot run in a fork; the text says why."""


class Preloader:
    """A preloaded process; it ends with this one, however that ends.

    It listens on a socket, `path`, in a folder that only this user can enter, and on no network.
    Requests during its imports wait. It refuses programs whose environment differs from `env` in
    what counts at import. `command` is `server_command()`.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        import tempfile  # here, since every launch loads this module
        self.path = os.path.join(tempfile.mkdtemp(prefix="hvdtrain-preload-"), "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.path)
            listener.listen(socket.SOMAXCONN)
            self._process = subprocess.Popen(
                [*command, str(listener.fileno())], env=dict(env), cwd="/",
                stdin=subprocess.PIPE, stdout=2, start_new_session=True,
                pass_fds=(listener.fileno(),))
        self.pid = self._process.pid

    def close(self) -> None:
        """End it, and its forks."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children end with it
            self._process.wait()
        import shutil
        shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)


class ForkedProgram:
    """A program in a fork, with the names and streams of `subprocess.Popen`.

    Construction requests it (RefusedError: nothing listens at `path`); `begin` waits until it runs.
    `command` begins with the Python of that process, or is a script of it; `env` is complete.
    """

    def __init__(self, path: str, command: Sequence[str], *, env: Mapping[str, str],
                 cwd: str | None = None, stdin: int | None = None, stdout: int | None = None,
                 stderr: int | None = None) -> None:
        self.args = list(command)
        self.pid = 0
        self.returncode: int | None = None
        self._rest = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise RefusedError(f"no preloaded process listens at {path} ({error})") from None
        given, own, opened = _streams(stdin, stdout, stderr)
        self.stdin, self.stdout, self.stderr = own
        os.umask(umask := os.umask(0o77))
        request = {
            "command": self.args, "env": dict(env), "cwd": cwd or os.getcwd(),
            "affinity": sorted(os.sched_getaffinity(0)), "umask": umask,
            "ignored": [number for number in signal.valid_signals()
                        if signal.getsignal(number) is signal.SIG_IGN
                        and number not in (signal.SIGPIPE, signal.SIGXFSZ)]}
        data = json.dumps(request).encode() + b"\n"
        with suppress(OSError):  # it has ended meanwhile; reading shows that
            sent = socket.send_fds(self._socket, [data], given)
            self._socket.sendall(data[sent:])
        for descriptor in opened:
            os.close(descriptor)

    def fileno(self) -> int:
        """For `selectors`: readable when `begin`, and later `poll`, have news."""
        return self._socket.fileno()

    def begin(self) -> None:
        """Wait until the program runs; after RefusedError a new process can run it."""
        answer = self._read()
        if answer is None or "pid" not in answer:
            self.abandon()
            why = "the preloaded process ended" if answer is None else answer["refused"]
            raise RefusedError(str(why))
        self.pid = answer["pid"]

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As in `subprocess`."""
        if self.returncode is None:
            self._socket.settimeout(timeout)
            try:
                answer = self._read()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            # The server ends for its owner only, and its children are killed with it.
            self.returncode = -signal.SIGKILL if answer is None else int(answer["code"])
            self._socket.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal the process; no effect if it has ended."""
        if self.returncode is None:  # not yet waited for, so the number is still its own
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def abandon(self) -> None:
        """Kill it if it runs, and discard its output."""
        self._socket.close()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def _read(self) -> dict[str, Any] | None:
        with suppress(ConnectionError):
            while b"\n" not in self._rest:
                data = self._socket.recv(_CHUNK)
                if not data:
                    return None
                self._rest += data
            line, _, self._rest = self._rest.partition(b"\n")
            answer: dict[str, Any] = json.loads(line)
            return answer
        return None


def _streams(*wanted: int | None) -> tuple[list[int], list[IO[bytes] | None], list[int]]:
    """Descriptors for a program, our ends of its pipes, and those that we must close."""
    given, own, opened = list[int](), list[IO[bytes] | None]([None, None, None]), list[int]()
    for place, stream in enumerate(wanted):
        if stream == subprocess.PIPE:
            ends = os.pipe()
            theirs, ours = ends if place == 0 else ends[::-1]
            own[place] = os.fdopen(ours, "wb" if place == 0 else "rb", buffering=0)
            opened.append(theirs)
        elif stream == subprocess.DEVNULL:
            opened.append(theirs := os.open(os.devnull, os.O_RDWR))
        elif stream == subprocess.STDOUT:
            theirs = given[1]
        else:
            theirs = place if stream is None else stream
        given.append(theirs)
    return given, own, opened


Process = ForkedProgram | subprocess.Popen[bytes]


def start_program(command: Sequence[str], *, env: Mapping[str, str], stdin: int | None = None,
                  stdout: int | None = None, stderr: int | None = None) -> Process:
    """Start a Python program in its own group, with the streams of `subprocess.Popen`.

    In a fork if `env` names a preloaded process that accepts it, else as a new process.
    """
    if path := env.get(SOCKET_VARIABLE):
        with suppress(RefusedError):
            forked = ForkedProgram(path, command, env=env, stdin=stdin, stdout=stdout,
                                   stderr=stderr)
            forked.begin()
            return forked
    return subprocess.Popen(command, env=dict(env), stdin=stdin, stdout=stdout, stderr=stderr,
                            start_new_session=True)

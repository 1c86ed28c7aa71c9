"""Starts a preloaded process, and runs programs in forks of it, in place of new processes.

Standard library only, and imports nothing of hvdtrain: `launch/agent.py` gets it as text, and
`python -IS client.py COMMAND ...` runs COMMAND so and stands for it (streams, signals, exit code).

Protocol, over a Unix socket, one connection for each program. The client sends a line of JSON, and
with it three descriptors, for standard input, output and error. It reads `{"refused": WHY}`, or
`{"pid": N}` and at the end `{"code": N}` (as in `subprocess`: -N for signal N). Until the client
closes its end the process stays a zombie, so that its number can belong to no other process; closed
before that, it is killed with its group.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NoReturn

SOCKET_VARIABLE = "HVDTRAIN_PRELOAD"
"""Names the socket of a preloaded process, for those who would start a Python program."""

_CHUNK = 65536
_END_S = 1.0
"""In the middle of its imports it does not see that its owner ends."""


class RefusedError(Exception):
    """The program cannot run in a fork; the text says why."""


class Preloader:
    """A preloaded process of this one; it ends with this one, however that ends.

    It listens on a socket in a folder that only this user can enter, and on no network. It imports
    while this process goes on; who asks before it is through waits.

    Args:
        command: The words that start it (`server_command`).
        env: Its environment; programs are refused if theirs differs in what counts at import.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.path = os.path.join(tempfile.mkdtemp(prefix="hvdtrain-preload-"), "socket")
        """For `HVDTRAIN_PRELOAD`."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.path)
            listener.listen(socket.SOMAXCONN)
            self._process = subprocess.Popen(
                [*command, str(listener.fileno())], env=dict(env), cwd="/",
                stdin=subprocess.PIPE, stdout=2, start_new_session=True,
                pass_fds=(listener.fileno(),))

    @property
    def pid(self) -> int:
        """Of the preloaded process."""
        return self._process.pid

    def close(self) -> None:
        """End it, and what was forked from it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children end with it
            self._process.wait()
        with suppress(OSError):
            os.unlink(self.path)
        with suppress(OSError):
            os.rmdir(os.path.dirname(self.path))


class ForkedProgram:
    """A program in a fork, with the names of `subprocess.Popen`.

    It is asked for when this is made; `begin` waits until it runs.

    Args:
        path: String, the socket of the preloaded process.
        command: The words; the first is the Python of that process, or a script of it.
        env: The whole environment.
        cwd: String, the working directory. Defaults to this process's own.
        stdin: As in `subprocess`: None (this process's own), `PIPE`, `DEVNULL` or a descriptor.
        stdout: The same.
        stderr: The same, or `STDOUT`.

    Raises:
        RefusedError: No preloaded process listens there.
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
        streams = _Streams(stdin, stdout, stderr)
        self.stdin, self.stdout, self.stderr = streams.own
        request = {
            "command": self.args, "env": dict(env), "cwd": cwd or os.getcwd(),
            "affinity": sorted(os.sched_getaffinity(0)), "umask": _umask(),
            "ignored": [number for number in signal.valid_signals()
                        if signal.getsignal(number) is signal.SIG_IGN
                        and number not in (signal.SIGPIPE, signal.SIGXFSZ)]}
        data = json.dumps(request).encode() + b"\n"
        with suppress(OSError):  # it has ended meanwhile, which reading tells
            sent = socket.send_fds(self._socket, [data], streams.given)
            self._socket.sendall(data[sent:])
        streams.close()

    def fileno(self) -> int:
        """For `selectors`: readable when `begin`, and later `poll`, have something to tell."""
        return self._socket.fileno()

    def begin(self) -> None:
        """Wait until the program runs.

        Raises:
            RefusedError: It does not; a new process can run it.
        """
        answer = self._read()
        if answer is None or "pid" not in answer:
            self.abandon()
            why = "the preloaded process ended" if answer is None else answer["refused"]
            raise RefusedError(str(why))
        self.pid = answer["pid"]

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            self._socket.setblocking(False)
            with suppress(BlockingIOError):
                self._take_end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: It goes on.
        """
        if self.returncode is None:
            self._socket.settimeout(timeout)
            try:
                self._take_end()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
        if self.returncode is None:
            raise RuntimeError("neither ended nor timed out")
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal the process; nothing where it has ended."""
        if self.returncode is None:  # nobody has waited for it, so the number is its own
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def abandon(self) -> None:
        """Let go of it: what runs of it is killed, and what it writes is not read."""
        self._close()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def _take_end(self) -> None:
        answer = self._read()
        # The server ends for its owner only, and its children are killed with it.
        self.returncode = -signal.SIGKILL if answer is None else answer["code"]
        self._close()

    def _read(self) -> dict[str, Any] | None:
        while b"\n" not in self._rest:
            try:
                data = self._socket.recv(_CHUNK)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _close(self) -> None:
        self._socket.close()


class _Streams:
    """The three standard streams of a program: what it is given, and our ends of pipes."""

    def __init__(self, *wanted: int | None) -> None:
        self.given: list[int] = []
        self.own: list[IO[bytes] | None] = [None, None, None]
        self._opened: list[int] = []
        for place, stream in enumerate(wanted):
            if stream is None:
                self.given.append(place)
            elif stream == subprocess.STDOUT:
                self.given.append(self.given[1])
            elif stream == subprocess.DEVNULL:
                self.given.append(self._open(os.open(os.devnull, os.O_RDWR)))
            elif stream == subprocess.PIPE:
                ends = os.pipe()
                theirs, ours = ends if place == 0 else ends[::-1]
                self.given.append(self._open(theirs))
                self.own[place] = os.fdopen(ours, "wb" if place == 0 else "rb", buffering=0)
            else:
                self.given.append(stream)

    def _open(self, descriptor: int) -> int:
        self._opened.append(descriptor)
        return descriptor

    def close(self) -> None:
        """Close what only the program keeps."""
        for descriptor in self._opened:
            os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


Process = ForkedProgram | subprocess.Popen[bytes]


def start_program(command: Sequence[str], *, env: Mapping[str, str], stdin: int | None = None,
                  stdout: int | None = None, stderr: int | None = None) -> Process:
    """Start a Python program in a group of its own.

    It runs in a fork where `env` names a preloaded process that takes it, else as a new process.

    Args:
        command: The words.
        env: The whole environment.
        stdin: As in `subprocess`.
        stdout: The same.
        stderr: The same.
    """
    path = env.get(SOCKET_VARIABLE)
    if path:
        with suppress(RefusedError):
            forked = ForkedProgram(path, command, env=env, stdin=stdin, stdout=stdout,
                                   stderr=stderr)
            forked.begin()
            return forked
    return subprocess.Popen(command, env=dict(env), stdin=stdin, stdout=stdout, stderr=stderr,
                            start_new_session=True)


def main() -> NoReturn:
    """Stand for a program that runs in a fork, or be it where it may not."""
    command = sys.argv[1:]
    try:
        program = ForkedProgram(os.environ.get(SOCKET_VARIABLE, ""), command, env=os.environ)
        program.begin()
    except RefusedError as error:
        sys.stderr.write(f"{command[0]} runs as a new process: {error}\n")
        os.execvp(command[0], command)  # noqa: S606
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        if signal.getsignal(number) is not signal.SIG_IGN:
            with suppress(OSError):  # those that the C library keeps for itself
                signal.signal(number, lambda number, frame: program.send_signal(number))
    code = program.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()

"""Program: starts and watches the ranks of one host, for `launch/native.py`.

Standard library only, imports nothing of hvdtrain and is run by path, so that it starts in 0.1 s
and can later be sent to another host through ssh.

Reads from standard input: a line with a size, so many bytes of JSON with the work (command,
directory, environment, ranks), then lines `{"signal": N}` for every rank. Writes JSON lines to
standard output: `start`, `exit`, and `output` followed by that many bytes. When standard input
closes, the launcher has gone, however it ended: the ranks get SIGTERM, then SIGKILL.

Rules learnt by failure: each rank leads a session, and its whole group is killed when it ends
(data-loader workers); its end is awaited by pidfd, not by its pipes, which a child may hold open.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1
_CHUNK = 65536


class Agent:
    """The ranks of this host."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._work = work
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._kill_at: float | None = None
        self._rest = b""

    def run(self) -> None:
        """Start the ranks and serve them to their end."""
        self._watch(0, self._read_control)
        for rank, extra in self._work["ranks"].items():
            self._start(int(rank), {**self._work["env"], **extra})
        while self._ranks:
            wait = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.fd in self._selector.get_map():  # an earlier event may have closed it
                    key.data()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._signal_all(signal.SIGKILL)
                self._kill_at = None

    def _watch(self, descriptor: int, action: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def _start(self, rank: int, env: dict[str, str]) -> None:
        libc, agent = ctypes.CDLL(None), os.getpid()

        def prepare() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != agent:  # the agent ended before the line above
                os._exit(137)

        try:
            process = subprocess.Popen(
                self._work["command"], env=env, cwd=self._work["directory"], bufsize=0,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, preexec_fn=prepare)
        except (OSError, subprocess.SubprocessError) as error:
            _send({"type": "exit", "rank": rank, "code": 127, "time": time.time(),
                   "reason": f"cannot be started: {error}"})
            return
        self._ranks[rank] = process
        _send({"type": "start", "rank": rank, "pid": process.pid})
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                name = "stdout" if stream is process.stdout else "stderr"
                self._watch_output(rank, name, stream.fileno())
        pidfd = os.pidfd_open(process.pid)
        self._watch(pidfd, lambda: self._ended(rank, process, pidfd))

    def _watch_output(self, rank: int, name: str, descriptor: int) -> None:
        def read() -> None:
            if not _forward(rank, name, descriptor):
                self._selector.unregister(descriptor)

        self._watch(descriptor, read)

    def _ended(self, rank: int, process: subprocess.Popen[bytes], pidfd: int) -> None:
        at = time.time()
        code = process.wait()
        del self._ranks[rank]
        _signal_group(process.pid, signal.SIGKILL)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            if stream is None:
                continue
            # All that the rank wrote is in the pipe by now; a child that left the group may
            # keep the pipe open for ever, so nobody waits for its end.
            if stream.fileno() in self._selector.get_map():
                self._selector.unregister(stream.fileno())
                for _ in range(64):
                    if not _forward(rank, name, stream.fileno(), empty=False):
                        break
            stream.close()
        _send({"type": "exit", "rank": rank, "code": code, "time": at, "reason": ""})

    def _read_control(self) -> None:
        data = os.read(0, _CHUNK)
        if not data:
            self._selector.unregister(0)
            self._signal_all(signal.SIGTERM)
            self._kill_at = time.monotonic() + self._work["grace_s"]
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._signal_all(json.loads(line)["signal"])

    def _signal_all(self, number: int) -> None:
        for process in self._ranks.values():
            _signal_group(process.pid, number)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left in it
        os.killpg(pid, number)


def _forward(rank: int, name: str, descriptor: int, *, empty: bool = True) -> bool:
    """Pass on what can be read now. False at the end; `empty` is what "nothing yet" gives."""
    try:
        data = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return empty
    if data:
        _send({"type": "output", "rank": rank, "stream": name, "size": len(data)}, data)
    return bool(data)


def _send(message: dict[str, Any], payload: bytes = b"") -> None:
    data = json.dumps(message).encode() + b"\n" + payload
    try:
        while data:
            data = data[os.write(1, data):]
    except OSError:
        pass  # the launcher has gone; standard input says so too


def _ignore(number: int, frame: object) -> None:
    """A handler, not SIG_IGN: that would be inherited by the ranks."""


def _read_line() -> bytes:
    """The first line, byte by byte: what follows belongs to the loop."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:
            sys.exit(1)
        line += data
    return bytes(line)


def main() -> None:
    """Serve one launcher."""
    # A scheduler signals every process of the job; the launcher decides what it means.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _ignore)
    size = int(_read_line())
    work = b""
    while len(work) < size:
        data = os.read(0, size - len(work))
        if not data:
            sys.exit(1)
        work += data
    Agent(json.loads(work)).run()


if __name__ == "__main__":
    main()

"""Program: starts and watches the ranks of one host, for `launch/native.py`.

Standard library only, imports nothing of hvdtrain. `launch/link.py` sends it to its host through
standard input, so that nothing need be installed there to see why a rank cannot start.

1. Reads a line `{"peers": [HOST, ...]}`, some of the hosts to which this one needs a way.
2. Writes `HVDTRAIN-AGENT {...}` with the facts of this host.
3. Reads a line with a size, and so many bytes of JSON with the work: command, directory, ranks
   with their environments, grace_s, lease_s (0: for ever), stdin (a descriptor for the standard
   input of the ranks, or null), and `preload` where ranks are to be forked: the text of
   `preload/client.py`, and, unless their environment names a preloaded process, the words that
   start one.
4. Reads lines `{"signal": N}` for every rank, `{"pause": true}`, and `{}` as a sign of life. Writes
   JSON lines `exit`, `note` for the user, and `output` followed by as many bytes as it says.

When standard input closes, or brings nothing for `lease_s`, the launcher has gone, however it
ended: the ranks get SIGTERM, then SIGKILL. When the agent itself is killed, a second process, the
keeper, kills them.

Rules learnt by failure: each rank leads a session, and its whole group is killed when it ends
(data-loader workers); its end is awaited by pidfd, not by its pipes, which a child may hold open.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

MARK = b"HVDTRAIN-AGENT "
_PR_SET_PDEATHSIG = 1
_SIOCGIFADDR = 0x8915
_DISCARD_PORT = 9
_CHUNK = 65536
_FIRST_LEASE_S = 60
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_CUT_OFF_GRACE_S = 3.0
"""Ranks whose host is cut off cannot agree to stop."""


class Agent:
    """The ranks of this host."""

    def __init__(self, work: dict[str, Any], keeper: int) -> None:
        self._work = work
        self._keeper = keeper
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, Any] = {}
        """Processes: those of `subprocess`, and forks, which have the same names."""
        self._starting: dict[int, Any] = {}
        """Forks that were asked for and have not begun."""
        self._client = types.ModuleType("client")
        """`preload/client.py`, where ranks are to be forked."""
        if work["preload"]:
            exec(work["preload"]["client"], self._client.__dict__)  # noqa: S102 - of our launcher
        self._preloader: Any = None
        self._stdin = subprocess.DEVNULL if work["stdin"] is None else work["stdin"]
        self._kill_at: float | None = None
        self._rest = b""
        self._wake_read, self._wake_write = os.pipe()

    def run(self) -> None:
        """Start the ranks and serve them to their end."""
        self._watch(0, self._read_control)
        self._watch(self._wake_read, self._lose_launcher)
        signal.signal(signal.SIGALRM, self._lease_is_over)
        self._renew_lease()
        for rank, env in self._work["ranks"].items():
            self._start(int(rank), env)
        while self._ranks or self._starting:
            wait = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.fd in self._selector.get_map():  # an earlier event may have closed it
                    key.data()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._signal_all(signal.SIGKILL)
                self._kill_at = None
        if self._preloader is not None:
            self._preloader.close()

    def _watch(self, descriptor: int, action: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def _start(self, rank: int, env: dict[str, str]) -> None:
        preload = self._work["preload"]
        if preload is None:
            self._start_new(rank, env)
            return
        if self._client.SOCKET_VARIABLE not in env:
            self._preloader = self._preloader or self._client.Preloader(preload["server"], env)
            env[self._client.SOCKET_VARIABLE] = self._preloader.path
        try:
            fork = self._client.ForkedProgram(
                env[self._client.SOCKET_VARIABLE], self._work["command"], env=env,
                cwd=self._work["directory"], stdin=self._stdin, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE)
        except self._client.RefusedError as error:
            self._refused(rank, env, str(error))
        else:
            self._starting[rank] = fork
            self._watch(fork.fileno(), lambda: self._begin(rank, env))

    def _begin(self, rank: int, env: dict[str, str]) -> None:
        """A fork runs, or is refused."""
        fork = self._starting.pop(rank)
        self._selector.unregister(fork.fileno())
        try:
            fork.begin()
        except self._client.RefusedError as error:
            self._refused(rank, env, str(error))
        else:
            self._started(rank, fork)

    def _refused(self, rank: int, env: dict[str, str], why: str) -> None:
        _send({"type": "note", "text": f"ranks are started as new processes: {why}"})
        self._start_new(rank, env)

    def _start_new(self, rank: int, env: dict[str, str]) -> None:
        libc, agent = ctypes.CDLL(None), os.getpid()

        def prepare() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != agent:  # the agent ended before the line above
                os._exit(137)

        try:
            process = subprocess.Popen(
                self._work["command"], env=env, cwd=self._work["directory"], bufsize=0,
                stdin=self._stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, preexec_fn=prepare)
        except (OSError, subprocess.SubprocessError) as error:
            _send({"type": "exit", "rank": rank, "code": 127, "time": time.time(),
                   "reason": f"cannot be started: {error}"})
            return
        self._started(rank, process)

    def _started(self, rank: int, process: Any) -> None:
        self._ranks[rank] = process
        self._tell_keeper(f"+{process.pid}")
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

    def _ended(self, rank: int, process: Any, pidfd: int) -> None:
        at = time.time()
        # First its group: while nobody has waited for it no other process has its number.
        _signal_group(process.pid, signal.SIGKILL)
        code = process.wait()
        del self._ranks[rank]
        self._tell_keeper(f"-{process.pid}")
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

    def _tell_keeper(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._keeper, f"{text}\n".encode())

    def _read_control(self) -> None:
        data = os.read(0, _CHUNK)
        if not data:
            self._selector.unregister(0)
            signal.alarm(0)
            self._end_ranks(self._work["grace_s"])
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._renew_lease()
        for line in lines:
            message = json.loads(line)
            if "signal" in message:
                self._signal_all(message["signal"])
            elif "pause" in message:
                self._signal_all(signal.SIGSTOP if message["pause"] else signal.SIGCONT)
                if message["pause"]:
                    signal.alarm(0)

    def _renew_lease(self) -> None:
        signal.alarm(self._work["lease_s"])

    def _lease_is_over(self, number: int, frame: object) -> None:
        """Act from the signal handler: the loop may be stuck in a write to a dead network."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.write(self._wake_write, b"!")

    def _lose_launcher(self) -> None:
        os.read(self._wake_read, 1)
        self._end_ranks(min(_CUT_OFF_GRACE_S, self._work["grace_s"]))

    def _end_ranks(self, grace_s: float) -> None:
        self._signal_all(signal.SIGCONT)
        self._signal_all(signal.SIGTERM)
        self._kill_at = time.monotonic() + grace_s

    def _signal_all(self, number: int) -> None:
        for process in self._ranks.values():
            # A rank that somebody has stopped would not see the request to end.
            deaf = number == signal.SIGTERM and _is_stopped(process.pid)
            _signal_group(process.pid, signal.SIGKILL if deaf else number)
        for rank in list(self._starting) if number in _ENDING else ():
            fork = self._starting.pop(rank)
            self._selector.unregister(fork.fileno())
            fork.abandon()
            _send({"type": "exit", "rank": rank, "code": -number, "time": time.time(),
                   "reason": ""})


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left in it
        os.killpg(pid, number)


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


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
    _write(json.dumps(message).encode() + b"\n" + payload)


def _write(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(1, data):]
    except OSError:
        pass  # the launcher has gone; standard input says so too


def _start_keeper() -> int:
    """Fork the keeper; returns where to tell it `+GROUP` and `-GROUP`."""
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(read_end)
        return write_end
    os.close(write_end)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # ssh would wait for them to be closed
        os.dup2(null, descriptor)
    groups: set[int] = set()
    told = b""
    while data := os.read(read_end, _CHUNK):
        *lines, told = (told + data).split(b"\n")
        for line in lines:
            (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
    for group in groups:
        _signal_group(group, signal.SIGKILL)
    os._exit(0)


def _ignore(number: int, frame: object) -> None:
    """A handler, not SIG_IGN: that would be inherited by the ranks."""


def _read_line() -> bytes:
    """A line, byte by byte: what follows belongs to the next reader."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:
            sys.exit(1)
        line += data
    return bytes(line)


def _read_work() -> dict[str, Any]:
    line = b"{}"
    while line.strip() == b"{}":  # signs of life, while the launcher waits for other hosts
        signal.alarm(_FIRST_LEASE_S)
        line = _read_line()
    signal.alarm(0)
    size, work = int(line), b""
    while len(work) < size:
        data = os.read(0, size - len(work))
        if not data:
            sys.exit(1)
        work += data
    found: dict[str, Any] = json.loads(work)
    return found


def _interfaces() -> dict[str, str]:
    """The network interfaces of this host with their IPv4 addresses."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # one without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _own_address(peers: list[str]) -> str | None:
    """The address from which this host reaches the first other one that it knows."""
    for peer in peers:
        with contextlib.suppress(OSError), socket.socket(
                socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, _DISCARD_PORT))  # sends nothing
            address: str = probe.getsockname()[0]
            return address
    return None


def main() -> None:
    """Serve one launcher."""
    # A scheduler signals every process of the job; the launcher decides what it means.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _ignore)
    peers = json.loads(_read_line())["peers"]
    # "client port server port": how the launcher and this host see each other.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    facts = {"time": time.time(), "interfaces": _interfaces(), "own_address": _own_address(peers),
             "ssh_client": connection[0] if connection else None,
             "ssh_server": connection[2] if len(connection) > 2 else None}
    _write(MARK + json.dumps(facts).encode() + b"\n")
    Agent(_read_work(), _start_keeper()).run()


if __name__ == "__main__":
    main()

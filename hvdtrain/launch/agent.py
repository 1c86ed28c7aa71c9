"""Program: starts and watches the ranks of one host, for `launch/native.py`.

Standard library only, and nothing of hvdtrain: `launch/link.py` sends it through standard input, so
that a host needs no installation to report why a rank cannot start. It

1. reads a line `{"peers": [HOST, ...]}`, some of the hosts that this one must reach;
2. writes `HVDTRAIN-AGENT {...}` with the facts of this host;
3. reads a line with a size, then as many bytes of JSON, the work: command, directory, env, ranks
   with their own variables, grace_s, lease_s (0: no limit), stdin (descriptor, or null),
   and to fork the ranks `preload`: the text of `preload/client.py` and, unless the environments
   name a preloaded process, the command that starts one;
4. reads lines `{"signal": N}` for every rank, and `{}`, which renews the lease; writes JSON lines
   `exit`, `note` (for the user) and `output`, with as many bytes as it says.

If standard input ends, or brings nothing for `lease_s`, the launcher is gone: the ranks get
SIGTERM, then SIGKILL. If the agent is killed, a second process, the keeper, kills them. Each rank
leads a session, and its whole group is killed when it ends (data-loader workers); pidfds tell the
end, since children may hold the pipes open.
"""

import contextlib
import ctypes
import fcntl
import functools
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
_PR_SET_PDEATHSIG, _SIOCGIFADDR = 1, 0x8915
_DISCARD_PORT = 9
_CHUNK = 65536
_FIRST_LEASE_S = 60
_EXIT_NOT_STARTED = 127  # as in `errors.py`, which is not on that host
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_CUT_OFF_GRACE_S = 3.0  # ranks whose host is cut off cannot agree to stop


class Agent:
    """The ranks of this host: processes of `subprocess`, and forks, which have the same names."""

    def __init__(self, work: dict[str, Any], keeper: int) -> None:
        self._work, self._keeper = work, keeper
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, Any] = {}
        self._starting: dict[int, Any] = {}  # forks that were requested and do not run yet
        self._client = types.ModuleType("client")
        if work["preload"]:
            exec(work["preload"]["client"], self._client.__dict__)  # noqa: S102 - of our launcher
        self._preloader: Any = None
        self._streams: dict[str, Any] = {
            "stdin": subprocess.DEVNULL if work["stdin"] is None else work["stdin"],
            "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._kill_at: float | None = None
        self._rest = b""
        self._wake_read, self._wake_write = os.pipe()

    def run(self) -> None:
        """Start the ranks and serve them to their end."""
        self._watch(0, self._read_control)
        self._watch(self._wake_read, self._lose_launcher)
        signal.signal(signal.SIGALRM, self._lease_is_over)
        signal.alarm(self._work["lease_s"])
        for rank, own in self._work["ranks"].items():
            self._start(int(rank), self._work["env"] | own)
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

    def _watch(self, descriptor: int, action: Callable[[], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def _unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def _start(self, rank: int, env: dict[str, str]) -> None:
        preload, client = self._work["preload"], self._client
        if preload is None:
            self._start_new(rank, env)
            return
        if client.SOCKET_VARIABLE not in env:
            self._preloader = self._preloader or client.Preloader(preload["server"], env)
            env[client.SOCKET_VARIABLE] = self._preloader.path
        try:
            fork = client.ForkedProgram(env[client.SOCKET_VARIABLE], self._work["command"], env=env,
                                        cwd=self._work["directory"], **self._streams)
        except client.RefusedError as error:
            self._start_new(rank, env, error)
        else:
            self._starting[rank] = fork
            self._watch(fork.fileno(), lambda: self._begin(rank, env))

    def _begin(self, rank: int, env: dict[str, str]) -> None:
        fork = self._starting.pop(rank)
        self._selector.unregister(fork.fileno())
        try:
            fork.begin()
        except self._client.RefusedError as error:
            self._start_new(rank, env, error)
        else:
            self._started(rank, fork)

    def _start_new(self, rank: int, env: dict[str, str], why: Exception | None = None) -> None:
        if why is not None:
            _send({"type": "note", "text": f"ranks are started as new processes: {why}"})
        libc, agent = ctypes.CDLL(None), os.getpid()

        def prepare() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != agent:  # the agent ended before the line above
                os._exit(137)

        try:
            process = subprocess.Popen(
                self._work["command"], env=env, cwd=self._work["directory"], bufsize=0,
                start_new_session=True, preexec_fn=prepare, **self._streams)
        except (OSError, subprocess.SubprocessError) as error:
            _send_exit(rank, _EXIT_NOT_STARTED, reason=f"cannot be started: {error}")
        else:
            self._started(rank, process)

    def _started(self, rank: int, process: Any) -> None:
        self._ranks[rank] = process
        self._tell_keeper(f"+{process.pid}")
        for name in ("stdout", "stderr"):
            descriptor = getattr(process, name).fileno()
            os.set_blocking(descriptor, False)
            self._watch(descriptor, functools.partial(self._forward, rank, name, descriptor))
        pidfd = os.pidfd_open(process.pid)
        self._watch(pidfd, lambda: self._ended(rank, process, pidfd))

    def _forward(self, rank: int, name: str, descriptor: int) -> bool:
        """Pass on what can be read now; returns whether there was something."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(descriptor, _CHUNK)
            if not data:
                self._unwatch(descriptor)
        if data:
            _send({"type": "output", "rank": rank, "stream": name, "size": len(data)}, data)
        return bool(data)

    def _ended(self, rank: int, process: Any, pidfd: int) -> None:
        at = time.time()
        # First its group: before `wait` no other process can have its number.
        _signal_group(process.pid, signal.SIGKILL)
        code = process.wait()
        del self._ranks[rank]
        self._tell_keeper(f"-{process.pid}")
        self._selector.unregister(pidfd)
        os.close(pidfd)
        for name in ("stdout", "stderr"):
            stream = getattr(process, name)
            # All that the rank wrote is in the pipe by now. Do not read to the end: a child that
            # left the group may keep the pipe open.
            for _ in range(64):
                if not self._forward(rank, name, stream.fileno()):
                    break
            self._unwatch(stream.fileno())
            stream.close()
        _send_exit(rank, code, at)

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
        signal.alarm(self._work["lease_s"])
        for number in [json.loads(line).get("signal") for line in lines]:
            if number == signal.SIGSTOP:  # the launcher stops too
                signal.alarm(0)
            if number is not None:
                self._signal_all(number)

    def _lease_is_over(self, number: int, frame: object) -> None:
        """In the signal handler, because the loop may be stuck in a write to a dead network."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
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
            # A stopped rank would not see SIGTERM.
            deaf = number == signal.SIGTERM and _is_stopped(process.pid)
            _signal_group(process.pid, signal.SIGKILL if deaf else number)
        for rank in list(self._starting) if number in _ENDING else ():
            fork = self._starting.pop(rank)
            self._selector.unregister(fork.fileno())
            fork.abandon()
            _send_exit(rank, -number)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
        os.killpg(pid, number)


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _send_exit(rank: int, code: int, at: float | None = None, reason: str = "") -> None:
    _send({"type": "exit", "rank": rank, "code": code, "reason": reason,
           "time": time.time() if at is None else at})


def _send(message: dict[str, Any], payload: bytes = b"", *, mark: bytes = b"") -> None:
    data = mark + json.dumps(message).encode() + b"\n" + payload
    with contextlib.suppress(OSError):  # the launcher is gone; standard input ends too
        while data:
            data = data[os.write(1, data):]


def _start_keeper() -> int:
    """Fork the keeper; returns the descriptor that takes lines `+GROUP` and `-GROUP`."""
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
    with open(read_end, encoding="ascii") as told:
        for line in told:
            (groups.add if line.startswith("+") else groups.discard)(int(line[1:]))
    for group in groups:
        _signal_group(group, signal.SIGKILL)
    os._exit(0)


def _read(size: int | None = None) -> bytes:
    """So many bytes, else a line: no more, since what follows belongs to the next reader."""
    data = b""
    while len(data) < size if size is not None else not data.endswith(b"\n"):
        more = os.read(0, 1 if size is None else size - len(data))
        if not more:
            sys.exit(1)
        data += more
    return data


def _interfaces() -> dict[str, str]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # one without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _own_address(peers: list[str]) -> str | None:
    """The address from which this host reaches the first peer whose name it can resolve."""
    for peer in peers:
        with contextlib.suppress(OSError), socket.socket(
                socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, _DISCARD_PORT))  # sends nothing
            return str(probe.getsockname()[0])
    return None


def look_at_network(peers: list[str]) -> dict[str, Any]:
    """Interfaces, and the addresses by which launcher, peers and this host see each other."""
    # "client port server port"
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {"interfaces": _interfaces(), "own_address": _own_address(peers),
            "ssh_client": connection[0] if connection else None,
            "ssh_server": connection[2] if len(connection) > 2 else None}


def main() -> None:
    """Serve one launcher."""
    # A scheduler signals every process of the job; the launcher decides what it means. A handler,
    # not SIG_IGN: that would be inherited by the ranks.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: None)
    peers = json.loads(_read())["peers"]
    _send({"time": time.time(), **look_at_network(peers)}, mark=MARK)
    line = b"{}\n"
    while line == b"{}\n":  # renews the lease while the launcher waits for other hosts
        signal.alarm(_FIRST_LEASE_S)
        line = _read()
    signal.alarm(0)
    Agent(json.loads(_read(int(line))), _start_keeper()).run()


if __name__ == "__main__":
    main()

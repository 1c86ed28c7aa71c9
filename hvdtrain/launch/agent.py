"""Program: starts and watches the ranks of one host, for `launch/native.py`.

Standard library only, and of hvdtrain `agent_host.py`: `launch/link.py` sends both through standard
input, so that a host needs no installation to report why a rank cannot start. It

1. reads a line `{"peers": [HOST, ...]}`, some of the hosts that this one must reach;
2. writes `HVDTRAIN-AGENT {...}` with the facts of this host;
3. reads a line with a size, then as many bytes of JSON, the work: command, directory, env, ranks
   with their own variables, grace_s, lease_s (0: no limit), stdin (descriptor, or null),
   and to fork the ranks `preload`: the text of `preload/client.py` and, unless the environments
   name a preloaded process, the command that starts one;
4. reads lines `{"signal": N}` for every rank, and `{}`, which renews the lease; writes JSON lines
   `exit`, `note` (for the user) and `output`, with as many bytes as it says;
5. goes on with 3 when all ranks have ended.

In an elastic job the work names a folder in memory, `commits`, where ranks keep their newest state
(`train/commits.py`). Then work without ranks makes it and the preloaded process, and is answered by
`ready` when that can fork. `idle` follows the last exit. Both name the newest commit. The line
`{"change": true}` asks the ranks to commit and end, `{"forget": true}` removes the folder; without
it, it stays for `keep_s` after this agent's end, for another launcher of the same job.

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
from collections.abc import Callable
from typing import Any

from hvdtrain.launch.agent_host import Host, send, signal_group, start_keeper

MARK = b"HVDTRAIN-AGENT "
_PR_SET_PDEATHSIG, _SIOCGIFADDR = 1, 0x8915
_DISCARD_PORT = 9
_CHUNK = 65536
_EXIT_NOT_STARTED = 127  # as in `errors.py`, which is not on that host
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_CUT_OFF_GRACE_S = 3.0  # ranks whose host is cut off cannot agree to stop


class Agent:
    """The ranks of this host: processes of `subprocess`, and forks, which have the same names."""

    def __init__(self, work: dict[str, Any], host: Host) -> None:
        self._work, self._host = work, host
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, Any] = {}
        self._starting: dict[int, Any] = {}  # forks that were requested and do not run yet
        self._streams: dict[str, Any] = {
            "stdin": subprocess.DEVNULL if work["stdin"] is None else work["stdin"],
            "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._kill_at: float | None = None
        self._is_cut_off = False
        self._wake_read, self._wake_write = os.pipe()

    def run(self) -> bool:
        """Start the ranks and serve them to their end; returns whether the launcher is there."""
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
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._host.tell("idle")
        return not self._is_cut_off

    def _watch(self, descriptor: int, action: Callable[[], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def _unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def _start(self, rank: int, env: dict[str, str]) -> None:
        if self._work["preload"] is None:
            self._start_new(rank, env)
            return
        try:
            fork = self._host.fork(self._work, env, self._work["command"], **self._streams)
        except self._host.client.RefusedError as error:
            self._start_new(rank, env, error)
        else:
            self._starting[rank] = fork
            self._watch(fork.fileno(), lambda: self._begin(rank, env))

    def _begin(self, rank: int, env: dict[str, str]) -> None:
        fork = self._starting.pop(rank)
        self._selector.unregister(fork.fileno())
        try:
            fork.begin()
        except self._host.client.RefusedError as error:
            self._start_new(rank, env, error)
        else:
            self._started(rank, fork)

    def _start_new(self, rank: int, env: dict[str, str], why: Exception | None = None) -> None:
        if why is not None:
            send({"type": "note", "text": f"ranks are started as new processes: {why}"})
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
            send({"type": "output", "rank": rank, "stream": name, "size": len(data)}, data)
        return bool(data)

    def _ended(self, rank: int, process: Any, pidfd: int) -> None:
        at = time.time()
        # First its group: before `wait` no other process can have its number.
        signal_group(process.pid, signal.SIGKILL)
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
        self._host.tell_keeper(text)

    def _read_control(self) -> None:
        line = _read()  # no more: the next work may follow
        if not line:
            self._selector.unregister(0)
            signal.alarm(0)
            self._end_ranks(self._work["grace_s"])
            return
        signal.alarm(self._work["lease_s"])
        told = json.loads(line)
        self._host.obey(told)
        number = told.get("signal")
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
        self._is_cut_off = True
        self._end_ranks(min(_CUT_OFF_GRACE_S, self._work["grace_s"]))

    def _end_ranks(self, grace_s: float) -> None:
        self._signal_all(signal.SIGCONT)
        self._signal_all(signal.SIGTERM)
        self._kill_at = time.monotonic() + grace_s

    def _signal_all(self, number: int) -> None:
        for process in self._ranks.values():
            # A stopped rank would not see SIGTERM.
            deaf = number == signal.SIGTERM and _is_stopped(process.pid)
            signal_group(process.pid, signal.SIGKILL if deaf else number)
        for rank in list(self._starting) if number in _ENDING else ():
            fork = self._starting.pop(rank)
            self._selector.unregister(fork.fileno())
            fork.abandon()
            _send_exit(rank, -number)


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _send_exit(rank: int, code: int, at: float | None = None, reason: str = "") -> None:
    send({"type": "exit", "rank": rank, "code": code, "reason": reason,
           "time": time.time() if at is None else at})


def _read(size: int | None = None) -> bytes:
    """So many bytes, else a line: no more, since what follows belongs to the next reader.

    Empty at the end of standard input.
    """
    data = b""
    while len(data) < size if size is not None else not data.endswith(b"\n"):
        more = os.read(0, 1 if size is None else size - len(data))
        if not more:
            return b""
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
    peers = json.loads(_read() or b"{}").get("peers")
    if peers is None:
        sys.exit(1)
    send({"time": time.time(), **look_at_network(peers)}, mark=MARK)
    host = Host(start_keeper())
    try:
        while (line := _waited(host)) and (text := _read(int(line))):
            work = json.loads(text)
            host.begin(work)
            host.lease_s = work["lease_s"]
            if not work["ranks"]:
                host.prepare(work)
            elif not Agent(work, host).run():
                break  # it would miss what follows
    finally:
        host.close()


def _waited(host: Host) -> bytes:
    """The size of the next work; empty where the launcher has ended, or wants nothing more."""
    line = b"{}\n"
    while line.startswith(b"{"):  # `{}` renews the lease while the launcher waits for other hosts
        signal.alarm(host.lease_s)
        line = _read()
        told = json.loads(line) if line.startswith(b"{") else {}
        host.obey(told)
        if told.get("signal") == signal.SIGSTOP:  # the launcher stops too
            signal.alarm(0)
            line = _read()
    signal.alarm(0)
    return line


if __name__ == "__main__":
    main()

"""A tree of ssh: some hosts are reached from others, by programs (`hop.py`) that run there.

A `Tree` says how the programs of each host are started: from here, or by the hop of another host. A
`RemoteProcess` is such a program, used as one of `subprocess`.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.errors import EXIT_HOST_LOST
from hvdtrain.launch import hop
from hvdtrain.launch.link import AgentLink, feed, sent_program

Start = Callable[[Sequence[str]], Any]
"""Starts a command line; the result is a `subprocess.Popen` or used as one."""

_SOURCE = Path(hop.__file__).read_bytes()
_CHUNK = 1 << 18
_ALIVE = hop.HEAD.pack(0, hop.ALIVE, 0)


class RemoteProcess:
    """A program that the hop of another host has started; what is used of `subprocess.Popen`."""

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        self._send, self._over = send, threading.Event()
        self.stdin, self.returncode = self, 0
        ends = [os.pipe(), os.pipe()]
        self.stdout, self.stderr = (os.fdopen(read, "rb", buffering=0) for read, _ in ends)
        self._ends = dict(zip((hop.OUT, hop.ERR), (write for _, write in ends), strict=True))

    def write(self, data: bytes) -> None:
        """To its standard input."""
        self._send(hop.DATA, data)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Close its standard input."""
        self._send(hop.END, b"")

    def kill(self) -> None:
        """Kill it."""
        self._send(hop.KILL, b"")

    def wait(self, timeout: float) -> int:
        """Wait for its exit code; `subprocess.TimeoutExpired` at the limit."""
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired("a program on another host", timeout)
        return self.returncode

    def pass_on(self, kind: int, data: bytes) -> None:
        """Take what the hop tells of it. In the thread of the hop."""
        if kind == hop.EXIT:
            self.end(int(data))
            return
        rest = memoryview(data)
        with suppress(OSError, KeyError):  # nobody reads it any more
            while rest:
                rest = rest[os.write(self._ends[kind], rest):]

    def end(self, code: int) -> None:
        """It has ended, or is lost."""
        if not self._over.is_set():
            self.returncode = code
            self._over.set()
        while self._ends:
            os.close(self._ends.popitem()[1])


class HopLink:
    """The hop of one host, started by `start`; in use as `start_there` for programs there."""

    def __init__(self, host: str, start: Start, command: Sequence[str]) -> None:
        self.host, self.is_lost = host, False
        self._code: int | None = None  # of its end, which those started later get too
        self._process = start(command)
        self._programs: dict[int, RemoteProcess] = {}
        self._outbox: queue.Queue[bytes | None] = queue.Queue()
        self._outbox.put(_SOURCE)
        self._threads = [threading.Thread(target=target, args=words, name=f"hop-{host}",
                                          daemon=True) for target, words in (
            (feed, (self._process.stdin, self._outbox, _ALIVE)), (self._receive, ()),
            (self._read_errors, ()))]

    def start_there(self, command: Sequence[str]) -> RemoteProcess:
        """Start a program on that host. The first one tells what goes wrong with the hop."""
        number = len(self._programs)
        process = RemoteProcess(lambda kind, data: self.send(number, kind, data))
        self._programs[number] = process
        self.send(number, hop.START, json.dumps(list(command)).encode())
        if self._code is not None:
            process.end(self._code)
        if not number:
            for thread in self._threads:
                thread.start()
        return process

    def send(self, number: int, kind: int, data: bytes = b"") -> None:
        """Send a frame."""
        self._outbox.put(hop.HEAD.pack(number, kind, len(data)) + data)

    def close(self) -> None:
        """End it, and what it has started."""
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(1.0)
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # one in an uninterruptible wait stays
                self._process.wait(1.0)
        for pipe in (self._process.stdout, self._process.stderr):
            pipe.close()

    def _receive(self) -> None:
        received, seen = b"", False
        while data := _read(self._process.stdout):
            received += data
            if not seen:  # login scripts may print before it
                _, mark, rest = received.partition(hop.MARK)
                received, seen = (rest, True) if mark else (received, False)
            while seen and len(received) >= hop.HEAD.size:
                number, kind, size = hop.HEAD.unpack_from(received)
                if len(received) < hop.HEAD.size + size:
                    break
                payload = received[hop.HEAD.size:hop.HEAD.size + size]
                received = received[hop.HEAD.size + size:]
                if number in self._programs:
                    self._programs[number].pass_on(kind, payload)
        self.is_lost = True
        self._threads[-1].join(1.0)  # its last words come before the end
        code = EXIT_HOST_LOST  # as ssh's own
        with suppress(subprocess.TimeoutExpired):  # ssh's own tells why, at the start
            code = self._process.wait(1.0)
        self._code = code
        for process in list(self._programs.values()):
            process.end(code)

    def _read_errors(self) -> None:
        while data := _read(self._process.stderr):
            self._programs[0].pass_on(hop.ERR, data)


def _read(pipe: Any) -> bytes:
    try:
        return os.read(pipe.fileno(), _CHUNK)
    except BlockingIOError:
        return b""
    except (OSError, ValueError):  # closed
        return b""


def parents_of(hosts: Sequence[str], fanout: int) -> dict[str, str | None]:
    """For each host the one from which it is reached; None: from here. Parents come first. Pure."""
    parents: dict[str, str | None] = {}
    groups: list[tuple[str | None, Sequence[str]]] = [(None, hosts)]
    while groups:
        parent, rest = groups.pop(0)
        left = fanout
        while rest:
            size = -(-len(rest) // left)
            left -= 1
            parents[rest[0]] = parent
            groups.append((rest[0], rest[1:size]))
            rest = rest[size:]
    return parents


class Tree:
    """How the programs of the remote hosts are started, with at most `fanout` ssh on each host."""

    def __init__(self, hosts: Sequence[str], fanout: int, start: Start) -> None:
        self._parents, self._start = parents_of(hosts, fanout), start
        self._knots = {*self._parents.values()} - {None}
        self._hops: dict[str, HopLink] = {}

    def start(self, link: AgentLink) -> None:
        """Start the agent of a host; those of hosts that lead there were started before."""
        parent = self._parents[link.host]
        start = self._start if parent is None else self._hops[parent].start_there
        if link.host in self._knots:
            boot = sent_program("hvdtrain-hop", len(_SOURCE))
            made = self._hops[link.host] = HopLink(link.host, start, link.command_for(boot))
            link.start(made.start_there, is_there=True)
        else:
            link.start(start)

    def forget(self, host: str) -> None:
        """A host is reached from here after all."""
        self._parents.pop(host, None)

    def lost_above(self, host: str) -> str | None:
        """The hop nearest to here that is lost on the way to a host, if any."""
        found, at = None, self._parents.get(host)
        while at is not None:
            found = at if self._hops[at].is_lost else found
            at = self._parents.get(at)
        return found

    def pause(self, kind: int) -> None:
        """Tell the hops, the farthest first, that this launcher pauses or goes on."""
        for link in [*self._hops.values()][::-1]:
            link.send(0, kind)

    def close(self) -> None:
        """End the hops, the farthest first."""
        for link in [*self._hops.values()][::-1]:
            link.close()

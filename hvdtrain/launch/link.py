"""`AgentLink`: the connection to the agent of one host, over pipes or ssh.

All writing is done by a thread per link, which also gives the signs of life: a host that does not
read must not keep the launcher from the others, and a launcher that waits for its terminal must
not lose its ranks.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hvdtrain.launch.agent import MARK
from hvdtrain.launch.remote_shell import RemoteOptions, remote_command, sent_program

StartProcess = Callable[[Sequence[str]], subprocess.Popen[bytes]]

LEASE_S = 12
"""An agent that hears nothing for so long ends its ranks."""
_PING_S, _KILL_S = 3.0, 2.0
_STDERR_LINES = 5
_LARGEST_BYTES = 1 << 20
_SOURCE = Path(__file__).with_name("agent.py").read_bytes()


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What an agent says of its host."""

    clock_offset_s: float
    """What must be added to times of that host."""
    interfaces: dict[str, str]
    """Network interfaces with their IPv4 addresses."""
    own_address: str | None
    """The address from which it reaches a peer; None where no name of a peer is known there."""
    ssh_client: str | None
    """The address of this launcher as that host sees it."""
    ssh_server: str | None


class AgentLink:
    """One agent; `process` is None until `start`."""

    def __init__(self, host: str, peers: Sequence[str], remote: RemoteOptions | None) -> None:
        """Prepare a link.

        Args:
            host: String, the host.
            peers: Other hosts, to the first of which that one must find a way.
            remote: How to reach it; None for this host.
        """
        self.host = host
        self.facts: HostFacts | None = None
        self.last_words: deque[str] = deque(maxlen=_STDERR_LINES)
        """The last lines that ssh, or the agent, wrote to standard error."""
        self._hello = json.dumps({"peers": list(peers)}).encode() + b"\n"
        self._remote = remote
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: queue.Queue[bytes | None] = queue.Queue()
        self._received = b""
        self._sender: threading.Thread | None = None

    @property
    def is_local(self) -> bool:
        """Whether the agent runs on this host."""
        return self._remote is None

    def start(self, start: StartProcess) -> None:
        """Start the agent. Its facts come with the first messages that are read."""
        boot = sent_program("hvdtrain-agent", len(_SOURCE))
        command = boot if self._remote is None else remote_command(self.host, boot, self._remote)
        self._received = b""
        self._outbox = queue.Queue()
        self._process = start(command)
        # A connection that ssh shares (ControlPersist) keeps the pipe open beyond its end.
        os.set_blocking(self.stderr_fileno(), False)
        self._outbox.put(_SOURCE + self._hello)
        self._sender = threading.Thread(target=_feed, args=(self._process, self._outbox),
                                        name=f"to-{self.host}", daemon=True)
        self._sender.start()

    def fileno(self) -> int:
        """For `selectors`: where messages come from."""
        return self._stream("stdout").fileno()

    def stderr_fileno(self) -> int:
        """For `selectors`: where ssh says what is wrong."""
        return self._stream("stderr").fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a control message."""
        self._outbox.put(json.dumps(message).encode() + b"\n")

    def send_work(self, work: dict[str, Any]) -> None:
        """Send what is to be done, once."""
        data = json.dumps(work).encode()
        self._outbox.put(b"%d\n%s" % (len(data), data))

    def read(self) -> list[tuple[dict[str, Any], bytes]] | None:
        """What has arrived: messages with their payloads. None at the end of the stream."""
        data = os.read(self.fileno(), 1 << 18)
        if not data:
            return None
        self._received += data
        try:
            return list(self._messages())
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self.last_words.append(f"it sent what no agent sends ({type(error).__name__}: {error})")
            return None

    def read_stderr(self) -> list[str] | None:
        """The lines that were written to standard error; None when there are no more."""
        try:
            data = os.read(self.stderr_fileno(), 1 << 16)
        except BlockingIOError:
            return None
        text = data.decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        self.last_words.extend(lines)
        return lines if data else None

    def close(self) -> None:
        """Close its input, which makes the agent end whatever is left."""
        self._outbox.put(None)

    def reap(self, limit_s: float) -> int | None:
        """Wait for the end of the process, kill it at the limit, give its exit code."""
        if self._process is None:
            return None
        self._outbox.put(None)
        try:
            self._process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # one in an uninterruptible wait stays
                self._process.wait(_KILL_S)
        if self._sender is not None:
            self._sender.join()
        while self.read_stderr() is not None:
            pass
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        code, self._process = self._process.returncode, None
        return code

    def _messages(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        buffer, start = self._received, 0
        while (end := buffer.find(b"\n", start)) >= 0:
            if self.facts is None:  # whatever a login script prints comes first
                self._take_facts(buffer[start:end])
                start = end + 1
                continue
            message = json.loads(buffer[start:end])
            size = message.get("size", 0)
            if not (type(size) is int and 0 <= size <= _LARGEST_BYTES):
                raise ValueError(f"a size of {size!r}")
            rest = end + 1 + size
            if len(buffer) < rest:
                break
            yield message, buffer[end + 1:rest]
            start = rest
        self._received = buffer[start:]
        if len(self._received) > _LARGEST_BYTES:
            raise ValueError(f"{len(self._received)} bytes without an end")

    def _take_facts(self, line: bytes) -> None:
        _, mark, text = line.partition(MARK)
        if not mark:
            return
        told = json.loads(text)
        offset_s = time.time() - told.pop("time")
        self.facts = HostFacts(clock_offset_s=0.0 if self.is_local else offset_s, **told)

    def _stream(self, name: str) -> IO[bytes]:
        stream: IO[bytes] | None = getattr(self._process, name, None)
        if stream is None:
            raise RuntimeError(f"the agent of {self.host} has no {name}")
        return stream


def _feed(process: subprocess.Popen[bytes], outbox: queue.Queue[bytes | None]) -> None:
    """Thread: write what is in the outbox, and signs of life between."""
    pipe = process.stdin
    if pipe is None:
        return
    with suppress(OSError, ValueError):  # the end of the agent is seen on its output
        while True:
            try:
                data = outbox.get(timeout=_PING_S)
            except queue.Empty:
                data = b"{}\n"
            if data is None:
                break
            pipe.write(data)
            pipe.flush()
    with suppress(OSError):
        pipe.close()

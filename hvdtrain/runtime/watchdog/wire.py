"""JSON lines over a TCP connection, without ever blocking, and a clock for both ends."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from typing import Any

_LARGEST_MESSAGE = 1 << 16
_CHUNK = 1 << 16


class Wire:
    """One connection. Only the thread of the watchdog uses it.

    Args:
        connection: A connected socket, which it takes over.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._received = b""
        self._unsent = b""
        self.closed = False

    def fileno(self) -> int:
        """For `selectors`."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send as much as the connection takes; a peer that reads nothing misses messages."""
        if not self.closed and len(self._unsent) < _LARGEST_MESSAGE:
            self._unsent += json.dumps(message).encode() + b"\n"
        try:
            while self._unsent and not self.closed:
                self._unsent = self._unsent[self._socket.send(self._unsent):]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""  # `receive` sees the end

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come whole. Sets `closed` when the peer has gone."""
        try:
            while not self.closed:
                data = self._socket.recv(_CHUNK)
                self._received += data
                if not data:
                    self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > _LARGEST_MESSAGE:
            self.close()
        return [message for line in lines if isinstance(message := _parsed(line), dict)]

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self._socket.close()


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


class AwakeClock:
    """Seconds during which this thread ran.

    A process that was stopped (Ctrl-Z, a scheduler that suspends jobs) has heard nothing for
    long when it goes on, and so have all others: that time does not count.
    """

    def __init__(self) -> None:
        self._seen = time.monotonic()
        self._now = 0.0

    def now(self, longest_step_s: float) -> float:
        """The time; to be asked at least every `longest_step_s` seconds."""
        seen = time.monotonic()
        self._now += min(seen - self._seen, longest_step_s)
        self._seen = seen
        return self._now

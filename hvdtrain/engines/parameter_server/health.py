"""Whether the process of a role still answers, asked from outside of it.

A process that is stopped, or whose network threads hang, keeps its connections: TensorFlow then
waits for ever. A gRPC server greets every new connection with an HTTP/2 SETTINGS frame (RFC 9113,
3.4), by which its threads are seen to run, however busy the process computes.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

from hvdtrain.engines.parameter_server.roles import Assignment

_EVERY_S, _ANSWER_S = 2.0, 1.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HEADER_BYTES, _SETTINGS = 9, 4


class Health:
    """Watches one process.

    Args:
        assignment: Its role.
        hang_s: Float; it counts as frozen after half of this, before the chief, which waits for
            it, counts as hung. 0: never.
    """

    def __init__(self, assignment: Assignment, hang_s: float) -> None:
        own = assignment.cluster.get(assignment.role.kind, ())
        self._address = own[assignment.role.index] if own else ""
        self._limit_s = hang_s / 2
        self._next_s = 0.0
        self._well_s = time.monotonic()
        self._served = False

    def is_frozen(self, pid: int) -> bool:
        """Whether it has not answered for too long. Cheap; asks at most every two seconds."""
        now = time.monotonic()
        if not self._limit_s or now < self._next_s:
            return False
        self._next_s = now + _EVERY_S
        answers = greets(self._address) if self._address else False
        self._served = self._served or answers
        # Until it has served once it may still be loading its libraries.
        if (answers or not self._served) and not is_stopped(pid):
            self._well_s = now
        return now - self._well_s > self._limit_s


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal. Linux."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def greets(address: str) -> bool:
    """Whether a gRPC server at `HOST:PORT` greets a new connection within a second."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_S) as connection:
            connection.settimeout(_ANSWER_S)
            connection.sendall(_PREFACE)
            header = connection.recv(_HEADER_BYTES, socket.MSG_WAITALL)
            return len(header) == _HEADER_BYTES and header[3] == _SETTINGS
    except OSError:
        return False

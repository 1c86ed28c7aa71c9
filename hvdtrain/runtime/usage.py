"""What this process uses: processor time, memory, and the bytes of its own TCP connections.

`hvdtrain compare` sets `HVDTRAIN_USAGE` to a folder; each process of a job then appends a line of
JSON five times a second to a file of its own there. Bytes are those that TCP has delivered, read
from the kernel socket by socket, so that no privilege is needed and other processes do not count.
Connections within the host count; shared memory does not show. Linux only.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import socket
import stat
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

USAGE_VARIABLE = "HVDTRAIN_USAGE"
INTERVAL_S = 0.2

_FILES = Path("/proc/self/fd")
_MEMORY = Path("/proc/self/statm")
_LIBC = ctypes.CDLL(None)
_MIB = 1 << 20
_LISTENING = 10
_TCP_INFO_BYTES = 136
# struct tcp_info of linux/tcp.h: the state is the first byte; bytes_acked and bytes_received are
# the third and fourth of the 64-bit counters, which begin at byte 104.
_BYTES_AT = 120


class Usage:
    """Writes the lines, from a thread of its own. Any process; see `start_usage`.

    Args:
        path: Path of the file; an existing one is continued.
        interval_s: Float, seconds between two lines.
    """

    def __init__(self, path: Path, *, interval_s: float = INTERVAL_S) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("a", encoding="utf-8")
        self._interval_s = interval_s
        self._connections = Connections()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="hvdtrain-usage", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write a last line and close the file."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join()
        with suppress(OSError):
            self._write()
        self._stream.close()

    def _repeat(self) -> None:
        while not self._stopped.is_set():
            try:
                self._write()
            except OSError:
                return  # a full disk must not end the training; the report has no data then
            self._stopped.wait(self._interval_s)

    def _write(self) -> None:
        sent, received = self._connections.totals()
        used = resource.getrusage(resource.RUSAGE_SELF)
        line = {"time_s": round(time.time(), 4), "cpu_s": round(used.ru_utime + used.ru_stime, 4),
                "rss_mb": round(_resident_bytes() / _MIB, 2), "bytes_sent": sent,
                "bytes_received": received}
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()


class Connections:
    """The TCP connections of this process, with the last counters of those that were closed."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def totals(self) -> tuple[int, int]:
        """Bytes sent (as acknowledged by the other side) and received, over all connections.

        What a connection moved after the last call before it was closed is not counted.
        """
        for name in os.listdir(_FILES):
            with suppress(OSError):
                self._look(int(name))
        return (sum(sent for sent, _ in self._seen.values()),
                sum(received for _, received in self._seen.values()))

    def _look(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode):
            return
        info = _tcp_info(descriptor)
        if info is not None and info[0] != _LISTENING:
            sent, received = struct.unpack_from("=QQ", info, _BYTES_AT)
            self._seen[status.st_ino] = (sent, received)


def _tcp_info(descriptor: int) -> bytes | None:
    """The kernel's `tcp_info` of a socket; None for one that is not of TCP.

    By the C function: a Python socket object would change or close a descriptor that belongs to
    others.
    """
    buffer = ctypes.create_string_buffer(_TCP_INFO_BYTES)
    length = ctypes.c_uint32(_TCP_INFO_BYTES)
    failed = _LIBC.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, buffer,
                              ctypes.byref(length))
    return None if failed or length.value < _TCP_INFO_BYTES else buffer.raw


def _resident_bytes() -> int:
    pages = int(_MEMORY.read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def start_usage(role: str, environ: Mapping[str, str]) -> Usage | None:
    """Begin to write this process's use of the machine, where that was asked for.

    Called once by each process of a job, before it opens connections.

    Args:
        role: String, the name of the process in the job and of its file: `rank3`, `chief`,
            `worker0`, `server1`.
        environ: The environment; nothing is done where it holds no `HVDTRAIN_USAGE`.

    Returns:
        What writes, for callers that end it themselves (it ends with the process); or None.
    """
    folder = environ.get(USAGE_VARIABLE)
    if not folder:
        return None
    usage = Usage(Path(folder) / f"{role}.jsonl")
    atexit.register(usage.stop)
    return usage

"""What this process uses: processor time, memory, and the bytes of its own TCP connections.

`hvdtrain compare` sets `HVDTRAIN_USAGE` to a folder, where each process of a job appends a line of
JSON to its own file five times a second. Bytes are those that TCP has delivered, read from the
kernel per socket, which needs no privilege and leaves out other processes. Connections within the
host count, shared memory does not. Linux only.
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

_LIBC = ctypes.CDLL(None)
_LISTENING = 10
_TCP_INFO_BYTES = 136
# struct tcp_info of linux/tcp.h: the state is the first byte; bytes_acked and bytes_received are
# the third and fourth of the 64-bit counters, which begin at byte 104.
_BYTES_AT = 120


class Usage:
    """Writes the lines from a thread; an existing file is continued."""

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
        with suppress(OSError):  # a full disk must not end the training
            while not self._stopped.is_set():
                self._write()
                self._stopped.wait(self._interval_s)

    def _write(self) -> None:
        sent, received = self._connections.totals()
        used = resource.getrusage(resource.RUSAGE_SELF)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        line = {"time_s": round(time.time(), 4), "cpu_s": round(used.ru_utime + used.ru_stime, 4),
                "rss_mb": round(pages * resource.getpagesize() / (1 << 20), 2),
                "bytes_sent": sent, "bytes_received": received}
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()


class Connections:
    """The TCP connections of this process, with the last counters of closed ones."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def totals(self) -> tuple[int, int]:
        """Bytes sent (as acknowledged) and received, but not between the last call and a close."""
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                self._look(int(name))
        return (sum(sent for sent, _ in self._seen.values()),
                sum(received for _, received in self._seen.values()))

    def _look(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode):
            return
        # By the C function: a Python socket would change or close a descriptor of others.
        info = ctypes.create_string_buffer(_TCP_INFO_BYTES)
        length = ctypes.c_uint32(_TCP_INFO_BYTES)
        failed = _LIBC.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info,
                                  ctypes.byref(length))
        if not failed and length.value == _TCP_INFO_BYTES and info.raw[0] != _LISTENING:
            sent, received = struct.unpack_from("=QQ", info.raw, _BYTES_AT)
            self._seen[status.st_ino] = (sent, received)


def start_usage(role: str, environ: Mapping[str, str]) -> Usage | None:
    """Record this process's use until it ends, if `HVDTRAIN_USAGE` is set; before any connection.

    `role` is its name in the job: `rank3`, `chief`, `worker0`, `server1`.
    """
    folder = environ.get(USAGE_VARIABLE)
    if not folder:
        return None
    usage = Usage(Path(folder) / f"{role}.jsonl")
    atexit.register(usage.stop)
    return usage

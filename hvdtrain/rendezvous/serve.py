"""Starts the rendezvous (`server.py`) as a child process: for the launcher, and for rank 0."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hvdtrain.fork import Fork, can_fork
from hvdtrain.rendezvous import server
from hvdtrain.rendezvous.secret import JobKey

_PROGRAM = ("import sys; sys.path.append({place!r}); "
            "from hvdtrain.rendezvous.server import main; main({descriptors})")
_PLACE = str(Path(__file__).resolve().parents[2])
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class RendezvousServer:
    """A running rendezvous, with its `ports` by address. Ends with `close` or this process."""

    ports: dict[str, int]
    process: subprocess.Popen[bytes] | Fork

    @property
    def port(self) -> int:
        """The port at its first address."""
        return next(iter(self.ports.values()))

    def close(self) -> None:
        """Kill it; it has nothing to save."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def listen_on_all(addresses: Iterable[str], port: int = 0) -> list[socket.socket]:
    """Listening sockets at some addresses of this host; OSError where the port is taken."""
    with ExitStack() as opened:
        made = [opened.enter_context(socket.create_server((address, port), backlog=1024))
                for address in dict.fromkeys(addresses)]
        opened.pop_all()
    return made


def serve(listeners: Sequence[socket.socket], *, hosts: Sequence[str], slots: Sequence[int],
          key: JobKey, sources: Sequence[str] = (), names: Sequence[str] = (),
          who: str = "", forks: bool = False) -> RendezvousServer:
    """Start the rendezvous on listening sockets (of `listen_on_all`), which it takes over.

    `hosts` are host names as the ranks know them (HOROVOD_HOSTNAME), with `slots` ranks on each.
    Requests are accepted from `sources` (addresses and networks), `names` (resolved), loopback and
    the listening addresses only. `who` is the text for a rank of another job that connects. With
    `forks` it is a fork of this process where that is possible.
    """
    ports = {str(listener.getsockname()[0]): int(listener.getsockname()[1])
             for listener in listeners}
    order = {"key": key.key.hex(), "capability": key.capability, "sizes": scope_sizes(hosts, slots),
             "sources": [_LOOPBACK, *ports, *sources], "names": list(names),
             "who": {"host": socket.gethostname(), "pid": os.getpid(), "job": who}}
    descriptors = [listener.fileno() for listener in listeners]
    process: subprocess.Popen[bytes] | Fork
    try:
        if forks and can_fork():
            process = Fork(partial(server.main, descriptors), name="hvdtrain-server",
                           keep=descriptors)
        else:
            # -I -S: neither the user's PYTHONPATH nor site-packages can slow or break it.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM.format(
                    place=_PLACE, descriptors=descriptors)],
                stdin=subprocess.PIPE, pass_fds=descriptors, start_new_session=True)
    finally:
        for listener in listeners:
            listener.close()
    if process.stdin is not None:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
    return RendezvousServer(ports=ports, process=process)


def scope_sizes(hosts: Sequence[str], slots: Sequence[int]) -> dict[str, int]:
    """The number of members in each scope that Horovod's Gloo context uses."""
    local = {f"local_{host}": count for host, count in zip(hosts, slots, strict=True)}
    cross = {f"cross_{rank}": sum(count > rank for count in slots) for rank in range(max(slots))}
    return {"global": sum(slots)} | local | cross


def gloo_variables(*, address: str, port: int, interface: str, key: JobKey) -> dict[str, str]:
    """The variables by which Horovod uses Gloo through the rendezvous at `address`."""
    # Horovod's client makes its requests from `http://ADDRESS:PORT/SCOPE/KEY`, so that an address
    # with a path brings the capability to each of them.
    return {
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{address}:{port}/{key.capability}",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}

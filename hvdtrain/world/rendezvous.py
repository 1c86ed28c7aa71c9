"""Starts the Gloo rendezvous (`rendezvous_server.py`) as a child process.

Used by the launcher, for the ranks it starts, and by rank 0 where a starter prepared none.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.world.secret import JobKey

_PROGRAM = Path(__file__).with_name("rendezvous_server.py")
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class RendezvousServer:
    """A running rendezvous. It ends with `close`, and with this process however that ends."""

    ports: dict[str, int]
    """The port at each address on which it listens."""
    process: subprocess.Popen[bytes]

    @property
    def port(self) -> int:
        """The port at its first address."""
        return next(iter(self.ports.values()))

    def close(self) -> None:
        """End it; it holds nothing that is worth an orderly end."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def listen(address: str, port: int = 0) -> socket.socket:
    """A listening IPv4 socket; port 0 takes any free one.

    Raises:
        OSError: The port is taken.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def listen_on_all(addresses: Iterable[str], port: int = 0) -> list[socket.socket]:
    """Listening sockets at some addresses of this host, each address once.

    Raises:
        OSError: The port is taken at one of them; then there is a socket at none.
    """
    made: list[socket.socket] = []
    try:
        for address in dict.fromkeys(addresses):
            made.append(listen(address, port))
    except OSError:
        for listener in made:
            listener.close()
        raise
    return made


def serve(listeners: Sequence[socket.socket], *, hosts: Sequence[str], slots: Sequence[int],
          key: JobKey, sources: Sequence[str] = (), names: Sequence[str] = (),
          who: str = "") -> RendezvousServer:
    """Start the rendezvous on listening sockets, which it takes over.

    Args:
        listeners: From `listen_on_all`; each at an address of its own.
        hosts: Host names as the ranks know them (HOROVOD_HOSTNAME).
        slots: Number of ranks on each of `hosts`.
        key: Of the job.
        sources: Addresses and networks of the job's hosts, beside the loopback address and the
            addresses at which it listens. Requests from others are refused.
        names: Names of the job's hosts, whose addresses are taken as well.
        who: String, tells a rank of another job whom it has met.
    """
    ports = {str(listener.getsockname()[0]): int(listener.getsockname()[1])
             for listener in listeners}
    order = {"key": key.key.hex(), "capability": key.capability, "sizes": scope_sizes(hosts, slots),
             "sources": [_LOOPBACK, *ports, *sources], "names": list(names),
             "who": {"host": socket.gethostname(), "pid": os.getpid(), "job": who}}
    descriptors = [listener.fileno() for listener in listeners]
    try:
        # -I -S: neither the user's PYTHONPATH nor site-packages can slow or break it.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), *map(str, descriptors)],
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
    sizes = {"global": sum(slots)}
    sizes |= {f"local_{host}": count for host, count in zip(hosts, slots, strict=True)}
    sizes |= {f"cross_{local}": sum(count > local for count in slots)
              for local in range(max(slots))}
    return sizes


def gloo_variables(*, address: str, port: int, interface: str, key: JobKey) -> dict[str, str]:
    """The variables by which Horovod uses Gloo through the rendezvous at `address`.

    Horovod's client makes its requests from `http://ADDRESS:PORT/SCOPE/KEY`, so that an address
    with a path brings the capability to each of them.
    """
    return {
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{address}:{port}/{key.capability}",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}


def rendezvous_place(address: str, port: str) -> tuple[str, int, str]:
    """Address, port and capability from Horovod's two variables; "" for a foreign rendezvous."""
    place, _, capability = address.partition("/")
    return place.partition(":")[0], int(port), capability

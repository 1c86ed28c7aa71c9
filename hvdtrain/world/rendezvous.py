"""Starts the Gloo rendezvous (`rendezvous_server.py`) as a child process.

Used by the launcher, for the ranks it starts, and by rank 0 where a starter prepared none.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PROGRAM = Path(__file__).with_name("rendezvous_server.py")


@dataclass(frozen=True, kw_only=True)
class RendezvousServer:
    """A running rendezvous. It ends with `close`, and with this process however that ends."""

    port: int
    process: subprocess.Popen[bytes]

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


def serve(listener: socket.socket, *, hosts: Sequence[str], slots: Sequence[int],
          token: str = "") -> RendezvousServer:
    """Start the rendezvous on a listening socket, which it takes over.

    Args:
        listener: The socket from `listen`.
        hosts: Host names as the ranks know them (HOROVOD_HOSTNAME).
        slots: Number of ranks on each of `hosts`.
        token: String by which clients tell it from a stranger's server. Default: none.
    """
    port = listener.getsockname()[1]
    with listener:
        # -I -S: neither the user's PYTHONPATH nor site-packages can slow or break it.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), str(listener.fileno()), token,
             json.dumps(scope_sizes(hosts, slots))],
            stdin=subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True)
    return RendezvousServer(port=port, process=process)


def scope_sizes(hosts: Sequence[str], slots: Sequence[int]) -> dict[str, int]:
    """The number of members in each scope that Horovod's Gloo context uses."""
    sizes = {"global": sum(slots)}
    sizes |= {f"local_{host}": count for host, count in zip(hosts, slots, strict=True)}
    sizes |= {f"cross_{local}": sum(count > local for count in slots)
              for local in range(max(slots))}
    return sizes


def gloo_variables(*, address: str, port: int, interface: str) -> dict[str, str]:
    """The variables by which Horovod uses Gloo through the rendezvous at `address`."""
    return {
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interface, "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}

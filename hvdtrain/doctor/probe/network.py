"""Interfaces of this host, a port that answers, and connections to the ports of others."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from hvdtrain.doctor.facts import NetworkFacts
from hvdtrain.world.network import interfaces, route_to

_CONNECT_LIMIT_S = 5.0


class Listener:
    """Answers on a free port with a word that only this run knows."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind(("", 0))
        self._socket.listen(1024)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._socket.accept()
            with client, suppress(OSError):
                client.sendall(self._token)


def look_at_network(environ: Mapping[str, str], peers: Sequence[str], port: int) -> NetworkFacts:
    """Interfaces, and the addresses by which launcher, peers and this host see each other.

    Args:
        environ: Environment of this process; ssh tells its connection in it.
        peers: Names of other hosts; the first that is known here shows the way.
        port: Where the listener of this probe is.
    """
    own_address = None
    for peer in peers:
        with suppress(OSError):  # the name is not known here, or there is no way
            own_address = route_to(peer).own_address
            break
    connection = environ.get("SSH_CONNECTION", "").split()
    return NetworkFacts(
        interfaces=interfaces(), own_address=own_address, port=port,
        ssh_client=connection[0] if connection else None,
        ssh_server=connection[2] if len(connection) > 2 else None)


def connect_all(targets: Sequence[Mapping[str, Any]], token: str) -> dict[str, str]:
    """For each target "" if it answered, else why not. All at the same time."""
    with ThreadPoolExecutor(max_workers=max(1, len(targets))) as pool:
        results = pool.map(lambda target: _connect(target["address"], target["port"], token),
                           targets)
    return {target["host"]: result for target, result in zip(targets, results, strict=True)}


def _connect(address: str, port: int, token: str) -> str:
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_LIMIT_S) as connection:
            said = b""
            while len(said) < len(token) and (data := connection.recv(256)):
                said += data
    except TimeoutError:
        return f"no answer from {address} in {_CONNECT_LIMIT_S:g} s"
    except OSError as error:
        return f"{address}: {os.strerror(error.errno) if error.errno else error}"
    return "" if said.decode(errors="replace") == token else f"{address} is answered by another"

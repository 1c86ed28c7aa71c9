"""A relay of the rendezvous in a rank, while Horovod's Gloo connects the ranks.

Horovod connects the ranks in four groups or more, and in each its client asks for every peer two or
three times, and gets what that peer has told *all* ranks, 136 bytes for each: of N ranks, one on a
host, the one rendezvous gets 10 N^2 requests, and sends 1000 N^3 bytes. The relay asks once in each
group for what all peers have told this rank, and answers Horovod from that.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from hvdtrain.errors import WorldError
from hvdtrain.rendezvous.client import RendezvousClient
from hvdtrain.rendezvous.serve import listen_on_all, scope_sizes
from hvdtrain.rendezvous.server import Server
from hvdtrain.rendezvous.store import PEERS, KeyValueStore
from hvdtrain.world import World

_LOOPBACK = "127.0.0.1"
_LEAVE_S = 3.0
_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"


class PeersStore(KeyValueStore):
    """The values of another rendezvous, as one rank's Horovod asks for them."""

    def __init__(self, client: RendezvousClient, sizes: dict[str, int]) -> None:
        super().__init__(sizes, b"")
        self._client = client
        self._own: dict[str, tuple[int, int]] = {}  # this rank's number, and that of its peers
        self._parts: dict[str, bytes] = {}
        self._part_bytes = 0  # what a rank tells one peer

    def get(self, scope: str, name: str) -> bytes | None:
        """What a peer has told; only the part for this rank is right."""
        if name.startswith("rank_"):
            return None  # Gloo counts the ranks of its host, and uses the number nowhere
        if scope not in self._own or not name.isdigit():
            return self._ask(scope, name)
        rank, peers = self._own[scope]
        if scope not in self._parts:
            # In time for Horovod's own limit it says that the peers are not there yet.
            parts = self._ask(scope, f"{PEERS}{rank}.{peers + 1}?wait")
            if parts is None:
                return None
            self._parts[scope] = parts
        parts, other = self._parts[scope], int(name)
        if not parts:  # not in parts of one size
            return self._ask(scope, name)
        size, place = len(parts) // peers, other - (other > rank)
        part = parts[place * size:(place + 1) * size]
        before = (rank - (rank > other)) * size
        return bytes(before) + part + bytes(len(parts) - before - size)

    def put(self, scope: str, name: str, value: bytes) -> int:
        """What this rank tells its peers."""
        if name.startswith("rank_"):
            return 200
        # The groups of Horovod's process sets have sizes that only what is told shows.
        if not self._part_bytes and self._sizes.get(scope, 1) > 1:
            self._part_bytes = len(value) // (self._sizes[scope] - 1)
        if self._part_bytes and name.isdigit():
            self._own[scope] = int(name), len(value) // self._part_bytes
        return self._forward("PUT", scope, name, value)[0]

    def delete(self, scope: str, name: str) -> int:
        """Horovod has connected the ranks of a scope."""
        self._parts.pop(scope, None)
        self._own.pop(scope, None)
        return self._forward("DELETE", scope, name)[0]

    def _ask(self, scope: str, name: str) -> bytes | None:
        status, content = self._forward("GET", scope, name)
        return content if status == 200 else None

    def _forward(self, method: str, scope: str, name: str,
                 value: bytes | None = None) -> tuple[int, bytes]:
        try:
            return self._client.in_scope(scope).forward(method, name, value)
        except WorldError:
            return 503, b""  # Horovod tries again, and then raises


@contextmanager
def relayed(world: World, environ: MutableMapping[str, str]) -> Iterator[None]:
    """While entered, Horovod finds its rendezvous in this process. Each rank, around `hvd.init()`.

    `environ` is that of this process. Nothing happens for one rank, and for a rendezvous that is
    not our own (horovodrun's).
    """
    client = RendezvousClient.of(environ, "")
    key = None if client is None else client.job
    if world.size == 1 or client is None or key is None:
        yield
        return
    sizes = scope_sizes(world.hosts, world.slots)
    [listener] = listen_on_all([_LOOPBACK])
    port = int(listener.getsockname()[1])
    server = Server([listener], {
        "key": key.key.hex(), "capability": key.capability, "who": {}, "sizes": sizes,
        "sources": [_LOOPBACK], "names": []}, PeersStore(client, sizes))
    control, watched = socket.socketpair()
    thread = threading.Thread(target=server.serve, args=(os.getppid(), watched.fileno()),
                              name="hvdtrain-relay", daemon=True)
    thread.start()
    former = {name: environ[name] for name in (_ADDRESS, _PORT)}
    environ.update({_ADDRESS: f"{_LOOPBACK}:{port}/{key.capability}", _PORT: str(port)})
    try:
        yield
    finally:
        environ.update(former)
        control.close()
        thread.join(_LEAVE_S)
        if not thread.is_alive():  # else it waits for a rendezvous that does not answer
            server.close()
            watched.close()

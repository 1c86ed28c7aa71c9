"""Program: the key-value store over HTTP at which Horovod's Gloo ranks find each other.

It serves what the C++ side of Horovod 0.28 expects: PUT, GET and DELETE of /scope/key, 404 for a
key that is not there yet. A DELETE by every member of a scope empties the scope, so that
`hvd.shutdown()` and `hvd.init()` work again. Standard library only and a process of its own: it
starts in 70 ms, and a rank that is loading TensorFlow (which holds the GIL for seconds) does not
delay it. Within a rank it serves `relay.py`.

Permissions (docs/security.md):

- A connection from an address that no host of the job has is closed before anything is read.
- Each path begins with a capability, a text that only ranks of the job know. Horovod's client
  sends no signature, but sends the capability as part of the address that it was given.
- In the scopes of Horovod only the keys of its members can be set, once, and up to a size.
- In the scopes of hvdtrain a value must be sealed: signed with the secret of the job, together
  with its path.
- `/hvdtrain/identity/NONCE` needs no capability: the answer is signed, so that a rank can
  recognize this server before it sends the capability there.

What keeps the requests of N ranks at a multiple of N, where Horovod's own client makes 10 N^2:

- GET of /scope/key?wait is answered when the key is there, or by 404 after some seconds.
- GET of /scope/peers.R.SIZE?wait in a scope of Horovod likewise, when all members are there: what
  they have told member R.

`main` gets descriptors of listening sockets. The first line of standard input is an order as JSON;
nothing secret is on the command line. Ends when its standard input closes or its parent is gone.
"""

import hmac
import ipaddress
import json
import os
import re
import resource
import selectors
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from hvdtrain.rendezvous.store import PEERS, KeyValueStore, mac

IDENTITY_PATH = "/hvdtrain/identity/"
_NONCE = re.compile(r"[0-9a-f]{16,64}")
_LENGTH = re.compile(r"\d{1,9}")
_HEAD_BYTES, _CHUNK = 8192, 65536
_REQUEST_S, _CHECK_S, _RESOLVE_S, _HOLD_S = 10.0, 1.0, 2.0, 5.0
_WAITS, _HELD = "?wait", 202
_TELL_AFTER_S, _MOST_REFUSED = 5.0, 64


class Hosts:
    """The addresses from which requests are accepted."""
    # A thread resolves names: those of new pods are known late, and may change.

    def __init__(self, sources: list[str], names: list[str]) -> None:
        # Most are single addresses, of which a large job has thousands.
        self._single = {item for item in sources if "/" not in item}
        self._networks = [ipaddress.ip_network(item, strict=False) for item in sources
                          if "/" in item]
        self._names = names
        self._resolved: set[str] = set()
        self._asked = threading.Event()
        self._refused: dict[str, float] = {}
        if names:
            threading.Thread(target=self._resolve, daemon=True).start()

    def has(self, address: str) -> bool:
        """Whether a host of the job has this address, as far as known now."""
        if address in self._single or address in self._resolved or any(
                ipaddress.ip_address(address) in network for network in self._networks):
            return True
        self._asked.set()
        return False

    def refuse(self, address: str) -> None:
        """Note that a connection was refused; one that keeps coming is reported, once."""
        now = time.monotonic()
        if len(self._refused) < _MOST_REFUSED:
            self._refused.setdefault(address, now)
        if now - self._refused.get(address, now) > _TELL_AFTER_S:
            self._refused[address] = float("inf")
            with suppress(OSError):
                os.write(2, (f"hvdtrain rendezvous: connections from {address} are refused: no "
                             "host of this job is known to have that address. If one has it, "
                             "name its network in --network-interface.\n").encode())

    def _resolve(self) -> None:
        while True:
            found: set[str] = set()
            for name in self._names:
                with suppress(OSError):
                    found |= {str(entry[4][0]) for entry in socket.getaddrinfo(
                        name, None, socket.AF_INET, socket.SOCK_STREAM)}
            self._resolved = found
            time.sleep(_RESOLVE_S)
            self._asked.wait()
            self._asked.clear()


class Connection:
    """One connection: one request, one answer."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.since = time.monotonic()
        self.awaits: tuple[str, str] | None = None  # scope and key
        self._received = b""
        self._unsent = b""

    def read(self, server: "Server") -> bool:
        """Read what has come; returns whether the request was answered or has failed."""
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        self._received += data
        if self.awaits is not None:
            return not data
        answer = server.answer(self._received)
        if answer is None:
            return not data
        status, body = answer
        if status == _HELD:
            server.hold(self, *body.decode().split("/"))
            return False
        return self.reply(status, body)

    def reply(self, status: int, body: bytes) -> bool:
        """Send the answer; returns whether that was all."""
        self._unsent = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
            status, len(body), body)
        return self.write()

    def write(self) -> bool:
        """Send what can be sent; returns whether that was all."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent):]
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    @property
    def answers(self) -> bool:
        """Whether there is something left to send."""
        return bool(self._unsent)


class Server:
    """Serves on some listening sockets, in one thread and with a limited number of connections."""

    def __init__(self, listeners: list[socket.socket], order: dict[str, Any],
                 store: KeyValueStore | None = None) -> None:
        self._key = bytes.fromhex(order["key"])
        self._prefix = f"/{order['capability']}".encode()
        self._who = json.dumps(order["who"])
        self._store = store or KeyValueStore(order["sizes"], self._key)
        self._hosts = Hosts(order["sources"], order["names"])
        self._most = 256 + 4 * order["sizes"].get("global", 1)
        self._open: dict[Connection, None] = {}
        self._held: dict[tuple[str, str], list[Connection]] = {}
        self._selector = selectors.DefaultSelector()
        self._listeners = listeners
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def serve(self, parent: int, control: int = 0) -> None:
        """Serve until `control` (standard input) closes or the parent is another process."""
        # The parent is checked as well: a forked child of it (a data loader) keeps the pipe open.
        self._selector.register(control, selectors.EVENT_READ)
        checked = time.monotonic()
        while True:
            for key, _ in self._selector.select(_CHECK_S):
                if key.fileobj == control:
                    if not os.read(control, 4096):
                        return
                elif isinstance(key.data, Connection):
                    self._go_on(key.data)
                else:
                    self._accept(key.fileobj)
            if time.monotonic() - checked > _CHECK_S:
                checked = time.monotonic()
                if os.getppid() != parent:
                    return
                for connection in list(self._open):
                    if checked - connection.since > _REQUEST_S:
                        self._close(connection)
                    elif connection.awaits and checked - connection.since > _HOLD_S:
                        self._release(connection, 404, b"")

    def close(self) -> None:
        """Close all sockets, after `serve`."""
        for connection in list(self._open):
            self._close(connection)
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def _accept(self, listener: Any) -> None:
        try:
            connection, address = listener.accept()
        except OSError:  # gone again, or no descriptor is left
            self._close_oldest()
            return
        if not self._hosts.has(address[0]):
            connection.close()
            self._hosts.refuse(address[0])
            return
        if len(self._open) >= self._most:
            self._close_oldest()
        made = Connection(connection)
        self._open[made] = None
        self._selector.register(connection, selectors.EVENT_READ, made)

    def hold(self, connection: Connection, scope: str, key: str) -> None:
        """Answer a connection later, when a key is there."""
        connection.awaits = scope, key
        self._held.setdefault(_place_of(scope, key), []).append(connection)

    def _tell(self, scope: str, key: str) -> None:
        """Answer those for whom a new key has been the last that they need."""
        for place in (_place_of(scope, key), _place_of(scope, PEERS)):
            for connection in list(self._held.get(place, ())):
                value = self._store.get(*connection.awaits or place)
                if value is None:
                    break  # for all of them
                self._release(connection, 200, value)

    def _release(self, connection: Connection, status: int, body: bytes) -> None:
        self._let_go(connection)
        self._end(connection, done=connection.reply(status, body))

    def _let_go(self, connection: Connection) -> None:
        if connection.awaits is not None:
            place, connection.awaits = _place_of(*connection.awaits), None
            self._held[place].remove(connection)
            if not self._held[place]:
                del self._held[place]

    def _go_on(self, connection: Connection) -> None:
        self._end(connection, done=connection.write() if connection.answers
                  else connection.read(self))

    def _end(self, connection: Connection, *, done: bool) -> None:
        if done:
            self._close(connection)
        elif connection.answers:
            self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)

    def _close(self, connection: Connection) -> None:
        self._let_go(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        del self._open[connection]

    def _close_oldest(self) -> None:
        # They are in the order in which they began.
        if self._open:
            self._close(next(iter(self._open)))

    def answer(self, data: bytes) -> tuple[int, bytes] | None:
        """Status and content for a request; None while it is incomplete."""
        head, end, body = data.partition(b"\r\n\r\n")
        if not end:
            return (431, b"") if len(data) > _HEAD_BYTES else None
        method, path, length = _parse(head)
        if path.startswith(IDENTITY_PATH):
            return self._identify(path.removeprefix(IDENTITY_PATH))
        capability, scope, name = ([*path[1:].split("/"), "", "", ""])[:3]
        # Horovod's client adds the port to the address, and so to the capability.
        sent = f"/{capability.partition(':')[0]}".encode()
        if not hmac.compare_digest(sent, self._prefix) or path.count("/") != 3 or length < 0:
            return 403, b""
        if method == "GET":
            key = name.removesuffix(_WAITS)
            value = self._store.get(scope, key)
            if value is None and key != name:
                return _HELD, f"{scope}/{key}".encode()
            return (404, b"") if value is None else (200, value)
        if method == "DELETE":
            return self._store.delete(scope, name), b""
        if method != "PUT" or length > self._store.limit(scope):
            return (405 if method != "PUT" else 413), b""
        return None if len(body) < length else (self._put(scope, name, body[:length]), b"")

    def _put(self, scope: str, name: str, value: bytes) -> int:
        status = self._store.put(scope, name, value)
        if status == 200 and self._held:
            self._tell(scope, name)
        return status

    def _identify(self, nonce: str) -> tuple[int, bytes]:
        if _NONCE.fullmatch(nonce) is None:
            return 403, b""
        signature = mac(self._key, b"identity", nonce.encode(), self._who.encode())
        return 200, json.dumps({"who": self._who, "mac": signature}).encode()


def _place_of(scope: str, key: str) -> tuple[str, str]:
    """Where those are held that wait for a key: who asks for all peers, beside the others."""
    return scope, PEERS if key.startswith(PEERS) else key


def _parse(head: bytes) -> tuple[str, str, int]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    length = "0"
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length":
            length = value.strip()
    return method, rest.partition(" ")[0], int(length) if _LENGTH.fullmatch(length) else -1


def main(descriptors: list[int]) -> None:
    """Serve until the parent ends."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # ranks that stop still need it; the parent ends it
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    if not line.endswith(b"\n"):
        os._exit(0)
    Server([socket.socket(fileno=number) for number in descriptors], json.loads(line)).serve(parent)
    os._exit(0)


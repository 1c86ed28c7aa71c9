"""Program: the key-value store over HTTP at which Horovod's Gloo ranks find each other.

Speaks what the C++ side of Horovod 0.28 expects: PUT, GET and DELETE of /scope/key, 404 for a
key that is not there yet. A DELETE by every member of a scope empties the scope, so that
`hvd.shutdown()` and `hvd.init()` work again. Standard library only and run by path: it starts in
70 ms, and a rank that is loading TensorFlow (which holds the GIL for seconds) does not delay it.

Who may do what (docs/security.md):

- A connection from an address that no host of the job has is closed before anything is read.
- Each path begins with a capability, a text that only ranks of the job know. Horovod's client
  sends no signature, but sends the capability as part of the address that it was given.
- In the scopes of Horovod only the keys of its members can be set, once, and up to a size.
- In the scopes of hvdtrain a value must be sealed: signed with the secret of the job, together
  with its path.
- `/hvdtrain/identity/NONCE` needs no capability: the answer is signed, so that a rank can tell
  this server from another job's before it sends the capability there.

Arguments: descriptors of listening sockets. The first line of standard input is an `Order` as
JSON; nothing secret is on the command line. Ends when its standard input closes or its parent
is gone.
"""

import hashlib
import hmac
import ipaddress
import json
import os
import re
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

IDENTITY_PATH = "/hvdtrain/identity/"
_OWN_SCOPE = re.compile(r"hvdtrain\.[a-z0-9_.]{1,64}")
_OWN_KEY = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_GLOO_KEY = re.compile(r"(?:rank_)?(\d{1,7})")
_PROCESS_SET = re.compile(r"_process_set_hash_[0-9a-f]{1,16}")
_NONCE = re.compile(r"[0-9a-f]{16,64}")
_LENGTH = re.compile(r"\d{1,9}")
_HEAD_BYTES, _OWN_BYTES, _CHUNK = 8192, 1 << 20, 65536
_PROCESS_SETS = 256
_REQUEST_S, _CHECK_S, _RESOLVE_S = 10.0, 1.0, 2.0
_TELL_AFTER_S, _MOST_REFUSED = 5.0, 64


def mac(key: bytes, *parts: bytes) -> str:
    """The HMAC-SHA256 of some texts; their lengths are part of it."""
    joined = b"".join(b"%d:%s" % (len(part), part) for part in parts)
    return hmac.new(key, joined, hashlib.sha256).hexdigest()


def is_sealed(key: bytes, path: str, data: bytes) -> bool:
    """Whether a value was sealed for this path: its MAC, then the value."""
    return hmac.compare_digest(data[:64], mac(key, path.encode(), data[64:]).encode())


class Store:
    """The keys and values of all scopes, with their limits.

    Args:
        sizes: For each scope of Horovod the number of its members.
        key: With which values of hvdtrain's own scopes are sealed.
    """

    def __init__(self, sizes: dict[str, int], key: bytes) -> None:
        self._sizes, self._key = sizes, key
        self._values: dict[str, dict[str, bytes]] = {}
        self._left: dict[str, set[str]] = {}
        self._bytes = 0
        size = sizes.get("global", 1)
        self._most_bytes = (64 << 20) + 1024 * size * size
        self._most_keys = 64 * size + 1024

    def limit(self, scope: str) -> int:
        """How large a value in this scope may be."""
        if _OWN_SCOPE.fullmatch(scope):
            return _OWN_BYTES
        return 4096 + 256 * self._members(scope)  # Gloo's addresses have 136 bytes for each peer

    def get(self, scope: str, name: str) -> bytes | None:
        """A value."""
        return self._values.get(scope, {}).get(name)

    def put(self, scope: str, name: str, value: bytes) -> int:
        """Set a value once; returns the HTTP status."""
        former = self.get(scope, name)
        if former is not None:
            return 200 if former == value else 409
        if not self._may_set(scope, name, value):
            return 403
        held = self._values.get(scope, {})
        if self._bytes + len(value) > self._most_bytes or len(held) >= self._most_keys or (
                scope not in self._values and len(self._values) >= self._most_scopes()):
            return 507
        self._values.setdefault(scope, {})[name] = value
        self._bytes += len(value)
        return 200

    def delete(self, scope: str, name: str) -> int:
        """Note that a member has left its scope; the last one empties it. The HTTP status."""
        if not name.isdigit() or int(name) >= self._members(scope):
            return 403
        if scope not in self._sizes:  # of a process set, which comes and goes
            self._forget(scope, [name])
            return 200
        left = self._left.setdefault(scope, set())
        left.add(name)
        if len(left) >= self._sizes[scope]:
            del self._left[scope]
            self._forget(scope, list(self._values.get(scope, {})))
        return 200

    def _may_set(self, scope: str, name: str, value: bytes) -> bool:
        if _OWN_SCOPE.fullmatch(scope):
            return _OWN_KEY.fullmatch(name) is not None and is_sealed(
                self._key, f"{scope}/{name}", value)
        found = _GLOO_KEY.fullmatch(name)
        return found is not None and int(found[1]) < self._members(scope)

    def _members(self, scope: str) -> int:
        """How many members a scope of Horovod has at most; 0 for a scope that it does not use."""
        base, mark, tail = scope.partition("_process_set_hash_")
        if mark and _PROCESS_SET.fullmatch(mark + tail) is None:
            return 0
        return self._sizes.get(base, 0)

    def _most_scopes(self) -> int:
        return len(self._sizes) * (1 + _PROCESS_SETS) + _PROCESS_SETS

    def _forget(self, scope: str, names: list[str]) -> None:
        held = self._values.get(scope, {})
        for name in names:
            self._bytes -= len(held.pop(name, b""))
        if not held:
            self._values.pop(scope, None)


class Hosts:
    """The addresses from which requests are taken.

    Names are resolved by a thread: those of new pods are known late, and may change.
    """

    def __init__(self, sources: list[str], names: list[str]) -> None:
        self._networks = [ipaddress.ip_network(item, strict=False) for item in sources]
        self._names = names
        self._resolved: set[str] = set()
        self._asked = threading.Event()
        self._refused: dict[str, float] = {}
        if names:
            threading.Thread(target=self._resolve, daemon=True).start()

    def has(self, address: str) -> bool:
        """Whether a host of the job has this address, as far as is known now."""
        if address in self._resolved or any(
                ipaddress.ip_address(address) in network for network in self._networks):
            return True
        self._asked.set()
        return False

    def refuse(self, address: str) -> None:
        """Note that a connection was refused; one that keeps coming is told of, once."""
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
        self._received = b""
        self._unsent = b""

    def read(self, server: "Server") -> bool:
        """Take what has come; returns whether the request was answered or has failed."""
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        self._received += data
        answer = server.answer(self._received)
        if answer is None:
            return not data
        status, body = answer
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
    """Serves on some listening sockets, in one thread and with a bounded number of connections.

    Args:
        listeners: The sockets.
        order: `key`, `capability`, `sizes`, `sources`, `names`, `who`; see `rendezvous.serve`.
    """

    def __init__(self, listeners: list[socket.socket], order: dict[str, Any]) -> None:
        self._key = bytes.fromhex(order["key"])
        self._prefix = f"/{order['capability']}".encode()
        self._who = json.dumps(order["who"])
        self._store = Store(order["sizes"], self._key)
        self._hosts = Hosts(order["sources"], order["names"])
        self._most = 256 + 4 * order["sizes"].get("global", 1)
        self._open: dict[Connection, None] = {}
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def serve(self, parent: int) -> None:
        """Serve until standard input closes or the parent is another process.

        The parent is asked for as well: a forked child of it (a data loader) keeps the pipe open.
        """
        self._selector.register(0, selectors.EVENT_READ)
        checked = time.monotonic()
        while True:
            for key, _ in self._selector.select(_CHECK_S):
                if key.fileobj == 0:
                    if not os.read(0, 4096):
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

    def _go_on(self, connection: Connection) -> None:
        done = connection.write() if connection.answers else connection.read(self)
        if done:
            self._close(connection)
        elif connection.answers:
            self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)

    def _close(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        del self._open[connection]

    def _close_oldest(self) -> None:
        """They are kept in the order of their beginnings."""
        if self._open:
            self._close(next(iter(self._open)))

    def answer(self, data: bytes) -> tuple[int, bytes] | None:
        """Status and content for a request; None while it is not whole."""
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
            value = self._store.get(scope, name)
            return (404, b"") if value is None else (200, value)
        if method == "DELETE":
            return self._store.delete(scope, name), b""
        if method != "PUT" or length > self._store.limit(scope):
            return (405 if method != "PUT" else 413), b""
        return None if len(body) < length else (self._store.put(scope, name, body[:length]), b"")

    def _identify(self, nonce: str) -> tuple[int, bytes]:
        if _NONCE.fullmatch(nonce) is None:
            return 403, b""
        signature = mac(self._key, b"identity", nonce.encode(), self._who.encode())
        return 200, json.dumps({"who": self._who, "mac": signature}).encode()


def _parse(head: bytes) -> tuple[str, str, int]:
    """Method, path and length of the content; -1 for a length that is none."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    length = "0"
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length":
            length = value.strip()
    return method, rest.partition(" ")[0], int(length) if _LENGTH.fullmatch(length) else -1


def main(descriptors: list[int]) -> None:
    """Serve until the parent goes."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # ranks that stop still need it; the parent ends it
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:
            os._exit(0)
        line += data
    Server([socket.socket(fileno=number) for number in descriptors], json.loads(line)).serve(parent)
    os._exit(0)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])

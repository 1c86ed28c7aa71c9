"""Program: the key-value store over HTTP at which Horovod's Gloo ranks find each other.

Speaks what the C++ side of Horovod 0.28 expects: PUT, GET and DELETE of /scope/key, 404 for a
key that is not there yet. A DELETE by every member of a scope empties the scope, so that
`hvd.shutdown()` and `hvd.init()` work again. Standard library only and run by path: it starts in
70 ms, and a rank that is loading TensorFlow (which holds the GIL for seconds) does not delay it.

Arguments: the descriptor of a listening socket, a token, the sizes of the scopes as JSON. Ends
when its standard input closes or its parent is gone.
"""

import http.server
import json
import os
import select
import signal
import socket
import socketserver
import sys
import threading

TOKEN_PATH = "/hvdtrain/token"  # noqa: S105 - a path, not a secret


class Store:
    """The keys and values of all scopes."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes = sizes
        self._values: dict[str, bytes] = {}
        self._left: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def get(self, path: str) -> bytes | None:
        """The value at `/scope/key`."""
        with self._lock:
            return self._values.get(path)

    def put(self, path: str, value: bytes) -> None:
        """Set the value at `/scope/key`."""
        with self._lock:
            self._values[path] = value

    def delete(self, path: str) -> None:
        """Note that a member has left its scope; the last one empties it."""
        scope = path.split("/")[1]
        with self._lock:
            if scope not in self._sizes:
                self._values.pop(path, None)
                return
            left = self._left.setdefault(scope, set())
            left.add(path)
            if len(left) >= self._sizes[scope]:
                del self._left[scope]
                for key in [k for k in self._values if k.startswith(f"/{scope}/")]:
                    del self._values[key]


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    timeout = 10
    store: Store
    token: bytes

    def do_GET(self) -> None:  # noqa: D102
        value = self.token if self.path == TOKEN_PATH else self.store.get(self.path)
        self._reply(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:  # noqa: D102
        self.store.put(self.path, self.rfile.read(int(self.headers["Content-Length"])))
        self._reply(200, b"")

    def do_DELETE(self) -> None:  # noqa: D102
        self.store.delete(self.path)
        self._reply(200, b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002, D102
        pass

    def _reply(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """A server on a socket that listens already."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: D102
        pass  # a client that went away


def main(descriptor: int, token: str, sizes: dict[str, int]) -> None:
    """Serve until the parent goes."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # ranks that stop still need it; the parent ends it
    Handler.store, Handler.token = Store(sizes), token.encode()
    server = Server(("", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=descriptor)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # The parent is asked for as well: a forked child of it (a data loader) keeps the pipe open.
    while os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], 1.0)
        if ready and not os.read(0, 4096):
            break
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))

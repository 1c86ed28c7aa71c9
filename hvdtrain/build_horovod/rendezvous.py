"""The key-value server through which the ranks of a self-test find each other.

Horovod's Gloo ranks PUT their addresses at `/scope/key` and GET those of the others. Nothing is
ever deleted: the server lives for one run on one host.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def _handler(store: dict[str, bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self, code: int, body: bytes = b"") -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            value = store.get(self.path)
            self._answer(404 if value is None else 200, value or b"")

        def do_PUT(self) -> None:
            store[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(200)

        def do_DELETE(self) -> None:
            self._answer(200)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of each request."""

    return Handler


@contextmanager
def rendezvous_server() -> Iterator[int]:
    """Serve on the loopback address while the context is open; gives the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler({}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def gloo_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that tell one rank of this host who it is and where the others are."""
    return {
        "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size), "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(size), "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "localhost", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port), "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
    }

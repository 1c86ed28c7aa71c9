"""Waits until all ranks are there, before Horovod is initialised.

`hvd.init()` over Gloo allows 30 s between the first and the last rank, and ends in SIGABRT beyond:
too little for TensorFlow's import on a slow file system, and the same limit finds a lost peer in
training, so it should not be raised. The ranks meet here instead, in the key-value store of the
rendezvous (horovodrun's, our launcher's or `bootstrap`'s), where waiting costs nothing.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping

from hvdtrain.errors import WorldError
from hvdtrain.world.world import World

_SCOPE = "hvdtrain.meet"
_POLL_S = 0.05


def meet(world: World, environ: Mapping[str, str], *, name: str = "start",
         timeout_s: float = 600.0) -> None:
    """Return when all ranks have called this. All ranks; once for each `name`.

    Args:
        world: Which rank this is, of how many.
        environ: Mapping with HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT; without them, and for one
            rank, nothing is done.
        name: String, tells one meeting from another.
        timeout_s: Float, how long to wait for the last rank.

    Raises:
        WorldError: Ranks are missing when the time is over (rank 0 names them), or the
            rendezvous has gone.
    """
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if world.size == 1 or address is None or port is None:
        return
    store = _Store(address, int(port), f"{_SCOPE}.{name}")
    deadline = time.monotonic() + timeout_s
    try:
        store.put(str(world.rank))
        if world.is_chief:
            _await(store, [str(rank) for rank in range(world.size)], deadline, timeout_s)
            store.put("go")
        else:
            _await(store, ["go"], deadline, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        raise WorldError(
            f"The rendezvous at {address}:{port} does not answer ({type(error).__name__}: "
            f"{error}). Expected the starter, or rank 0, to serve it. Has the job ended?"
        ) from error


class _Store:
    def __init__(self, address: str, port: int, scope: str) -> None:
        self._address, self._port, self._scope = address, port, scope

    def put(self, key: str) -> None:
        self._request("PUT", key, b"1")

    def has(self, key: str) -> bool:
        return self._request("GET", key) == http.client.OK

    def _request(self, method: str, key: str, body: bytes | None = None) -> int:
        connection = http.client.HTTPConnection(self._address, self._port, timeout=30)
        try:
            connection.request(method, f"/{self._scope}/{key}", body)
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()


def _await(store: _Store, keys: list[str], deadline: float, timeout_s: float) -> None:
    while keys:
        keys = [key for key in keys if not store.has(key)]
        if keys and time.monotonic() > deadline:
            who = "rank 0 gave no sign" if keys == ["go"] else f"ranks missing: {', '.join(keys)}"
            raise WorldError(
                f"Not all ranks have started after {timeout_s:g} s: {who}. Expected all of them. "
                "Look for errors in the output of those ranks, and for hosts that are slow.")
        if keys:
            time.sleep(_POLL_S)

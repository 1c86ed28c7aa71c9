"""A client of the key-value store at which ranks find each other before they can talk.

The store is that of the rendezvous: horovodrun's, our launcher's or the one that rank 0 serves
(`bootstrap`). It speaks HTTP: PUT and GET of /scope/key.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterable, Mapping

from hvdtrain.errors import WorldError

_POLL_S = 0.05
_ANSWER_S = 30.0


class Store:
    """One scope of the store. Every call is one request.

    Args:
        address: String, of the host that serves it.
        port: Integer.
        scope: String that keeps these keys from those of others.
    """

    def __init__(self, address: str, port: int, scope: str) -> None:
        self.address, self.port, self._scope = address, port, scope

    @classmethod
    def of(cls, environ: Mapping[str, str], scope: str) -> Store | None:
        """The store that HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT name, or None."""
        address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
        return None if address is None or port is None else cls(address, int(port), scope)

    def put(self, key: str, value: bytes = b"1") -> None:
        """Set a value.

        Raises:
            WorldError: The store does not answer.
        """
        self._request("PUT", key, value)

    def get(self, key: str) -> bytes | None:
        """A value, or None where there is none yet.

        Raises:
            WorldError: The store does not answer.
        """
        return self._request("GET", key)

    def wait(self, keys: Iterable[str], *, deadline: float) -> dict[str, bytes]:
        """Wait for values.

        Args:
            keys: The keys.
            deadline: Float, by `time.monotonic()`.

        Returns:
            The values that are there at the deadline; all of them, if they came before it.

        Raises:
            WorldError: The store does not answer.
        """
        keys = list(keys)
        found: dict[str, bytes] = {}
        while True:
            for key in keys:
                if key not in found and (value := self.get(key)) is not None:
                    found[key] = value
            if len(found) == len(keys) or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S)

    def _request(self, method: str, key: str, body: bytes | None = None) -> bytes | None:
        connection = http.client.HTTPConnection(self.address, self.port, timeout=_ANSWER_S)
        try:
            connection.request(method, f"/{self._scope}/{key}", body)
            response = connection.getresponse()
            content = response.read()
            return content if response.status == http.client.OK else None
        except (OSError, http.client.HTTPException) as error:
            raise WorldError(
                f"The rendezvous at {self.address}:{self.port} does not answer "
                f"({type(error).__name__}: {error}). Expected the starter, or rank 0, to serve "
                "it. Has the job ended?") from error
        finally:
            connection.close()

"""A client of the key-value store at which ranks find each other before they can talk.

The store is that of the rendezvous: horovodrun's, our launcher's or the one that rank 0 serves
(`bootstrap`). It speaks HTTP: PUT and GET of /scope/key. Values are sealed with the key of the
job, so that what a rank reads was set by a rank of its job, whoever else can write there.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from hvdtrain.errors import WorldError
from hvdtrain.runtime.waiting import Wait
from hvdtrain.world.rendezvous import rendezvous_place
from hvdtrain.world.secret import JobKey, job_key, secret_in

_ANSWER_S, _ATTEMPTS, _RETRY_S = 10.0, 3, 0.2
_LARGEST_BYTES = 1 << 20


class Store:
    """One scope of the store. Every call is one request.

    Args:
        address: String, of the host that serves it.
        port: Integer.
        scope: String that keeps these keys from those of others.
        key: Of the job.
        capability: String that our own server expects; "" for horovodrun's.
    """

    def __init__(self, address: str, port: int, scope: str, *, key: JobKey,
                 capability: str) -> None:
        self.address, self.port, self._scope = address, port, scope
        self._key = key
        self._prefix = f"/{capability}" if capability else ""

    @classmethod
    def of(cls, environ: Mapping[str, str], scope: str) -> Store | None:
        """The store that HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT name, or None."""
        address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
        if address is None or port is None:
            return None
        host, number, capability = rendezvous_place(address, port)
        secret = secret_in(environ)
        key = JobKey(secret) if secret else job_key(environ, f"{host}:{number}")
        return cls(host, number, scope, key=key, capability=capability)

    def put(self, key: str, value: bytes = b"1") -> bool:
        """Set a value, which stays: a key can be set once.

        Returns:
            False when another value is there already.

        Raises:
            WorldError: The store does not answer, or refuses.
        """
        if not self._prefix and (there := self.get(key)) is not None:  # horovodrun's overwrites
            return there == value
        status, _ = self._request("PUT", key, self._key.seal(f"{self._scope}/{key}", value))
        if status not in (http.client.OK, http.client.CONFLICT):
            raise self._refused(status)
        return status == http.client.OK

    def get(self, key: str) -> bytes | None:
        """A value, or None where there is none yet.

        Raises:
            WorldError: The store does not answer, or the value is not of a rank of this job.
        """
        status, content = self._request("GET", key)
        if status == http.client.NOT_FOUND:
            return None
        if status != http.client.OK:
            raise self._refused(status)
        value = self._key.unseal(f"{self._scope}/{key}", content)
        if value is None:
            raise WorldError(
                f"The rendezvous at {self.address}:{self.port} holds a value for "
                f"{self._scope}/{key} that no rank of this job has set: another job, or a "
                "stranger, writes there. Start the job again; give it a secret of its own in "
                "HVDTRAIN_SECRET, or use hvdtrain launch, whose rendezvous takes no such values.")
        return value

    def wait(self, keys: Iterable[str], wait: Wait) -> dict[str, bytes]:
        """Wait for values.

        Args:
            keys: The keys.
            wait: How long, and what is said meanwhile.

        Returns:
            The values that are there when the time is over; all of them, if they came before.

        Raises:
            WorldError: The store does not answer, or this process was told to stop.
        """
        keys = list(keys)
        found: dict[str, bytes] = {}

        def look() -> None:
            for key in keys:
                if key not in found and (value := self.get(key)) is not None:
                    found[key] = value

        while True:
            with suppress(TimeoutError):
                wait.until(look)
            if len(found) == len(keys) or not wait.go_on():
                return found

    def missing(self, keys: Iterable[str]) -> list[int]:
        """Which of some keys, by their number, have no value yet."""
        return [number for number, key in enumerate(keys) if self.get(key) is None]

    def _request(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._request_once(method, key, body)
            except (OSError, http.client.HTTPException) as error:
                if attempt == _ATTEMPTS or isinstance(error, ConnectionRefusedError):
                    raise WorldError(
                        f"The rendezvous at {self.address}:{self.port} does not answer "
                        f"({type(error).__name__}: {error}). Expected the starter, or rank 0, to "
                        "serve it. Has the job ended?") from error
                time.sleep(_RETRY_S)
        raise RuntimeError("neither answered nor failed")

    def _request_once(self, method: str, key: str, body: bytes | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.address, self.port, timeout=_ANSWER_S)
        try:
            connection.request(method, f"{self._prefix}/{self._scope}/{key}", body)
            response = connection.getresponse()
            return response.status, response.read(_LARGEST_BYTES + 1)
        finally:
            connection.close()

    def _refused(self, status: int) -> WorldError:
        return WorldError(
            f"The rendezvous at {self.address}:{self.port} refuses this rank (HTTP {status}). "
            "Expected the rendezvous of this job. Is HOROVOD_GLOO_RENDEZVOUS_ADDR or "
            "HVDTRAIN_SECRET left over from another job? Unset them, or start from a fresh shell.")

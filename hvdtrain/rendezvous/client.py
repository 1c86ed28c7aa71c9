"""A client of the rendezvous; and `Wait`, which says for whom a process waits.

The rendezvous serves HTTP: PUT and GET of /scope/key. Values are sealed with the key of the job, so
that what a rank reads was set by a rank of its job, whoever else can write there.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import TypeVar

from hvdtrain.errors import EXIT_STOPPED, WorldError
from hvdtrain.log import get_logger
from hvdtrain.process import signal_name, stop_signal
from hvdtrain.rendezvous.secret import JobKey, job_key, secret_in
from hvdtrain.world import World

T = TypeVar("T")

FIRST_WORDS_S = 5.0  # to the first message on what it waits for; then again at each doubling
_SHORTEST_S, _LONGEST_S, _GROWTH = 0.05, 0.2, 1.1
_RESOLVE_S = 0.2
_NAMED = 8
_ANSWER_S, _ATTEMPTS, _RETRY_S = 10.0, 3, 0.2
_LARGEST_BYTES = 1 << 20
_ANSWERS = {"PUT": (http.client.OK, http.client.CONFLICT),
            "GET": (http.client.OK, http.client.NOT_FOUND),
            "DELETE": (http.client.OK,)}


class WaitStoppedError(WorldError):
    """A signal asked this process to stop while it waited for others; nothing was trained."""

    exit_code = EXIT_STOPPED


class Wait:
    """A wait for what `words()`, which is called seldom, says.

    With `heeds_stop` a request to stop ends it, by a `WaitStoppedError`.
    """

    def __init__(self, limit_s: float, words: Callable[[], str], *,
                 heeds_stop: bool = True) -> None:
        self._limit_s, self._words, self._heeds_stop = limit_s, words, heeds_stop
        self._began_s = time.monotonic()
        self._say_at_s, self._pause_s = FIRST_WORDS_S, _SHORTEST_S

    def until(self, look: Callable[[], T | None]) -> T | None:
        """Repeat `look` until it finds something; None when the time is over.

        It runs in a thread, since it may block, as a request to a lost host or behind a firewall
        that drops packets. It may raise WorldError.
        """
        found: list[T | WorldError | None] = []

        def run() -> None:
            try:
                found.append(look())
            except WorldError as error:
                found.append(error)

        while True:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            thread.join(_SHORTEST_S)
            while thread.is_alive():
                if not self._pause(thread):
                    return None
            if isinstance(last := found[-1], WorldError):
                raise last
            if last is not None or not self._pause():
                return last

    def _pause(self, thread: threading.Thread | None = None) -> bool:
        """Pause for a moment, or until a thread has ended; False when the time is over."""
        waited_s = time.monotonic() - self._began_s
        if waited_s >= self._say_at_s and waited_s <= self._limit_s:
            self._say_at_s = 2 * waited_s
            get_logger().warning("Waiting for %s: %.0f s so far, at most %g s.", self._words(),
                                 waited_s, self._limit_s)
        if thread is None:
            time.sleep(self._pause_s)
        else:
            thread.join(self._pause_s)
        self._pause_s = min(_LONGEST_S, self._pause_s * _GROWTH)
        if self._heeds_stop and (number := stop_signal()):
            words = "the other ranks"
            with suppress(WorldError):  # the rendezvous has gone meanwhile
                words = self._words()
            raise WaitStoppedError(
                f"Stopped on request ({signal_name(number)}) while waiting for {words}. "
                "Nothing was trained.")
        return waited_s <= self._limit_s


class RendezvousClient:
    """One scope of a rendezvous. Every call is one request; WorldError without an answer.

    `capability` is what our own server expects, "" for horovodrun's.
    """

    def __init__(self, address: str, port: int, scope: str, *, key: JobKey,
                 capability: str) -> None:
        self.address, self.port, self._scope = address, port, scope
        self._key, self._capability = key, capability

    @property
    def job(self) -> JobKey | None:
        """The key of the job, where the server is our own."""
        return self._key if self._capability else None

    @classmethod
    def of(cls, environ: Mapping[str, str], scope: str) -> RendezvousClient | None:
        """That of HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT, or None where they are not set."""
        address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
        if address is None or port is None:
            return None
        place, _, capability = address.partition("/")
        host = place.partition(":")[0]
        secret = secret_in(environ)
        key = JobKey(secret) if secret else job_key(environ, f"{host}:{int(port)}")
        return cls(host, int(port), scope, key=key, capability=capability)

    def in_scope(self, scope: str) -> RendezvousClient:
        """Another scope of the same rendezvous."""
        return RendezvousClient(self.address, self.port, scope, key=self._key,
                                capability=self._capability)

    def put(self, key: str, value: bytes = b"1") -> bool:
        """Set a value permanently; False where another value is there already."""
        if not self._capability and (there := self.get(key)) is not None:  # horovodrun's overwrites
            return there == value
        status, _ = self._request("PUT", key, self._key.seal(f"{self._scope}/{key}", value))
        return status == http.client.OK

    def get(self, key: str, *, waits: bool = False) -> bytes | None:
        """A value, or None; WorldError where it is not from a rank of this job.

        With `waits` our own server answers when the value is there, or after some seconds.
        """
        status, content = self._request(
            "GET", f"{key}?wait" if waits and self._capability else key)
        if status == http.client.NOT_FOUND:
            return None
        value = self._key.unseal(f"{self._scope}/{key}", content)
        if value is None:
            raise WorldError(
                f"The rendezvous at {self.address}:{self.port} holds a value for "
                f"{self._scope}/{key} that no rank of this job has set: another job, or a "
                "stranger, writes there. Start the job again; give it a secret of its own in "
                "HVDTRAIN_SECRET, or use hvdtrain launch, whose rendezvous takes no such values.")
        return value

    def wait(self, keys: Iterable[str], wait: Wait) -> dict[str, bytes]:
        """Wait for values, one after the other; returns those seen until the time is over.

        WorldError if told to stop.
        """
        missing, found = list(keys)[::-1], dict[str, bytes]()

        def look() -> bool | None:
            while missing and (value := self.get(missing[-1], waits=True)) is not None:
                found[missing.pop()] = value
            return not missing or None

        wait.until(look)
        return found

    def forward(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        """A request of Horovod's, whose values are not sealed; the HTTP status and the content."""
        return self._request(method, key, body)

    def missing(self, keys: Iterable[str]) -> list[int]:
        """The indices of keys that have no value yet."""
        return [number for number, key in enumerate(keys) if self.get(key) is None]

    def _request(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        prefix = f"/{self._capability}" if self._capability else ""
        for attempt in range(1, _ATTEMPTS + 1):
            connection = http.client.HTTPConnection(self.address, self.port, timeout=_ANSWER_S)
            try:
                connection.request(method, f"{prefix}/{self._scope}/{key}", body)
                response = connection.getresponse()
                if response.status in _ANSWERS[method]:
                    return response.status, response.read(_LARGEST_BYTES + 1)
                raise WorldError(
                    f"The rendezvous at {self.address}:{self.port} refuses this rank (HTTP "
                    f"{response.status}). Expected the rendezvous of this job. Is "
                    "HOROVOD_GLOO_RENDEZVOUS_ADDR or HVDTRAIN_SECRET left over from another job? "
                    "Unset them, or start from a fresh shell.")
            except (OSError, http.client.HTTPException) as error:
                if attempt == _ATTEMPTS or isinstance(error, ConnectionRefusedError):
                    raise WorldError(
                        f"The rendezvous at {self.address}:{self.port} does not answer "
                        f"({type(error).__name__}: {error}). Expected the starter, or rank 0, to "
                        "serve it. Has the job ended?") from error
                time.sleep(_RETRY_S)
            finally:
                connection.close()
        raise RuntimeError("neither answered nor failed")


def ranks_place(world: World, ranks: Iterable[int]) -> str:
    """Some ranks with hosts and addresses, as far as known: `rank 1 on hostb (10.0.0.2)`."""
    ranks = list(ranks)
    host_of = [host for host, count in zip(world.hosts, world.slots, strict=True)
               for _ in range(count)]
    named = ", ".join(f"rank {rank} on {host_place(host_of[rank])}" if rank < len(host_of)
                      else f"rank {rank}" for rank in ranks[:_NAMED])
    return f"{named} and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else named


@cache
def host_place(host: str) -> str:
    """A host with its address, where its name is known; looked up once."""
    found: list[str] = []

    def resolve() -> None:
        try:
            found.append(socket.gethostbyname(host))
        except OSError:
            found.append("name not known here")

    # A name server that does not answer must not hold up the words.
    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(_RESOLVE_S)
    address = found[0] if found else "no answer from the name server"
    return host if address == host else f"{host} ({address})"

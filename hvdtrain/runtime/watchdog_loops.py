"""The loop of a rank's watchdog thread: `Chief` on rank 0, which decides, `Member` on the others.

A member reports its rank's progress and acts on rank 0's decisions. Rank 0 receives the reports,
decides (`watchdog_judge.py`), and tells all ranks. They send JSON lines, which never block. Both
ends prove first that they know a token, which is never sent:

1. Rank 0 sends `{"nonce": N}`.
2. The member sends `{"rank": R, "nonce": M, "mac": ...}`, signed over both nonces and the rank.
3. Rank 0 sends `{"alive": true, "mac": ...}`, signed over both nonces.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hvdtrain.log import get_logger
from hvdtrain.rendezvous.store import mac
from hvdtrain.runtime import watchdog_judge as judging
from hvdtrain.runtime.progress import RankReport
from hvdtrain.runtime.watchdog_judge import RankView, Verdict, judge

Message = dict[str, Any]
_LARGEST_MESSAGE = _CHUNK = 1 << 16
_REPORTS_PER_S = 200  # that rank 0 can process in a large job
_HELLO_LIMIT_S, _MISSING_AFTER_S, _CONNECT_LIMIT_S = 10.0, 30.0, 2.0


class Connection:
    """One connection, used by the watchdog's thread. Takes over a connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        with suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self.closed = connected, False
        self._received = self._unsent = b""

    def fileno(self) -> int:
        """For `selectors`."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send as much as the connection takes; a peer that does not read misses messages."""
        if not self.closed and len(self._unsent) < _LARGEST_MESSAGE:
            self._unsent += json.dumps(message).encode() + b"\n"
        try:
            while self._unsent and not self.closed:
                self._unsent = self._unsent[self._socket.send(self._unsent):]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""  # `receive` sees the end

    def receive(self) -> list[Message]:
        """The complete messages received. Sets `closed` when the peer has gone."""
        try:
            while not self.closed:
                self._received += (data := self._socket.recv(_CHUNK))
                if not data:
                    self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > _LARGEST_MESSAGE:
            self.close()
        messages: list[Message] = []
        for line in lines:
            with suppress(ValueError):
                if isinstance(message := json.loads(line), dict):
                    messages.append(message)
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self._socket.close()


def proof(token: str, *parts: object) -> str:
    """The signature of some texts, by one who knows the token."""
    return mac(token.encode(), *(str(part).encode() for part in parts))


def proves(message: Message, token: str, *parts: object) -> bool:
    """Whether a message has that signature."""
    return hmac.compare_digest(str(message.get("mac")).encode(), proof(token, *parts).encode())


def hello_of(token: str, rank: int, their_nonce: str, my_nonce: str) -> Message:
    """A member's message in the handshake."""
    return {"rank": rank, "nonce": my_nonce,
            "mac": proof(token, "member", their_nonce, my_nonce, rank)}


class AwakeClock:
    """Seconds during which this thread ran.

    A process that was stopped (Ctrl-Z, a scheduler that suspends jobs) has received nothing for
    long when it continues, and so have all others: that time does not count.
    """

    def __init__(self) -> None:
        self._seen, self._now = time.monotonic(), 0.0

    def now(self, longest_step_s: float) -> float:
        """The time; to be called at least every `longest_step_s` seconds."""
        before, self._seen = self._seen, time.monotonic()
        self._now += min(self._seen - before, longest_step_s)
        return self._now


@dataclass(kw_only=True)
class Settings:
    """Shared by the watchdog's thread and the one that trains, which may change it. 0: no limit."""

    hang_timeout_s: float
    size: int

    @property
    def interval_s(self) -> float:
        """Between two reports: a second, or more for many ranks, or less for a short limit."""
        wanted = max(1.0, self.size / _REPORTS_PER_S)
        return wanted if self.hang_timeout_s <= 0 else min(wanted, self.hang_timeout_s / 10)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Where rank 0 listens: its addresses, best first, and the token of the handshake."""

    addresses: tuple[str, ...]
    port: int
    token: str
    hang_timeout_s: float


class Loop:
    """The common part of both loops; `on_verdict` is called once, at the end."""

    _longest_tick_s = float("inf")

    def __init__(self, settings: Settings, own_report: Callable[[bool], RankReport],
                 on_verdict: Callable[[Verdict], None]) -> None:
        self._settings, self._own_report, self._on_verdict = settings, own_report, on_verdict
        self._clock = AwakeClock()
        self._selector = selectors.DefaultSelector()  # with what to call, True at the end
        self._ranks: dict[Connection, int] = {}

    def run(self, wake: socket.socket, stopped: Callable[[], bool]) -> None:
        """Watch until `stopped()` (checked after `wake`), the end of rank 0 or a verdict."""
        self._selector.register(wake, selectors.EVENT_READ)
        try:
            due = time.monotonic()
            while not stopped():
                for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
                    if key.fileobj is not wake and key.data():
                        return
                if time.monotonic() >= due:
                    due = time.monotonic() + min(self._longest_tick_s, self._settings.interval_s)
                    if self._tick():
                        return
        finally:
            for connection in self._ranks:
                connection.send({"bye": True})
            self.close()

    def close(self) -> None:
        """Close all connections."""
        self._selector.close()
        for connection in self._ranks:
            connection.close()

    def _now(self) -> float:
        return self._clock.now(2 * self._settings.interval_s)

    def _report(self, stalled_s: float) -> RankReport:
        """The rank's own report; with its place where it has not advanced for long."""
        return self._own_report(stalled_s > 3 * self._settings.interval_s)

    def _end(self, verdict: Verdict) -> bool:
        self._on_verdict(verdict)
        return True

    def _watch(self, connection: Connection) -> None:
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read, connection))

    def _read(self, connection: Connection) -> bool:
        """Receive; returns whether this is the end."""
        raise NotImplementedError

    def _tick(self) -> bool:
        """Report and decide; returns whether this is the end."""
        raise NotImplementedError


class Chief(Loop):
    """Rank 0's loop; owns `listeners`. A rank must know `token` and connect from `sources`."""

    _longest_tick_s = 1.0  # decides on lost connections sooner than a large job reports

    def __init__(self, listeners: Sequence[socket.socket], token: str, hosts: Sequence[str],
                 sources: Container[str], settings: Settings,
                 own_report: Callable[[bool], RankReport],
                 on_verdict: Callable[[Verdict], None]) -> None:
        super().__init__(settings, own_report, on_verdict)
        self._listeners = list(listeners)
        self._port: int = self._listeners[0].getsockname()[1]
        self._token, self._sources = token, sources
        self._views = [RankView(rank=rank, host=host) for rank, host in enumerate(hosts)]
        self._views[0].state = "watched"
        # Connections that have not proved yet that they are a rank's: since when, and the nonce.
        self._strangers: dict[Connection, tuple[float, str]] = {}
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        self._warned_s, self._told_missing, self._alive_s = 0.0, False, 0.0

    def close(self) -> None:
        """Close all connections, also of unproven ranks."""
        super().close()
        for listener in self._listeners:
            listener.close()
        for stranger in self._strangers:
            stranger.close()

    def _read(self, connection: Connection) -> bool:
        handle = self._greet if connection in self._strangers else self._take
        handle(connection, connection.receive())
        return False

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            accepted, address = listener.accept()
            if address[0] not in self._sources:
                accepted.close()
                return
            if len(self._strangers) > len(self._views):
                self._drop(next(iter(self._strangers)))  # the oldest
            connection, nonce = Connection(accepted), secrets.token_hex(16)
            self._strangers[connection] = self._now(), nonce
            self._watch(connection)
            connection.send({"nonce": nonce})

    def _greet(self, connection: Connection, messages: list[Message]) -> None:
        """A connection belongs to a rank once it has proved that it knows the token."""
        (_, nonce), hello = self._strangers[connection], messages[0] if messages else {}
        rank, theirs = hello.get("rank"), hello.get("nonce")
        if not (proves(hello, self._token, "member", nonce, theirs, rank)
                and type(rank) is int and 0 < rank < len(self._views)):
            if messages or connection.closed:
                self._drop(connection)
            return
        for former in [c for c, r in self._ranks.items() if r == rank]:
            self._drop(former)
        del self._strangers[connection]
        self._ranks[connection] = rank
        now, view = self._now(), self._views[rank]
        if view.state == "awaited":
            view.changed_s = now
        view.heard_s = now
        view.set_state("watched", now)
        connection.send({"alive": True, "mac": proof(self._token, "chief", nonce, theirs)})
        self._take(connection, messages[1:])

    def _take(self, connection: Connection, messages: list[Message]) -> None:
        rank, now = self._ranks.get(connection), self._now()
        if rank is None:
            return
        view = self._views[rank]
        for message in messages:
            if "bye" in message:
                view.set_state("left", now)
            else:
                with suppress(TypeError):  # of another version
                    view.update(RankReport(**message), now)
        if connection.closed:
            self._drop(connection)
            if view.state == "watched":
                view.set_state("lost", now)

    def _drop(self, connection: Connection) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        self._strangers.pop(connection, None)
        self._ranks.pop(connection, None)
        connection.close()

    def _tick(self) -> bool:
        now, limit_s = self._now(), self._settings.hang_timeout_s
        self._views[0].update(self._report(now - self._views[0].changed_s), now)
        for connection, (since_s, _) in list(self._strangers.items()):
            if now - since_s > _HELLO_LIMIT_S:
                self._drop(connection)
        if now >= _MISSING_AFTER_S and not self._told_missing:
            self._told_missing = True
            if missing := [str(v.rank) for v in self._views if v.state == "awaited"]:
                get_logger().warning(
                    "The watchdog does not watch rank %s: no connection to %s, port %d. Does a "
                    "firewall let the hosts reach each other? The training is not affected.",
                    ", ".join(missing), self._views[0].host, self._port)
        verdict = judge(now, self._views, limit_s)
        message = {"alive": True} if verdict is None else {"verdict": asdict(verdict)}
        if verdict is not None or now >= self._alive_s:
            self._alive_s = now + self._settings.interval_s - 0.1
            for connection in self._ranks:
                connection.send(message)
        if verdict is not None:
            return self._end(verdict)
        # A stall is reported again each time that it has doubled.
        stall = judging.find_stall(now, self._views, limit_s)
        lasted_s = 0.0 if stall is None or limit_s <= 0 else now - stall.since_s
        if stall is None or lasted_s < judging.first_warning_s(stall, limit_s):
            self._warned_s = 0.0
        elif lasted_s >= 2 * self._warned_s:
            self._warned_s = lasted_s
            get_logger().warning("%s.", stall.text)
        return False


class Member(Loop):
    """The loop of every rank but 0."""

    def __init__(self, rank: int, offer: Offer, chief_host: str, settings: Settings,
                 own_report: Callable[[bool], RankReport],
                 on_verdict: Callable[[Verdict], None]) -> None:
        super().__init__(settings, own_report, on_verdict)
        self._rank, self._offer = rank, offer
        self._chief = RankView(rank=0, host=chief_host)
        self._count, self._changed_s = -1, 0.0

    def _tick(self) -> bool:
        now = self._now()
        if not self._ranks and self._connect():
            return True
        report = self._report(now - self._changed_s)
        if report.count != self._count:
            self._count, self._changed_s = report.count, now
        for connection in self._ranks:
            connection.send(asdict(report))
        verdict = judge(now, [self._chief], self._settings.hang_timeout_s)
        return verdict is not None and self._end(verdict)

    def _read(self, connection: Connection) -> bool:
        if self._take(connection.receive()):
            return True
        if connection.closed:
            self._selector.unregister(connection)
            self._ranks.clear()
            self._chief.set_state("lost", self._now())
        return False

    def _take(self, messages: list[Message]) -> bool:
        for message in messages:
            if told := message.get("verdict"):
                return self._end(Verdict(**told | {"causes": tuple(told["causes"])}))
            if "bye" in message:
                return True
            self._chief.heard_s = self._now()
        return False

    def _connect(self) -> bool:
        """Try each address once; returns whether rank 0 has sent a verdict at once."""
        for address in self._offer.addresses:
            try:
                connection = Connection(socket.create_connection(
                    (address, self._offer.port), timeout=_CONNECT_LIMIT_S))
            except OSError:
                continue
            first, nonce, token = _answer(connection), secrets.token_hex(16), self._offer.token
            theirs = str(first[0].get("nonce")) if first else ""
            connection.send(hello_of(token, self._rank, theirs, nonce))
            answers = _answer(connection) if first else []
            if connection.closed or not answers or not proves(
                    answers[0], token, "chief", theirs, nonce):
                connection.close()  # a stranger's
                continue
            self._watch(connection)
            self._ranks[connection] = 0
            self._chief.heard_s = self._now()
            self._chief.set_state("watched", self._chief.heard_s)
            return self._take(answers[1:])
        return False


def _answer(connection: Connection) -> list[Message]:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return connection.receive() if selector.select(_CONNECT_LIMIT_S) else []

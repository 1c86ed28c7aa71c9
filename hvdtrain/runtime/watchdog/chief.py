"""Rank 0's side: takes the reports, decides, and tells all ranks."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.log import get_logger
from hvdtrain.runtime.watchdog.handshake import is_hello, new_nonce, welcome_of
from hvdtrain.runtime.watchdog.judge import (
    RankView,
    Report,
    Stall,
    Verdict,
    find_stall,
    first_warning_s,
    judge,
)
from hvdtrain.runtime.watchdog.settings import Settings
from hvdtrain.runtime.watchdog.wire import AwakeClock, Wire

_HELLO_LIMIT_S = 10.0
_CONNECT_LIMIT_S = 30.0


@dataclass(frozen=True)
class _Stranger:
    """A connection that has not proved yet that it is a rank's."""

    since_s: float
    nonce: str


class Chief:
    """The loop of rank 0's watchdog thread.

    Args:
        listeners: Listening sockets, which it takes over.
        token: String that a rank must know.
        hosts: The host of each rank.
        sources: Addresses from which ranks may connect.
        settings: How long to wait.
        own_report: Callable that gives rank 0's own report, with the place if it is True.
        on_verdict: Called once, with the end.
    """

    def __init__(self, listeners: Sequence[socket.socket], token: str, hosts: Sequence[str],
                 sources: Container[str], settings: Settings, own_report: Callable[[bool], Report],
                 on_verdict: Callable[[Verdict], None]) -> None:
        self._listeners = list(listeners)
        self._port: int = self._listeners[0].getsockname()[1]
        self._token, self._sources = token, sources
        self._settings = settings
        self._own_report = own_report
        self._on_verdict = on_verdict
        self._clock = AwakeClock()
        self._views = [RankView(rank=rank, host=host) for rank, host in enumerate(hosts)]
        self._views[0] = replace(self._views[0], state="watched")
        self._ranks: dict[Wire, int] = {}
        self._strangers: dict[Wire, _Stranger] = {}
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._warned_s = 0.0
        self._told_missing = False

    def run(self, wake: socket.socket, stopped: Callable[[], bool]) -> None:
        """Watch until `stopped`, which `wake` makes it ask, or until a verdict."""
        self._selector.register(wake, selectors.EVENT_READ)
        try:
            due = time.monotonic()
            while not stopped():
                for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
                    self._serve(key.fileobj)
                if time.monotonic() >= due:
                    due = time.monotonic() + self._settings.interval_s
                    if self._tick():
                        return
        finally:
            self._send_all({"bye": True})
            self.close()

    def close(self) -> None:
        """Close all connections."""
        self._selector.close()
        for listener in self._listeners:
            listener.close()
        for wire in [*self._ranks, *self._strangers]:
            wire.close()

    def _now(self) -> float:
        return self._clock.now(2 * self._settings.interval_s)

    def _serve(self, source: Any) -> None:
        if source in self._listeners:
            self._accept(source)
        elif isinstance(source, Wire):
            messages = source.receive()
            if source in self._strangers:
                self._greet(source, messages)
            else:
                self._take(source, messages)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            connection, address = listener.accept()
            if address[0] not in self._sources:
                connection.close()
                return
            if len(self._strangers) > len(self._views):
                self._drop(next(iter(self._strangers)))  # the oldest
            wire = Wire(connection)
            stranger = _Stranger(self._now(), new_nonce())
            self._strangers[wire] = stranger
            self._selector.register(wire, selectors.EVENT_READ)
            wire.send({"nonce": stranger.nonce})

    def _greet(self, wire: Wire, messages: list[dict[str, Any]]) -> None:
        """A connection is a rank's once it has shown that it knows the token."""
        hello = messages[0] if messages else {}
        rank, nonce = hello.get("rank"), self._strangers[wire].nonce
        if not (is_hello(hello, self._token, nonce)
                and type(rank) is int and 0 < rank < len(self._views)):
            if messages or wire.closed:
                self._drop(wire)
            return
        for former in [w for w, r in self._ranks.items() if r == rank]:
            self._drop(former)
        del self._strangers[wire]
        self._ranks[wire] = rank
        now, view = self._now(), self._views[rank]
        self._views[rank] = replace(
            view, state="watched", since_s=now, heard_s=now,
            changed_s=now if view.state == "awaited" else view.changed_s)
        wire.send(welcome_of(self._token, hello, nonce))
        self._take(wire, messages[1:])

    def _take(self, wire: Wire, messages: list[dict[str, Any]]) -> None:
        rank = self._ranks.get(wire)
        if rank is None:
            return
        for message in messages:
            if "bye" in message:
                self._set_state(rank, "left")
            else:
                with suppress(TypeError):  # of another version
                    self._update(rank, Report(**message))
        if wire.closed:
            self._drop(wire)
            if self._views[rank].state == "watched":
                self._set_state(rank, "lost")

    def _set_state(self, rank: int, state: Any) -> None:
        self._views[rank] = replace(self._views[rank], state=state, since_s=self._now())

    def _update(self, rank: int, report: Report) -> None:
        now, view = self._now(), self._views[rank]
        changed = now if report.count != view.report.count else view.changed_s
        self._views[rank] = replace(view, heard_s=now, changed_s=changed, report=report)

    def _drop(self, wire: Wire) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(wire)
        self._strangers.pop(wire, None)
        self._ranks.pop(wire, None)
        wire.close()

    def _tick(self) -> bool:
        """Decide; returns whether this is the end."""
        now, limit_s = self._now(), self._settings.hang_timeout_s
        stalled_s = now - self._views[0].changed_s
        self._update(0, self._own_report(stalled_s > self._settings.place_after_s))
        for wire, stranger in list(self._strangers.items()):
            if now - stranger.since_s > _HELLO_LIMIT_S:
                self._drop(wire)
        self._tell_missing(now)
        verdict = judge(now, self._views, limit_s)
        if verdict is None:
            self._send_all({"alive": True})
            self._warn(now, find_stall(now, self._views, limit_s))
            return False
        self._send_all({"verdict": verdict.to_message()})
        self._on_verdict(verdict)
        return True

    def _send_all(self, message: dict[str, Any]) -> None:
        for wire in self._ranks:
            wire.send(message)

    def _warn(self, now: float, stall: Stall | None) -> None:
        """Tell of a stall, and again each time that it has grown to the double."""
        limit_s = self._settings.hang_timeout_s
        if stall is None or limit_s <= 0:
            self._warned_s = 0.0
            return
        lasted_s = now - stall.since_s
        if lasted_s < first_warning_s(stall, limit_s):
            self._warned_s = 0.0
        elif lasted_s >= 2 * self._warned_s:
            self._warned_s = lasted_s
            get_logger().warning("%s.", stall.text)

    def _tell_missing(self, now: float) -> None:
        if self._told_missing or now < _CONNECT_LIMIT_S:
            return
        self._told_missing = True
        missing = [str(v.rank) for v in self._views if v.state == "awaited"]
        if missing:
            get_logger().warning(
                "The watchdog does not watch rank %s: no connection to %s, port %d. Does a "
                "firewall let the hosts reach each other? The training is not affected.",
                ", ".join(missing), self._views[0].host, self._port)

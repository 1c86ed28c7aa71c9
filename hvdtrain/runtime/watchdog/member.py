"""The side of every rank but 0: reports, and acts on what rank 0 decides."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvdtrain.runtime.watchdog.handshake import hello_of, is_welcome, new_nonce
from hvdtrain.runtime.watchdog.judge import RankView, Report, Verdict, judge
from hvdtrain.runtime.watchdog.settings import Settings
from hvdtrain.runtime.watchdog.wire import AwakeClock, Wire

_CONNECT_LIMIT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Where rank 0 listens."""

    addresses: tuple[str, ...]
    """Best first."""
    port: int
    token: str
    """By which rank 0 and the others know each other; see `handshake.py`."""
    hang_timeout_s: float

    @classmethod
    def of(cls, values: dict[str, Any] | None) -> Offer | None:
        """From the fields, as another rank has sent them; None for none."""
        if values is None:
            return None
        return cls(**{**values, "addresses": tuple(values["addresses"])})


class Member:
    """The loop of the watchdog thread of one rank.

    Args:
        rank: Integer, this rank.
        offer: Where rank 0 is.
        chief_host: String, rank 0's host.
        settings: How long to wait.
        own_report: Callable that gives this rank's report, with the place if it is True.
        on_verdict: Called once, with the end.
    """

    def __init__(self, rank: int, offer: Offer, chief_host: str, settings: Settings,
                 own_report: Callable[[bool], Report],
                 on_verdict: Callable[[Verdict], None]) -> None:
        self._rank = rank
        self._offer = offer
        self._settings = settings
        self._own_report = own_report
        self._on_verdict = on_verdict
        self._clock = AwakeClock()
        self._chief = RankView(rank=0, host=chief_host)
        self._wire: Wire | None = None
        self._count, self._changed_s = -1, 0.0
        self._selector = selectors.DefaultSelector()

    def run(self, wake: socket.socket, stopped: Callable[[], bool]) -> None:
        """Report until `stopped`, which `wake` makes it ask, until rank 0 ends or a verdict."""
        self._selector.register(wake, selectors.EVENT_READ)
        try:
            due = time.monotonic()
            while not stopped():
                for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
                    if key.fileobj is not wake and self._listen():
                        return
                if time.monotonic() >= due:
                    due = time.monotonic() + self._settings.interval_s
                    if self._tick():
                        return
        finally:
            if self._wire is not None:
                self._wire.send({"bye": True})
            self.close()

    def close(self) -> None:
        """Close the connection."""
        self._selector.close()
        if self._wire is not None:
            self._wire.close()

    def _now(self) -> float:
        return self._clock.now(2 * self._settings.interval_s)

    def _tick(self) -> bool:
        """Report and decide; returns whether this is the end."""
        now = self._now()
        if self._wire is None and self._connect():
            return True
        report = self._own_report(now - self._changed_s > self._settings.place_after_s)
        if report.count != self._count:
            self._count, self._changed_s = report.count, now
        if self._wire is not None:
            self._wire.send(asdict(report))
        verdict = judge(now, [self._chief], self._settings.hang_timeout_s)
        return verdict is not None and self._end(verdict)

    def _listen(self) -> bool:
        """Take what rank 0 says; returns whether this is the end."""
        wire = self._wire
        if wire is None:
            return False
        if self._take(wire.receive()):
            return True
        if wire.closed:
            self._selector.unregister(wire)
            self._wire = None
            self._chief = replace(self._chief, state="lost", since_s=self._now())
        return False

    def _take(self, messages: list[dict[str, Any]]) -> bool:
        for message in messages:
            if "verdict" in message:
                return self._end(Verdict.from_message(message["verdict"]))
            if "bye" in message:
                return True
            self._chief = replace(self._chief, heard_s=self._now())
        return False

    def _end(self, verdict: Verdict) -> bool:
        self._on_verdict(verdict)
        return True

    def _connect(self) -> bool:
        """Try each address once; returns whether rank 0 has told the end at once."""
        for address in self._offer.addresses:
            try:
                connection = socket.create_connection(
                    (address, self._offer.port), timeout=_CONNECT_LIMIT_S)
            except OSError:
                continue
            wire = Wire(connection)
            answers = self._greet(wire)
            if answers is None:  # a stranger's
                wire.close()
                continue
            self._selector.register(wire, selectors.EVENT_READ)
            self._wire, now = wire, self._now()
            self._chief = replace(self._chief, state="watched", since_s=now, heard_s=now)
            return self._take(answers)
        return False

    def _greet(self, wire: Wire) -> list[dict[str, Any]] | None:
        """Shake hands; what rank 0 said after that, or None if it is not rank 0."""
        first, nonce = self._wait_for_answer(wire), new_nonce()
        if not first:
            return None
        theirs = str(first[0].get("nonce"))
        wire.send(hello_of(self._offer.token, self._rank, theirs, nonce))
        answers = self._wait_for_answer(wire)
        if wire.closed or not answers or not is_welcome(
                answers[0], self._offer.token, theirs, nonce):
            return None
        return answers[1:]

    @staticmethod
    def _wait_for_answer(wire: Wire) -> list[dict[str, Any]]:
        with selectors.DefaultSelector() as selector:
            selector.register(wire, selectors.EVENT_READ)
            return wire.receive() if selector.select(_CONNECT_LIMIT_S) else []

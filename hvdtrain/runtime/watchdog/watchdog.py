"""`Watchdog`: the thread of one rank, from the exchange of the address to the end."""

from __future__ import annotations

import atexit
import faulthandler
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hvdtrain.log import get_logger
from hvdtrain.runtime.progress import Progress
from hvdtrain.runtime.watchdog.chief import Chief
from hvdtrain.runtime.watchdog.judge import Report
from hvdtrain.runtime.watchdog.leave import Identity, leave
from hvdtrain.runtime.watchdog.member import Member, Offer
from hvdtrain.runtime.watchdog.places import report_of
from hvdtrain.runtime.watchdog.settings import Settings
from hvdtrain.world.failure import REPORT_VARIABLE
from hvdtrain.world.network import interfaces, route_to
from hvdtrain.world.rendezvous import listen_on_all
from hvdtrain.world.world import World

_CLOSE_LIMIT_S = 3.0
_LOOPBACK = "127.0.0.1"


class Watchdog:
    """The watchdog of this rank. Its thread runs from `start` to `close`.

    Args:
        settings: How long to wait; may be changed while it runs.
        progress: Of this rank.
    """

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.settings = settings
        self._progress = progress
        self._loop: Chief | Member | None = None
        self._closing = False
        self._pid = os.getpid()
        self._armed_s = 0.0
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="hvdtrain-watchdog", daemon=True)

    def start(self, loop: Chief | Member) -> None:
        """Begin. The process says goodbye at its ordinary end."""
        self._loop = loop
        self._thread.start()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def close(self) -> None:
        """Say goodbye and stop watching; for the end of a rank that has done its work."""
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        with suppress(OSError):  # it has ended already
            self._waker.send(b"x")
        self._thread.join(_CLOSE_LIMIT_S)
        atexit.unregister(self.close)

    def report(self, with_place: bool) -> Report:
        """This rank's report; and a sign that this thread runs."""
        self._arm()
        return report_of(self._progress, with_place=with_place)

    def _run(self) -> None:
        try:
            if self._loop is not None:
                self._loop.run(self._wake, lambda: self._closing)
        except Exception:
            get_logger().exception("The watchdog of this rank has failed. The training goes on.")
        self._disarm()
        self._wake.close()
        self._waker.close()

    def _arm(self) -> None:
        """Where native code holds Python's lock, a timer of C prints the stacks."""
        limit_s, now = self.settings.hang_timeout_s, time.monotonic()
        if limit_s > 0 and now - self._armed_s > limit_s / 4:
            self._armed_s = now
            faulthandler.dump_traceback_later(limit_s, file=sys.__stderr__ or sys.stderr)
        elif limit_s <= 0:
            self._disarm()

    def _disarm(self) -> None:
        if self._armed_s:
            self._armed_s = 0.0
            faulthandler.cancel_dump_traceback_later()

    def _forget(self) -> None:
        """In a forked child: a connection that it held would outlive this rank."""
        if self._loop is not None and not self._closing:
            self._loop.close()


def start_watchdog(world: World, progress: Progress, exchange: Callable[[Any], list[Any]], *,
                   hang_timeout_s: float, environ: Mapping[str, str]) -> Watchdog | None:
    """Start the watchdog. All ranks; rank 0's `hang_timeout_s` counts for all.

    Args:
        world: Which rank this is.
        progress: What it watches.
        exchange: Callable that gives the value of every rank, in rank order, to every rank.
        hang_timeout_s: Float, how long nothing may happen. 0: no watchdog.
        environ: The environment: tells whether a launcher reads reports of failures, and the
            network interface of the ranks.

    Returns:
        The watchdog, or None for one rank or without a limit.
    """
    if world.size == 1:
        return None
    listeners: list[socket.socket] = []
    offer: Offer | None = None
    if world.is_chief and hang_timeout_s > 0:
        addresses = own_addresses(world, environ)
        listeners = _listen(addresses)
        offer = Offer(addresses=addresses, port=listeners[0].getsockname()[1],
                      token=secrets.token_hex(16), hang_timeout_s=hang_timeout_s)
    everyone = exchange({"host": world.host, "addresses": list(interfaces().values()),
                         "offer": offer and asdict(offer)})
    hosts, offer = [told["host"] for told in everyone], Offer.of(everyone[0]["offer"])
    if offer is None:
        return None
    sources = {_LOOPBACK, *(address for told in everyone for address in told["addresses"])}
    settings = Settings(hang_timeout_s=offer.hang_timeout_s, size=world.size)
    me = Identity(rank=world.rank, size=world.size, host=world.host,
                  report=environ.get(REPORT_VARIABLE) == "1")
    watchdog = Watchdog(settings, progress)
    watchdog.start(
        Member(world.rank, offer, hosts[0], settings, watchdog.report, lambda v: leave(v, me))
        if not listeners else
        Chief(listeners, offer.token, hosts, sources, settings, watchdog.report,
              lambda v: leave(v, me)))
    return watchdog


def _listen(addresses: tuple[str, ...]) -> list[socket.socket]:
    """On one port at each of some addresses of this host."""
    first = listen_on_all(addresses[:1])
    try:
        return first + listen_on_all(addresses[1:], first[0].getsockname()[1])
    except OSError:  # taken at another address; the first one is the best
        return first


def own_addresses(world: World, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The addresses at which other ranks reach this host.

    It is that of the interface that carries the ranks' traffic; where that is not known, as under
    mpirun, all of them.
    """
    if world.local_size == world.size:
        return (_LOOPBACK,)
    has = interfaces()
    found = [has.get(environ.get("HOROVOD_GLOO_IFACE", ""), "")]
    other = next((host for host in world.hosts if host != world.host), None)
    if not found[0] and other is not None:
        with suppress(OSError):
            found = [route_to(other).own_address]
    if not found[0]:
        found = [address for address in has.values() if not address.startswith("127.")]
    return tuple(dict.fromkeys(found)) or (_LOOPBACK,)

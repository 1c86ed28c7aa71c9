"""The watchdog: finds ranks that hang, do not answer or have gone, under every starter.

Each rank has one thread that reports the rank's progress (`progress.py`) to rank 0, over its own
connection (`watchdog_loops.py`): neither the training nor its collective is involved. Rank 0
decides (`watchdog_judge.py`), and all ranks exit with the result.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import secrets
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, NoReturn

from hvdtrain.errors import EXIT_COLLECTIVE, EXIT_TIME_OVER
from hvdtrain.log import get_logger, rank_prefix
from hvdtrain.process import kill_descendants
from hvdtrain.rendezvous.serve import listen_on_all
from hvdtrain.runtime.guard import silence
from hvdtrain.runtime.progress import Progress, RankReport
from hvdtrain.runtime.watchdog_judge import Verdict
from hvdtrain.runtime.watchdog_loops import Chief, Loop, Member, Offer, Settings
from hvdtrain.world import World
from hvdtrain.world.failure import REPORT_VARIABLE, FailureRecord
from hvdtrain.world.network import interfaces, route_to

_CLOSE_LIMIT_S = 3.0
_LOOPBACK = "127.0.0.1"
_ERRORS = {"deadlock": "Deadlock", "silent": "RankSilent", "lost": "RankLost"}
_CAUSE_WAIT_S, _OTHERS_WAIT_S = 0.2, 1.0  # all print first, and the cause is seen to end first
_SAY_LIMIT_S = 3.0  # a rank may hang because nobody reads its output
_LONGEST_TEXT = 120
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INSTALLED = (sysconfig.get_path("stdlib"), _PACKAGE, "<frozen")
_WAITING = (f"{os.sep}tensorflow{os.sep}", f"{os.sep}horovod{os.sep}",
            os.path.join(_PACKAGE, "collectives"))


class Watchdog:
    """The watchdog of this rank; its thread runs from `start` to `close`. `settings` may change."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.settings, self._progress = settings, progress
        self._closing, self._armed_s, self._pid = False, 0.0, os.getpid()
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread()

    def start(self, loop: Loop) -> None:
        """Start the thread. The process says goodbye at its normal end."""
        self._thread = threading.Thread(target=self._run, args=(loop,), name="hvdtrain-watchdog",
                                        daemon=True)
        self._thread.start()
        atexit.register(self.close)
        # In a forked child: a connection that it held would outlive this rank.
        os.register_at_fork(after_in_child=lambda: None if self._closing else loop.close())

    def close(self) -> None:
        """Say goodbye and stop watching, at the end of a rank that has done its work."""
        if not self._closing and os.getpid() == self._pid:
            self._closing = True
            with suppress(OSError):  # it has ended already
                self._waker.send(b"x")
            self._thread.join(_CLOSE_LIMIT_S)
            atexit.unregister(self.close)

    def report(self, with_place: bool) -> RankReport:
        """This rank's report; it also shows that this thread runs."""
        # Where native code holds Python's lock, a timer of C prints the stacks.
        limit_s, now = self.settings.hang_timeout_s, time.monotonic()
        if limit_s <= 0:
            self._disarm()
        elif now - self._armed_s > limit_s / 4:
            self._armed_s = now
            faulthandler.dump_traceback_later(limit_s, file=sys.__stderr__ or sys.stderr)
        return report_of(self._progress, with_place=with_place)

    def _run(self, loop: Loop) -> None:
        try:
            loop.run(self._wake, lambda: self._closing)
        except Exception:
            get_logger().exception("The watchdog of this rank has failed. The training goes on.")
        self._disarm()
        self._wake.close()
        self._waker.close()

    def _disarm(self) -> None:
        if self._armed_s:
            self._armed_s = 0.0
            faulthandler.cancel_dump_traceback_later()


def start_watchdog(world: World, progress: Progress, exchange: Callable[[Any], list[Any]], *,
                   hang_timeout_s: float, environ: Mapping[str, str]) -> Watchdog | None:
    """Start the watchdog, or None for one rank or no limit. All ranks; rank 0's limit is used.

    `exchange` returns the value of every rank, in rank order, on every rank. `environ` tells
    whether a launcher reads reports of failures, and the network interface of the ranks.
    """
    if world.size == 1:
        return None
    listeners: list[socket.socket] = []
    offer: Offer | None = None
    if world.is_chief and hang_timeout_s > 0:
        addresses = own_addresses(world, environ)
        listeners = listen_on_all(addresses[:1])
        port = listeners[0].getsockname()[1]
        with suppress(OSError):  # taken at another address; the first one is the best
            listeners += listen_on_all(addresses[1:], port)
        offer = Offer(addresses=addresses, port=port, token=secrets.token_hex(16),
                      hang_timeout_s=hang_timeout_s)
    everyone = exchange({"host": world.host, "addresses": list(interfaces().values()),
                         "offer": offer and asdict(offer)})
    hosts, told = [rank["host"] for rank in everyone], everyone[0]["offer"]
    if told is None:
        return None
    offer = Offer(**told | {"addresses": tuple(told["addresses"])})
    sources = {_LOOPBACK, *(address for rank in everyone for address in rank["addresses"])}
    settings = Settings(hang_timeout_s=offer.hang_timeout_s, size=world.size)
    watchdog = Watchdog(settings, progress)
    common = (settings, watchdog.report, lambda verdict: leave(verdict, world, environ))
    watchdog.start(Chief(listeners, offer.token, hosts, sources, *common) if listeners else
                   Member(world.rank, offer, hosts[0], *common))
    return watchdog


def own_addresses(world: World, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The addresses at which other ranks reach this host."""
    # It is that of the interface that carries the ranks' traffic; where that is not known, as under
    # mpirun, all of them.
    if world.local_size == world.size:
        return (_LOOPBACK,)
    has = interfaces()
    if found := has.get(environ.get("HOROVOD_GLOO_IFACE", "")):
        return (found,)
    other = next((host for host in world.hosts if host != world.host), None)
    with suppress(OSError):
        if other is not None:
            return (route_to(other).own_address,)
    every = dict.fromkeys(address for address in has.values() if not address.startswith("127."))
    return tuple(every) or (_LOOPBACK,)


def report_of(progress: Progress, *, with_place: bool) -> RankReport:
    """This rank's report. The place costs a walk over a stack."""
    now = progress.snapshot()
    place, waits = place_of(
        now.busy_thread or threading.main_thread().ident) if with_place else ("", False)
    return replace(now, at=now.at[:_LONGEST_TEXT], busy=now.busy[:_LONGEST_TEXT],
                   place=place, waits=waits)


def place_of(thread: int | None) -> tuple[str, bool]:
    """The user's innermost function in a thread (also inside TensorFlow), and whether it waits."""
    innermost = sys._current_frames().get(thread or 0)
    if innermost is None:
        return "", False
    waits = any(part in innermost.f_code.co_filename for part in _WAITING)
    users = (frame for frame, _ in traceback.walk_stack(innermost)
             if not frame.f_code.co_filename.startswith(_INSTALLED)
             and "site-packages" not in frame.f_code.co_filename)
    found = innermost if waits else next(users, innermost)
    code = found.f_code
    place = f"{code.co_name} ({os.path.basename(code.co_filename)}:{found.f_lineno})"
    return place[:_LONGEST_TEXT], waits


def leave(verdict: Verdict, me: World, environ: Mapping[str, str]) -> NoReturn:
    """Print the verdict and end this process, whatever its other threads do."""
    code = EXIT_COLLECTIVE if verdict.kind == "lost" else EXIT_TIME_OVER
    saying = threading.Thread(target=_say, args=(verdict, me, environ, code), daemon=True)
    saying.start()
    saying.join(_SAY_LIMIT_S)
    silence()
    time.sleep(_CAUSE_WAIT_S if me.rank in verdict.causes else _OTHERS_WAIT_S)
    kill_descendants()
    os._exit(code)


def _say(verdict: Verdict, me: World, environ: Mapping[str, str], code: int) -> None:
    stream = sys.__stderr__ or sys.stderr
    if verdict.kind == "deadlock":
        stream.write(f"[{rank_prefix(me.rank, me.size, me.host)}] the Python stacks of this "
                     "rank:\n")
        stream.flush()
        faulthandler.dump_traceback(stream, all_threads=True)
    is_cause = me.rank in verdict.causes
    stream.write(f"hvdtrain: {'deadlock: ' if verdict.kind == 'deadlock' else ''}{verdict.text}\n")
    if environ.get(REPORT_VARIABLE) == "1":  # a launcher reads the line
        message = verdict.text if is_cause else f"ended by the watchdog: {verdict.text}"
        stream.write(FailureRecord(
            rank=me.rank, host=me.host, time_s=time.time(), error=_ERRORS[verdict.kind],
            message=message, primary=is_cause, code=code).to_line())
    stream.flush()

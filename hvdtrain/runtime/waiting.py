"""Waiting for other processes: says for whom, and ends when this process is told to stop."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import TypeVar

from hvdtrain.errors import EXIT_STOPPED, WorldError
from hvdtrain.log import get_logger
from hvdtrain.runtime.stop import stop_signal
from hvdtrain.world.failure import signal_name
from hvdtrain.world.world import World

T = TypeVar("T")

FIRST_WORDS_S = 5.0
"""After which it is said for whom this process waits; then again at each doubling."""
_SHORTEST_S, _LONGEST_S, _GROWTH = 0.05, 0.2, 1.1
_RESOLVE_S = 0.2
_NAMED = 8


class WaitStoppedError(WorldError):
    """A signal asked this process to stop while it waited for others; nothing was trained."""

    exit_code = EXIT_STOPPED


class Wait:
    """One wait, made of pauses.

    Args:
        limit_s: Float, how long it may last.
        words: Callable that says for whom or what this process waits now. Called seldom.
        heeds_stop: Boolean, whether a request to stop ends it.

    Example:
        ```python
        wait = Wait(60.0, lambda: "rank 1 on hostb")
        while not found() and wait.go_on():
            pass
        ```
    """

    def __init__(self, limit_s: float, words: Callable[[], str], *,
                 heeds_stop: bool = True) -> None:
        self.limit_s = limit_s
        self._words = words
        self._heeds_stop = heeds_stop
        self._began_s = time.monotonic()
        self._say_at_s = FIRST_WORDS_S
        self._pause_s = _SHORTEST_S

    def until(self, work: Callable[[], T]) -> T:
        """Run something that may block for long, such as a request to a lost host, in a thread.

        Args:
            work: Callable, which may raise OSError and WorldError.

        Returns:
            What `work` returns.

        Raises:
            WaitStoppedError: This process was told to stop.
            TimeoutError: The time is over.
        """
        done: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                done.append(work())
            except (OSError, WorldError) as error:
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(_SHORTEST_S)
        while thread.is_alive():
            if not self.go_on():
                raise TimeoutError("no answer")
        if failed:
            raise failed[0]
        return done[0]

    def go_on(self) -> bool:
        """Pause for a moment.

        Returns:
            False when the time is over.

        Raises:
            WaitStoppedError: This process was told to stop.
        """
        waited_s = time.monotonic() - self._began_s
        self._check_stop()
        if waited_s > self.limit_s:
            return False
        if waited_s >= self._say_at_s:
            self._say_at_s = 2 * waited_s
            get_logger().warning("Waiting for %s: %.0f s so far, at most %g s.", self._words(),
                                 waited_s, self.limit_s)
        time.sleep(self._pause_s)
        self._pause_s = min(_LONGEST_S, self._pause_s * _GROWTH)
        self._check_stop()
        return True

    def _check_stop(self) -> None:
        number = stop_signal() if self._heeds_stop else 0
        if number:
            try:
                words = self._words()
            except WorldError:  # the rendezvous has gone meanwhile
                words = "the other ranks"
            raise WaitStoppedError(
                f"Stopped on request ({signal_name(number)}) while waiting for {words}. "
                "Nothing was trained.")


def rank_place(world: World, rank: int) -> str:
    """A rank with its host and address, as far as they are known: `rank 1 on hostb (10.0.0.2)`."""
    last = 0
    for host, count in zip(world.hosts, world.slots, strict=True):
        last += count
        if rank < last:
            return f"rank {rank} on {host_place(host)}"
    return f"rank {rank}"


def ranks_place(world: World, ranks: Iterable[int]) -> str:
    """Some ranks with their hosts and addresses; the first few of many."""
    ranks = list(ranks)
    named = ", ".join(rank_place(world, rank) for rank in ranks[:_NAMED])
    return f"{named} and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else named


@cache
def host_place(host: str) -> str:
    """A host with its address, where its name is known; asked for once."""
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

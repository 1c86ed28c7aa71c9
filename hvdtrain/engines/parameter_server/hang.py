"""`HangWatch`: ends the chief when the training does not go on, and says where it stands.

The watchdog of allreduce compares ranks; here only the chief knows how far the training is. A
server or worker that is frozen is found, killed and started again by its own supervisor before;
while one is being started again, the others wait for it, and that is no hang.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence

from hvdtrain.engines.parameter_server.health import greets
from hvdtrain.runtime.progress import Progress
from hvdtrain.runtime.watchdog.judge import Verdict
from hvdtrain.runtime.watchdog.leave import Identity, leave
from hvdtrain.runtime.watchdog.places import report_of
from hvdtrain.world.failure import REPORT_VARIABLE
from hvdtrain.world.world import World

_SHARE = 20
_LONGEST_PAUSE_S = 1.0


class HangWatch:
    """A thread that watches this process.

    Args:
        progress: What it watches.
        world: Which rank this is.
        limit_s: Float, how long nothing may happen outside phases that are known to be slow.
            0: for ever.
        peers: From the names of workers and servers to their addresses `HOST:PORT`.
        start_limit_s: Float, how long one of them may take to start again.
    """

    def __init__(self, progress: Progress, world: World, limit_s: float, *,
                 peers: Mapping[str, str], start_limit_s: float) -> None:
        self._progress, self._limit_s = progress, limit_s
        self._peers, self._start_limit_s = peers, start_limit_s
        self._me = Identity(rank=world.rank, size=world.size, host=world.host,
                            report=os.environ.get(REPORT_VARIABLE) == "1")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdtrain-hang", daemon=True)

    def start(self) -> None:
        """Begin; nothing without a limit."""
        if self._limit_s > 0:
            self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        count, since_s, silent_s = -1, time.monotonic(), None
        while not self._closing.wait(min(_LONGEST_PAUSE_S, self._limit_s / _SHARE)):
            now, time_s = self._progress.snapshot(), time.monotonic()
            if now.count != count or now.slow:
                count, since_s, silent_s = now.count, time_s, None
            elif time_s - since_s > self._limit_s:
                silent = [name for name, address in self._peers.items() if not greets(address)]
                silent_s = (silent_s or since_s) if silent else None
                if silent_s is None or time_s - silent_s > self._start_limit_s:
                    leave(self._verdict(silent, time_s - (silent_s or since_s)), self._me)
                since_s = time_s

    def _verdict(self, silent: Sequence[str], seconds: float) -> Verdict:
        report = report_of(self._progress, with_place=True)
        why = (f"{', '.join(silent)} did not answer in that time. Look at their hosts." if silent
               else "All workers and servers answer. A worker may hang in reading its data; "
                    "--hang-timeout sets the limit.")
        return Verdict(
            kind="deadlock", causes=(self._me.rank,),
            text=f"no worker has finished a batch for {seconds:.0f} s, at {report.at}. {why}")

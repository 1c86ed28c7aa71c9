"""One light rank under the watchdog: no TensorFlow; steps in step with the others by files.

    python watched_rank.py FOLDER HANG_TIMEOUT_S FAULT RANK_OF_THE_FAULT

`Meeting.wait` is the collective: it returns when all ranks have come. The rank of the fault does
what FAULT names at step 5.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hvdtrain import log
from hvdtrain.runtime.guard import install
from hvdtrain.runtime.progress import Progress
from hvdtrain.runtime.watchdog import start_watchdog
from hvdtrain.world import World, detect_world

STEPS, FAULT_STEP = 12, 5


class Meeting:
    """Gathers objects through files of a folder."""

    def __init__(self, folder: Path, world: World) -> None:
        self._folder, self._world, self._number = folder, world, 0

    def gather(self, value: Any) -> list[Any]:
        self._number += 1
        mine = self._folder / f"{self._number}.{self._world.rank}"
        part = self._folder / f"part.{self._world.rank}"
        part.write_bytes(pickle.dumps(value))
        part.rename(mine)
        return [self._read(self._folder / f"{self._number}.{rank}")
                for rank in range(self._world.size)]

    @staticmethod
    def _read(path: Path) -> Any:
        while not path.exists():
            time.sleep(0.01)
        return pickle.loads(path.read_bytes())


def wait_in_the_collective(meeting: Meeting) -> None:
    meeting.gather(None)


def read_a_bad_disk() -> None:
    time.sleep(600)


def do(fault: str, progress: Progress) -> None:
    if fault == "hang":
        read_a_bad_disk()
    elif fault == "hang in reading":
        progress.advance(FAULT_STEP)
        with progress.busy("reading data"):
            read_a_bad_disk()
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raise":
        raise ValueError("bad sample")
    elif fault == "lock":
        ctypes.PyDLL(None).sleep(600)  # holds Python's lock
    elif fault == "save":
        with progress.phase("saving a checkpoint"):
            time.sleep(3.0)


def main() -> None:
    folder, limit_s, fault, faulty = Path(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:5]
    world = detect_world(os.environ)
    log.configure(log.rank_prefix(world.rank, world.size, world.host))
    meeting, progress = Meeting(folder, world), Progress()
    (folder / f"pid.{world.rank}").write_text(str(os.getpid()))
    with install(world, os.environ):
        watchdog = start_watchdog(world, progress, meeting.gather, hang_timeout_s=limit_s,
                                  environ=os.environ)
        for step in range(STEPS):
            if step == FAULT_STEP and world.rank == int(faulty):
                (folder / "fault").touch()
                if fault == "leave":  # as a loop of one's own that ends too early
                    return
                do(fault, progress)
            progress.advance(step)
            wait_in_the_collective(meeting)
            time.sleep(0.02)
        progress.enter("ending")
        assert (watchdog is None) == (limit_s == 0)
    print("done", flush=True)


if __name__ == "__main__":
    main()

"""Program: a rank with Horovod's Gloo, the exchange and the watchdog, and without TensorFlow.

    python -m tests.steady_rank FOLDER

It goes from step to step with the others until there is a file `stop` in FOLDER. Rank 0 writes
the number of the step to the file `step`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from hvdtrain import log
from hvdtrain.rendezvous.barrier import exchange, rendezvous_barrier
from hvdtrain.rendezvous.client import RendezvousClient
from hvdtrain.runtime.guard import install
from hvdtrain.runtime.progress import Progress
from hvdtrain.runtime.watchdog import start_watchdog
from hvdtrain.world import World, detect_world
from tests.cluster.light_rank import horovod

PAUSE_S, HANG_S = 0.05, 60.0


class Gathering:
    """The collective: values of all ranks, through the store of the rendezvous."""

    def __init__(self, world: World) -> None:
        self._world, self._number = world, 0

    def __call__(self, value: Any) -> list[Any]:
        store = RendezvousClient.of(os.environ, f"hvdtrain.test.{self._number // 100}")
        assert store is not None
        texts = exchange(store, self._world, f"gather.{self._number}", json.dumps(value),
                         timeout_s=HANG_S)
        self._number += 1
        return [json.loads(text) for text in texts]


def main() -> None:
    """Be a rank."""
    folder, world = Path(sys.argv[1]), detect_world(os.environ)
    log.configure(log.rank_prefix(world.rank, world.size, world.host))
    gather, progress, step = Gathering(world), Progress(), 0
    with install(world, os.environ):
        rendezvous_barrier(world, os.environ, timeout_s=HANG_S)
        hvd = horovod()
        hvd.init()
        start_watchdog(world, progress, gather, hang_timeout_s=HANG_S, environ=os.environ)
        while not any(gather((folder / "stop").exists())):
            progress.advance(step)
            step += 1
            if world.is_chief:
                (folder / "part").write_text(str(step))
                (folder / "part").rename(folder / "step")
            time.sleep(PAUSE_S)
        progress.enter("ending")
        hvd.shutdown()
        hvd.init()  # Gloo meets once more, through what strangers could reach
        sys.stdout.write(f"done, {hvd.rank()} of {hvd.size()}\n")
        sys.stdout.flush()
        gather("all have come so far")
        hvd.shutdown()


if __name__ == "__main__":
    main()

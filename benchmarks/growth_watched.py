"""Program: a rank of `growth.py watchdog`, watched as in a training, which then stands still.

Prints what rank 0's watchdog thread has used in a second, then waits for its verdict.
"""

import os
import sys
import time

from hvdtrain.collectives.plain import decode, encode
from hvdtrain.rendezvous.barrier import exchange, rendezvous_barrier
from hvdtrain.rendezvous.client import RendezvousClient
from hvdtrain.runtime.progress import Progress
from hvdtrain.runtime.watchdog import start_watchdog
from hvdtrain.world import detect_world

LIMIT_S, QUIET_S, MEASURED_S = 10.0, 1.5, 5.0


def main():
    world = detect_world(os.environ)
    rendezvous_barrier(world, os.environ)
    client = RendezvousClient.of(os.environ, "hvdtrain.growth")

    def everyone(value):
        return [decode(text.encode("latin-1")) for text in exchange(
            client, world, "watchdog", encode(value).decode("latin-1"))]

    progress = Progress()
    watchdog = start_watchdog(world, progress, everyone, hang_timeout_s=LIMIT_S,
                              environ=os.environ)
    clock = time.pthread_getcpuclockid(watchdog._thread.ident)
    used, begun, step = [], time.monotonic(), 0
    while (now := time.monotonic() - begun) < QUIET_S + MEASURED_S:
        progress.advance(step)
        step += 1
        time.sleep(0.05)
        if now >= (QUIET_S if not used else QUIET_S + MEASURED_S - 0.1) and len(used) < 2:
            used.append(time.clock_gettime(clock))
    if world.is_chief:
        sys.stdout.write(f"USED {(used[1] - used[0]) / MEASURED_S}\n")
    sys.stdout.write("STILL\n")
    sys.stdout.flush()
    time.sleep(60.0)


if __name__ == "__main__":
    main()

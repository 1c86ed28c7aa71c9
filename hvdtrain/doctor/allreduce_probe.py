"""Program of a rank: reduces known values, compares them, and measures the speed.

Started by `examine.py` on two ranks with `python -m`, so that they connect as those of `fit` do.
Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

from hvdtrain.horovod_check import check_horovod
from hvdtrain.process import print_answer
from hvdtrain.runtime import guard
from hvdtrain.world.detect import detect_world

FLOATS = 4 << 20  # 16 MiB of float32, the order of a gradient bucket
_MEASURE_S = 3.0
_MOST_ROUNDS = 20


def reduce_and_measure(session: Any) -> dict[str, Any]:
    """Check the values of one sum, then time some. All ranks."""
    import numpy as np
    import tensorflow as tf

    collective, world = session.collective, session.world
    pattern = (np.arange(FLOATS) % 251).astype(np.float32)
    mine = tf.constant(pattern * (world.rank + 1))
    found = collective.reduce([mine], name="hvdtrain.doctor", op="sum")[0].numpy()
    wanted = pattern * sum(range(1, world.size + 1))
    wrong = np.flatnonzero(found != wanted)
    if wrong.size:
        at = int(wrong[0])
        sys.exit(f"{wrong.size} of {FLOATS} sums are wrong; number {at} is {found[at]}, but must "
                 f"be {wanted[at]}")

    def one_round() -> float:
        collective.barrier()
        began = time.perf_counter()
        result = collective.reduce([mine], name="hvdtrain.doctor", op="sum")[0]
        float(result[0])  # a GPU has finished only when a value is here
        took = tf.constant([time.perf_counter() - began], tf.float64)
        # The slowest rank counts, and all ranks must agree on the number of rounds.
        return float(collective.reduce([took], name="hvdtrain.doctor.time", op="max")[0][0])

    rounds = max(1, min(_MOST_ROUNDS, int(_MEASURE_S / one_round())))
    seconds = statistics.median(one_round() for _ in range(rounds))
    return {"collective": session.choice.name, "device": str(session.devices),
            "bytes": FLOATS * 4, "seconds": seconds, "rounds": rounds, "size": world.size}


def main() -> None:
    """Connect to the other rank, and print the result on rank 0."""
    with guard.install(detect_world(os.environ), os.environ):
        from hvdtrain.session import init, shutdown
        horovod = check_horovod()
        session = init(collective="horovod-gloo" if horovod.ok and horovod.gloo else "auto")
        told = reduce_and_measure(session)
        if session.world.is_chief:
            print_answer(told)
        shutdown()


if __name__ == "__main__":
    main()

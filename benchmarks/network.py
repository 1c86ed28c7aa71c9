"""Allreduce over ssh hosts with a slow network, against the least that the network allows.

    python benchmarks/network.py [--hosts 3] [--rate 100] [--floats 25] [--repeats 3]

Root only: three virtual hosts (`tests/cluster/hosts.py`), whose links carry `--rate` Mbit/s in each
direction, and `hvdtrain launch` with one rank on each. The bound of a ring allreduce of B bytes
over n hosts is 2 (n - 1) / n * B / bandwidth (Patarasuk and Yuan, 2009). Prints each time and the
ratio of the best one to the bound.
"""

from __future__ import annotations

import argparse
import sys
import time

from on_hosts import virtual_hosts


def on_rank(floats, repeats, rate_mbit):
    import numpy as np
    import tensorflow as tf

    import hvdtrain
    session = hvdtrain.init()
    collective = session.collective
    n = collective.size
    tensor = tf.ones([floats * 1000 * 1000]) * (collective.rank + 1)
    bound_s = 2 * (n - 1) / n * floats * 4e6 * 8 / (rate_mbit * 1e6)
    times = []
    for repeat in range(repeats + 1):  # the first one also opens connections
        collective.barrier()
        began = time.perf_counter()
        result = collective.reduce([tensor], name="bench.network", op="sum")[0].numpy()
        seconds = time.perf_counter() - began
        if not np.all(result == n * (n + 1) / 2):
            raise SystemExit("the sum is wrong")
        if collective.rank == 0:
            print(f"{'warm-up' if repeat == 0 else 'run'}: {seconds:.2f} s, "
                  f"{seconds / bound_s:.3f} x the bound", flush=True)
        if repeat:
            times.append(seconds)
    if collective.rank == 0:
        print(f"{collective.name}, {n} hosts, {floats}M floats, {rate_mbit:g} Mbit/s: best "
              f"{min(times):.2f} s, bound {bound_s:.2f} s, ratio {min(times) / bound_s:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--floats", type=int, default=25, help="millions")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--starter", default="native")
    parser.add_argument("--on-rank", action="store_true")
    asked = parser.parse_args()
    if asked.on_rank:
        on_rank(asked.floats, asked.repeats, asked.rate)
        return 0
    with virtual_hosts(asked.hosts, asked.rate) as launch:
        launch(["--starter", asked.starter, "--", sys.executable, __file__, "--on-rank",
                *sys.argv[1:]])
    return 0


if __name__ == "__main__":
    sys.exit(main())

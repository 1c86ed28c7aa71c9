"""Compressed gradients: time of a step over a slow network, and within one host.

    python benchmarks/compression_times.py --network 100 [--hosts 2] [--rounds 5]
    hvdtrain launch -np 2 -- python benchmarks/compression_times.py

Trains a perceptron of two hidden layers (1.1 million parameters) with each compression, in blocks
of steps that take turns, and prints the median step of all blocks and the range of the blocks'
medians, as a share of the step without compression in the same round. With `--network MBIT` (root
only) each rank is on a virtual host (`tests/cluster/hosts.py`) whose link carries so many Mbit/s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import get_args

from hvdtrain.config import Compression

COMPRESSIONS = get_args(Compression)


def make_step(compression, session, hidden):
    import keras
    import numpy as np
    import tensorflow as tf

    import hvdtrain
    from hvdtrain.zoo import models
    keras.utils.set_random_seed(0)
    model = models.mlp(hidden=hidden)
    optimizer = hvdtrain.DistributedOptimizer(
        keras.optimizers.Adam(1e-3), options=hvdtrain.ReducerOptions(compression=compression))
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    rng = np.random.default_rng(session.world.rank)
    x = tf.constant(rng.normal(size=(64, 64)).astype("f4"))
    y = tf.constant(rng.integers(0, 10, 64))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss
    return step


def measure(options):
    import hvdtrain
    session = hvdtrain.init()
    names = options.compressions.split(",")
    steps = {name: make_step(name, session, options.hidden) for name in names}
    for step in steps.values():
        for _ in range(3):
            step()
    medians, all_times = {name: [] for name in names}, {name: [] for name in names}
    for _ in range(options.rounds):
        for name, step in steps.items():
            session.collective.barrier()
            times = []
            for _ in range(options.block):
                began = time.perf_counter()
                step().numpy()
                times.append(time.perf_counter() - began)
            medians[name].append(statistics.median(times))
            all_times[name] += times
    if session.world.is_chief:
        print(f"{session.collective.size} ranks, {session.collective.name}, {options.rounds} "
              f"rounds of {options.block} steps\n\n| compression | ms per step | of none |\n"
              "|---|---|---|")
        for name in names:
            ratios = [a / b for a, b in zip(medians[name], medians[names[0]], strict=True)]
            print(f"| {name} | {1e3 * statistics.median(all_times[name]):.1f} "
                  f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |",
                  flush=True)
    session.collective.barrier()
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", type=float, metavar="MBIT")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--compressions", default=",".join(COMPRESSIONS))
    options = parser.parse_args()
    if options.network is None:
        measure(options)
    from on_hosts import virtual_hosts
    with virtual_hosts(options.hosts, options.network) as launch:
        launch(["--", "python", "benchmarks/compression_times.py", "--rounds", str(options.rounds),
                "--block", str(options.block), "--hidden", str(options.hidden),
                "--compressions", options.compressions])


if __name__ == "__main__":
    main()

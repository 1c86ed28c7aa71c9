"""Sparse gradients: bytes sent and time per step of `gather`, `dense` and `auto`.

    hvdtrain launch -np 2 -- python benchmarks/embedding.py
    hvdtrain launch -np 4 -- python benchmarks/embedding.py --optimizers Adam
    python benchmarks/embedding.py --network 1000          # two virtual hosts; root only

Each case is one embedding table under a distributed optimizer. The three ways take turns in one
process, `--block` steps at a time, `--rounds` times, so that what else the machine does meets
all of them. Prints a table: of each way the bytes that a rank sends per step (from its TCP
connections, so under Gloo only; mean over the ranks and rounds) and the milliseconds per step
(median over the rounds, as rank 0 sees them); what `auto` has chosen, and its ratio to the better
of the other two.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time

import numpy as np
from on_hosts import virtual_hosts

CASES = [(100_000, 64, 32, 20), (100_000, 64, 256, 80), (20_000, 64, 128, 100),
         (2_000, 64, 32, 20), (2_000, 64, 64, 100), (500, 32, 64, 50), (96, 64, 16, 64)]
"""Rows and columns of the table, samples per rank, rows used by a sample."""
WAYS = ("gather", "dense", "auto")


def make_step(case, way, name, session):
    import keras
    import tensorflow as tf

    import hvdtrain
    rows, columns, batch, length = case
    table = keras.Variable(np.zeros((rows, columns), "f4"), name="table")
    optimizer = hvdtrain.DistributedOptimizer(
        getattr(keras.optimizers, name)(1e-3), options=hvdtrain.ReducerOptions(sparse=way))
    optimizer.build([table])
    rng = np.random.default_rng(session.world.rank)
    ids = tf.constant(rng.integers(0, rows, (16, batch, length)))
    targets = tf.constant(rng.normal(size=(batch, columns)).astype("f4"))

    @tf.function
    def step(number):
        batch_ids = tf.ensure_shape(ids[number % 16], (batch, length))
        with tf.GradientTape() as tape:
            pooled = tf.reduce_mean(tf.gather(table.value, batch_ids), 1)
            loss = tf.reduce_mean((pooled - targets) ** 2)
        optimizer.apply([tape.gradient(loss, table.value)], [table])
        return loss

    return step


def measure(case, name, session, options):
    import tensorflow as tf

    from hvdtrain.bench.usage import Connections
    connections = Connections()
    steps = {way: make_step(case, way, name, session) for way in WAYS}
    for step in steps.values():
        step(tf.constant(0))
    times, sent = {way: [] for way in WAYS}, {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, step in steps.items():
            session.collective.barrier()
            before, began = connections.totals()[0], time.perf_counter()
            for number in range(options.block):
                loss = step(tf.constant(number))
            float(loss)
            times[way].append((time.perf_counter() - began) / options.block)
            session.collective.barrier()
            sent[way].append((connections.totals()[0] - before) / options.block)
    everyone = session.collective.gather_objects(
        {way: statistics.mean(values) for way, values in sent.items()})
    return {way: {"ms": 1000 * statistics.median(times[way]),
                  "mb": statistics.mean(one[way] for one in everyone) / 1e6} for way in WAYS}


class Decisions(logging.Handler):
    """What the reducers say that they have decided; on the chief."""

    def emit(self, record):
        if "Sparse gradient" in record.msg:
            self.last = record.args[2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", default="SGD,Adam")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--case", type=int, action="append", help="number of a case; several")
    parser.add_argument("--network", type=float, metavar="MBIT",
                        help="start two ranks, each on a virtual host, with links of this speed")
    options = parser.parse_args()
    if options.network:
        with virtual_hosts(2, options.network) as launch:
            given = sys.argv[1:]
            at = given.index("--network")
            launch(["--", sys.executable, __file__, *given[:at], *given[at + 2:]])
        return
    import hvdtrain
    session = hvdtrain.init()
    decisions = Decisions()
    logging.getLogger("hvdtrain").handlers = [decisions]
    if session.world.is_chief:
        print(f"{session.collective.size} ranks, {session.collective.name}\n\n"
              "| table | rows used per rank | optimizer | gather | dense | auto chose | "
              "bytes, time of auto / better |\n|---|---|---|---|---|---|---|", flush=True)
    for number in options.case or range(len(CASES)):
        rows, columns, batch, length = CASES[number]
        for name in options.optimizers.split(","):
            got = measure(CASES[number], name, session, options)
            if not session.world.is_chief:
                continue
            best = {unit: min(got[way][unit] for way in ("gather", "dense"))
                    for unit in ("mb", "ms")}
            shown = [f"{got[way]['mb']:.2f} MB, {got[way]['ms']:.2f} ms" for way in WAYS]
            print(f"| {rows:,} x {columns} | {batch} x {length} | {name} | {shown[0]} | {shown[1]} "
                  f"| {decisions.last}: {shown[2]} | {got['auto']['mb'] / best['mb']:.2f}, "
                  f"{got['auto']['ms'] / best['ms']:.2f} |", flush=True)
    session.collective.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()

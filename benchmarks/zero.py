"""Plain against divided optimizer state (zero): step time, bytes per rank, memory.

    python benchmarks/zero.py [--ranks 2] [--model wide] [--collective mpi4py]

starts `hvdtrain launch` three times. In the first run both optimizers train the same model in the
same processes, in turn: `--rounds` times three steps of each, after two steps of each that are not
counted; the step time is the median over the rounds of the slowest rank. The other two runs train
with one of them only, and read the memory of the process (VmRSS) after ten steps.

`--model deep` is 60 dense layers of 640 (24.3 million parameters, 122 variables), `wide` is 3 of
2,800 (15.9 million, 8 variables), `resnet` is Keras' ResNet50 on 64 x 64 images, `embedding` one
table of 200,000 x 128 before a dense layer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = ("deep", "wide", "resnet", "embedding")
BATCH, STEPS_PER_ROUND = 8, 3


def make_model(name):
    import keras
    layers = keras.layers
    keras.utils.set_random_seed(5)
    if name == "resnet":
        return keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
    if name == "embedding":
        return keras.Sequential([keras.Input((20,), dtype="int32"),
                                 layers.Embedding(200_000, 128),
                                 layers.GlobalAveragePooling1D(), layers.Dense(10)])
    width, depth = (640, 60) if name == "deep" else (2800, 3)
    return keras.Sequential([keras.Input((64,)), *(layers.Dense(width, activation="tanh")
                                                   for _ in range(depth)), layers.Dense(10)])


def make_batch(name, rank):
    import numpy as np
    import tensorflow as tf
    rng = np.random.default_rng(rank)
    if name == "embedding":
        return tf.constant(rng.integers(0, 200_000, (BATCH, 20)), tf.int32)
    shape = (64, 64, 3) if name == "resnet" else (64,)
    return tf.constant(rng.normal(size=(BATCH, *shape)), tf.float32)


def make_step(name, session, zero):
    import keras
    import tensorflow as tf

    import hvdtrain
    model = make_model(name)
    optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam(1e-4), zero=zero)
    optimizer.build(model.trainable_variables)
    x, trained = make_batch(name, session.world.rank), model.trainable_variables

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, [v.value for v in trained]), trained)
        return loss
    return (lambda: step(x)), optimizer, model


def bytes_of(optimizer):
    import numpy as np
    return sum(int(np.prod(v.shape)) * v.value.dtype.size for v in optimizer.variables)


def rss_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def on_rank(args):
    import hvdtrain
    session = hvdtrain.init()
    collective = session.collective
    sides = ("plain", "zero") if args.on_rank == "both" else (args.on_rank,)
    made = {side: make_step(args.model, session, side == "zero") for side in sides}
    mine = {"bytes": {side: bytes_of(optimizer) for side, (_, optimizer, _) in made.items()},
            "parameters": made[sides[0]][2].count_params()}
    for step, _, _ in made.values():
        for _ in range(2 if args.on_rank == "both" else 10):
            float(step())
    mine["rss_mb"] = rss_mb()
    if args.on_rank == "both":
        mine["ms"] = measure(made, collective, args.rounds)
    everyone = collective.gather_objects(mine)
    if session.world.is_chief:
        Path(args.result).write_text(json.dumps(everyone))
    collective.barrier()


def measure(made, collective, rounds):
    """Milliseconds per step of each round, for each side in turn."""
    times = {side: [] for side in made}
    for number in range(rounds):
        order = list(made) if number % 2 == 0 else list(made)[::-1]
        for side in order:
            collective.barrier()
            began = time.perf_counter()
            for _ in range(STEPS_PER_ROUND):
                loss = made[side][0]()
            float(loss)
            times[side].append(1e3 * (time.perf_counter() - began) / STEPS_PER_ROUND)
    return times


def launch(args, side):
    with tempfile.TemporaryDirectory(prefix="hvdtrain-zero-") as folder:
        result = str(Path(folder) / "result.json")
        subprocess.run(
            [sys.executable, "-m", "hvdtrain", "launch", "-np", str(args.ranks), *(
                ["--starter", "mpirun", "--collective", args.collective]
                if args.collective != "horovod-gloo" else []), "--",
             sys.executable, __file__, "--on-rank", side, "--model", args.model,
             "--rounds", str(args.rounds), "--result", result],
            check=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
        return json.loads(Path(result).read_text())


def summary(args):
    both = launch(args, "both")
    slowest = {side: [max(rank["ms"][side][k] for rank in both) for k in range(args.rounds)]
               for side in ("plain", "zero")}
    ratios = [z / p for z, p in zip(slowest["zero"], slowest["plain"], strict=True)]
    row = {"model": args.model, "ranks": args.ranks, "parameters": both[0]["parameters"]}
    for side in ("plain", "zero"):
        row[f"{side}_ms"] = round(statistics.median(slowest[side]), 1)
        row[f"{side}_mb"] = round(max(rank["bytes"][side] for rank in both) / 1e6, 2)
    row["ratio"] = round(statistics.median(ratios), 2)
    row["ratio_range"] = [round(min(ratios), 2), round(max(ratios), 2)]
    row["share"] = round(row["zero_mb"] / row["plain_mb"], 4)
    if args.memory:
        for side in ("plain", "zero"):
            row[f"{side}_rss_mb"] = round(max(r["rss_mb"] for r in launch(args, side)))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, default="deep")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--collective", default="horovod-gloo")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--on-rank", choices=("both", "plain", "zero"), help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_rank:
        on_rank(args)
        return
    print(json.dumps(summary(args)))


if __name__ == "__main__":
    main()

"""Two ranks of one host: each collective against two trainings that know nothing of each other.

    python benchmarks/within_host.py [--rounds 3] [--job cnn mlp]

In turn, `--rounds` times: one process alone; two independent processes at the same time, one core
each; and `hvdtrain.fit` on two ranks over each collective. Tells milliseconds per step (median of
the epochs but the first), and the samples per second of all against those of the independent ones.
`cnn` has 0.6 million parameters and batches of 64 per rank, `mlp` 26 thousand and batches of 32.
Needs two cores, and an mpirun for the collectives over MPI. `--reduce`: instead, the milliseconds
of one fused reduction of 1,000 to 6 million numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = [sys.executable, "-m", "hvdtrain", "launch"]
COLLECTIVES = {"shared-memory": "native", "horovod-gloo": "native", "horovod-mpi": "mpirun",
               "mpi4py": "mpirun"}
STEPS = {"cnn": 60, "mlp": 300}
BATCH = {"cnn": 64, "mlp": 32}
SIZES = (1_000, 26_000, 600_000, 6_000_000)
EPOCHS = 5


def make_model(job):
    import keras
    layers = keras.layers
    keras.utils.set_random_seed(1)
    if job == "mlp":
        stack = [keras.Input((64,)), layers.Dense(128, "relu"), layers.Dense(128, "relu")]
    else:
        stack = [keras.Input((28, 28, 1)), layers.Conv2D(32, 3, padding="same", activation="relu"),
                 layers.MaxPooling2D(), layers.Conv2D(64, 3, padding="same", activation="relu"),
                 layers.MaxPooling2D(), layers.Flatten(), layers.Dense(180, "relu")]
    return keras.Sequential([*stack, layers.Dense(10, "softmax")])


def step_ms(job, how):
    """The milliseconds per step of this rank's training."""
    if how == "alone":
        import tensorflow as tf
        tf.config.threading.set_intra_op_parallelism_threads(1)
        size = 1
    import keras

    import hvdtrain
    if how != "alone":
        size = hvdtrain.init(collective=how).world.size

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.begin = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            times.append(time.perf_counter() - self.begin)
    times = []
    rng = np.random.default_rng(0)
    samples = STEPS[job] * BATCH[job] * size
    x = rng.random((samples, *((64,) if job == "mlp" else (28, 28, 1))), dtype=np.float32)
    y = rng.integers(0, 10, samples).astype(np.int32)
    model = make_model(job)
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
    with contextlib.redirect_stdout(io.StringIO()):
        if how == "alone":
            model.fit(x, y, batch_size=BATCH[job], epochs=EPOCHS, verbose=2, callbacks=[Clock()])
        else:
            config = hvdtrain.TrainConfig(batch="per_rank", batch_per_rank=BATCH[job],
                                          epochs=EPOCHS, lr_scaling="none")
            hvdtrain.fit(model, x, y, config=config, verbose=2, callbacks=[Clock()])
    return 1000 * statistics.median(times[1:]) / STEPS[job]


def reductions(how):
    """The milliseconds of one fused reduction of each size, from a graph."""
    import tensorflow as tf

    import hvdtrain
    collective = hvdtrain.init(collective=how).collective
    found = {}
    for size in SIZES:
        x = tf.Variable(tf.ones([size]))

        @tf.function
        def reduced(x=x, size=size):
            return collective.reduce([x.read_value()], name=f"r{size}", op="average")[0]
        times = []
        for _ in range(60):
            collective.barrier()
            begin = time.perf_counter()
            reduced()
            times.append(1000 * (time.perf_counter() - begin))
        found[size] = statistics.median(times[10:])
    return found


def run(command, processes=1):
    """What each of some processes at the same time has printed as JSON; the ranks of one launch."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    started = [subprocess.Popen(command, text=True, stdout=subprocess.PIPE, env=environment,
                                stderr=subprocess.PIPE, cwd=ROOT) for _ in range(processes)]
    found = []
    for process in started:
        out, err = process.communicate()
        if process.returncode:
            raise SystemExit(out + err)
        found += [json.loads(line.partition("RESULT ")[2]) for line in out.splitlines()
                  if "RESULT " in line]
    return found


def measure(how, rest):
    me = [sys.executable, __file__, "--rank", *rest]
    if how in ("one process", "independent"):
        return run([*me, "alone"], 1 if how == "one process" else 2)
    starter = COLLECTIVES[how]
    return run([*LAUNCH, "-np", "2", "--starter", starter, "--collective", how, "--", *me, how])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--collectives", nargs="+", default=list(COLLECTIVES))
    parser.add_argument("--reduce", action="store_true")
    parser.add_argument("--rank", nargs=2, metavar=("JOB", "HOW"))
    options = parser.parse_args()
    if options.rank:
        job, how = options.rank
        found = reductions(how) if job == "reduce" else step_ms(job, how)
        sys.stdout.write(f"RESULT {json.dumps(found)}\n")
        return
    if options.reduce:
        rounds = [{how: measure(how, ["reduce"])[0] for how in options.collectives}
                  for _ in range(options.rounds)]
        for how in options.collectives:
            print(how, *(f"{statistics.median(r[how][str(size)] for r in rounds):.2f} ms"
                         for size in SIZES), sep="  ")
        return
    for job in options.job:
        ways = ["one process", "independent", *options.collectives]
        rounds = [{how: statistics.mean(measure(how, [job])) for how in ways}
                  for _ in range(options.rounds)]
        for how in ways:
            steps = [r[how] for r in rounds]
            ratios = [r["independent"] / r[how] for r in rounds]
            print(f"{job}  {how}: {statistics.median(steps):.2f} ms per step, speed against "
                  f"independent {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
                  f"{max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()

"""What commits of elastic training cost: the steps around one against the steps before it.

    python benchmarks/commit_cost.py --rounds 3

A perceptron of 25 million parameters with Adam (300 MB) on two ranks of this machine. The time of a
commit is that of the ten steps from the one after which it is written, less ten times the median of
the 20 steps before. Its cost is this time as a share of 100 steps. Two programs one after the other
would show less: their steps differ by a tenth on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

EVERY = 30  # steps; more commits than one in 100, so that a run of some minutes shows several
SCRIPT = """
import json, os, sys, time
import keras
import numpy as np
import hvdtrain

steps, every = map(int, sys.argv[1:])
session = hvdtrain.init()
x = np.random.default_rng(0).normal(size=(32, 2048)).astype("f4")
model = keras.Sequential([
    keras.Input((2048,)), *(keras.layers.Dense(2048, activation="relu") for _ in range(6)),
    keras.layers.Dense(10)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class Clock(keras.callbacks.Callback):
    ended = []

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(time.perf_counter())


clock = Clock()
rows = hvdtrain.ArraySource((np.tile(x, (steps, 1)), np.zeros(32 * steps, "i8")))
hvdtrain.fit(model, rows, verbose=0, callbacks=[clock], config=hvdtrain.TrainConfig(
    batch_per_rank=16, shuffle=False, commit_every_steps=every, check_weights=False))
if session.world.is_chief:
    with open("took.json", "w") as file:
        json.dump({"ended": clock.ended, "parameters": model.count_params(),
                   "MB": [round(entry.stat().st_size / 1e6)
                          for entry in os.scandir(os.environ["HVDTRAIN_COMMITS"])]}, file)
"""


def measured(commits: int) -> tuple[list[float], float]:
    """Seconds of each commit but the first, and of a step."""
    with (tempfile.TemporaryDirectory(prefix="hvdtrain-commits-") as name,
          tempfile.TemporaryDirectory(prefix="hvdtrain-commits-", dir="/dev/shm") as memory):
        Path(name, "train.py").write_text(SCRIPT)
        subprocess.run([sys.executable, "-m", "hvdtrain", "launch", "-np", "2",
                        "--env", f"HVDTRAIN_COMMITS={memory}", "--env", "HVDTRAIN_WORLD=1", "--",
                        sys.executable, "train.py", str(EVERY * (commits + 1) + 11), str(EVERY)],
                       cwd=name, check=True, capture_output=True)
        took = json.loads(Path(name, "took.json").read_text())
    steps = [after - before for before, after in pairwise(took["ended"])]
    # steps[n] is from the end of step n + 1 to that of step n + 2; steps count from 1.
    found = []
    for number in range(2, commits + 2):
        first = EVERY * number - 2  # the step after which it is written
        found.append(sum(steps[first:first + 10])
                     - 10 * statistics.median(steps[first - 20:first]))
    step_s = statistics.median(steps)
    print(f"{took['parameters']:,} parameters: a step {1e3 * step_s:.0f} ms, a commit "
          f"{' '.join(f'{each:.2f}' for each in found)} s; memory of the host: {took['MB']} MB",
          flush=True)
    return found, step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commits", type=int, default=8, help="of each round")
    given = parser.parse_args()
    shares = []
    for _ in range(given.rounds):
        found, step_s = measured(given.commits)
        shares += [each / (100 * step_s) for each in found]
    low, _, high = statistics.quantiles(shares, n=4)
    print(f"a commit every 100 steps costs {statistics.median(shares):.2%} (half of "
          f"{len(shares)}: {low:.2%} to {high:.2%})")


if __name__ == "__main__":
    main()

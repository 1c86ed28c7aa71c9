"""What commits of elastic training cost: steps with one every 100 steps against steps without.

    python benchmarks/commit_cost.py --rounds 5

A perceptron of 25 million parameters with Adam (300 MB) on two ranks of this machine. Each round
has both ways in turn; a way's time is that of the steps after the first 20.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import json, os, sys, time
import keras
import numpy as np
import hvdtrain

steps, warm = int(sys.argv[1]), 20
session = hvdtrain.init()
x = np.random.default_rng(0).normal(size=(32, 2048)).astype("f4")
model = keras.Sequential([
    keras.Input((2048,)), *(keras.layers.Dense(2048, activation="relu") for _ in range(6)),
    keras.layers.Dense(10)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class Clock(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == warm:
            self.began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.ended = time.perf_counter()


clock = Clock()
rows = hvdtrain.ArraySource((np.tile(x, (steps, 1)), np.zeros(32 * steps, "i8")))
hvdtrain.fit(model, rows, verbose=0, callbacks=[clock], config=hvdtrain.TrainConfig(
    batch_per_rank=16, shuffle=False, commit_every_steps=100, check_weights=False))
if session.world.is_chief:
    folder = os.environ.get("HVDTRAIN_COMMITS")
    spent = session.progress.seconds.get("committing", 0.0)
    with open("took.json", "w") as file:
        json.dump({"step_s": (clock.ended - clock.began) / (steps - warm), "committing_s": spent,
                   "MB": [e.stat().st_size / 1e6 for e in os.scandir(folder)] if folder else [],
                   "parameters": model.count_params()}, file)
"""


def measured(steps: int, *, commits: bool) -> dict[str, float]:
    """The figures of one run."""
    with (tempfile.TemporaryDirectory(prefix="hvdtrain-commits-") as name,
          tempfile.TemporaryDirectory(prefix="hvdtrain-commits-", dir="/dev/shm") as memory):
        Path(name, "train.py").write_text(SCRIPT)
        given = ["--env", f"HVDTRAIN_COMMITS={memory}", "--env", "HVDTRAIN_WORLD=1"]
        subprocess.run([sys.executable, "-m", "hvdtrain", "launch", "-np", "2",
                        *(given if commits else ()), "--", sys.executable, "train.py", str(steps)],
                       cwd=name, check=True, capture_output=True)
        return dict(json.loads(Path(name, "took.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=320, help="3 commits within 320 steps")
    given = parser.parse_args()
    ratios = []
    for number in range(given.rounds):
        ways = (False, True) if number % 2 else (True, False)
        found = {way: measured(given.steps, commits=way) for way in ways}
        ratios.append(found[True]["step_s"] / found[False]["step_s"])
        commits = 1 + (given.steps - 1) // 100
        each = found[True]["committing_s"] / commits
        memory = ", ".join(f"{size:.0f} MB" for size in found[True]["MB"])
        print(f"{found[True]['parameters']:,} parameters: {1e3 * found[False]['step_s']:.1f} ms a "
              f"step, with commits {1e3 * found[True]['step_s']:.1f} ms; {each:.2f} s for each of "
              f"{commits} commits; memory of the host: {memory}", flush=True)
    print(f"with commits / without: {statistics.median(ratios):.3f} "
          f"({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rounds)")


if __name__ == "__main__":
    main()

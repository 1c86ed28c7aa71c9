"""Accuracy at equal epochs: parameter servers against allreduce, on the digits.

    python benchmarks/ps_accuracy.py [--seeds 3] [--epochs 15]

`examples/digits_mlp.toml` with two workers each: allreduce over Gloo, ps async, ps sync. Prints
the accuracy on the held-out digits after the last epoch for each seed, and the means.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIT = ["fit", str(ROOT / "examples/digits_mlp.toml"), "--no-tensorboard"]
SIDES = {
    "allreduce": ["-np", "2", *FIT],
    "ps async": ["-np", "4", *FIT, "--engine", "ps", "--ps", "1"],
    "ps sync": ["-np", "4", *FIT, "--engine", "ps", "--ps", "1", "--ps-mode", "sync"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    found = {side: [] for side in SIDES}
    for seed in range(options.seeds):
        for side, words in SIDES.items():
            with tempfile.TemporaryDirectory(prefix="hvdtrain-accuracy-") as folder:
                subprocess.run(
                    [sys.executable, "-m", "hvdtrain", "launch", *words, "--seed", str(seed),
                     "--epochs", str(options.epochs), "--output", folder + "/run"], check=True,
                    cwd=ROOT, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                    stdout=subprocess.DEVNULL)
                last = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()[-1]
                found[side].append(json.loads(last)["val_accuracy"])
    for side, values in found.items():
        print(json.dumps({"side": side, "val_accuracy": [round(v, 4) for v in values],
                          "mean": round(statistics.mean(values), 4)}))


if __name__ == "__main__":
    main()

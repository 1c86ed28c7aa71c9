"""One slow worker, with and without a backup worker: step time, and whether the result changes.

    python benchmarks/ps_straggler.py [--late 0.2] [--rounds 3]

`straggler_job.py` in mode sync, two gradients per update, on one server. The data of the last
worker comes `--late` seconds late. Without a backup there are two workers, with one there are
three. Prints milliseconds per step (epochs 2 to 5, 20 steps each), and the largest difference of
any weight from one process with the batch of both.
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
JOB = str(ROOT / "benchmarks/straggler_job.py")
HVDTRAIN = [sys.executable, "-m", "hvdtrain"]
STEPS = 20
SIDES = {
    "no backup": (["launch", "-np", "4"], ["--ps", "1"], "1"),
    "one backup": (["launch", "-np", "5"], ["--ps", "1", "--ps-backup-workers", "1"], "2"),
}


def run(command, folder, **environ):
    done = subprocess.run(
        [*HVDTRAIN, *command, "--output", folder, "--overwrite", "--no-tensorboard"], cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environ}, capture_output=True,
        text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def difference(one, other):
    import keras
    import numpy as np
    pairs = zip(keras.models.load_model(one).variables, keras.models.load_model(other).variables,
                strict=True)
    return max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--late", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="hvdtrain-straggler-") as folder:
        run(["fit", JOB, "--batch-per-rank", "64"], f"{folder}/one")
        for _ in range(options.rounds):
            for side, (launch, extra, slow) in SIDES.items():
                lines = run([*launch, "fit", JOB, "--engine", "ps", "--ps-mode", "sync", *extra],
                            f"{folder}/{side}", HVDTRAIN_BENCH_LATE_WORKER=slow,
                            HVDTRAIN_BENCH_LATE_S=str(options.late))
                found[side] += [1000 * line["seconds"] / STEPS for line in lines[1:]]
        for side, times in found.items():
            print(json.dumps({
                "side": side, "ms per step": round(statistics.median(times), 1),
                "least": round(min(times), 1), "most": round(max(times), 1),
                "largest difference": difference(f"{folder}/{side}/model.keras",
                                                 f"{folder}/one/model.keras")}))
    medians = [statistics.median(found[side]) for side in SIDES]
    print(json.dumps({"ratio": round(medians[0] / medians[1], 2)}))


if __name__ == "__main__":
    main()

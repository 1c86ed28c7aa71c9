"""What `hvdtrain run` costs against the same script with hvdtrain's own two lines.

    python benchmarks/run_cost.py --rounds 5

Interleaved in one call: the steps of a small training on two ranks, whose ranks time epochs 2 to 6
themselves (the first one traces), and the whole program from start to end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import json, os, time
import keras
import numpy as np
{lines}
rng = np.random.default_rng(0)
x, y = rng.normal(size=(16384, 128)).astype("f4"), rng.integers(0, 10, 16384)
model = keras.Sequential([
    keras.Input((128,)), keras.layers.Dense(256, activation="relu"),
    keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)])
{distribute}
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=64, epochs=1, verbose=0)
begin = time.perf_counter()
model.fit(x, y, batch_size=64, epochs=5, verbose=0)
took = time.perf_counter() - begin
if os.environ["HOROVOD_RANK"] == "0":
    with open("took.json", "w") as file:
        json.dump(took / (5 * 256), file)
"""
WAYS = {
    "run": ({"lines": "", "distribute": ""}, ["run", "train.py"]),
    "two lines": ({"lines": "import hvdtrain\nhvdtrain.init()",
                   "distribute": "hvdtrain.distribute(model)"},
                  ["--", sys.executable, "train.py"]),
}


def measured(way: str) -> tuple[float, float]:
    """Seconds of a step, and of the whole program."""
    parts, command = WAYS[way]
    with tempfile.TemporaryDirectory(prefix="hvdtrain-run-") as name:
        Path(name, "train.py").write_text(SCRIPT.format(**parts))
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "hvdtrain", "launch", "-np", "2", *command],
                       cwd=name, check=True, capture_output=True)
        whole = time.perf_counter() - begin
        return float(json.loads(Path(name, "took.json").read_text())), whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    ratios: dict[str, list[float]] = {"step": [], "program": []}
    for number in range(parser.parse_args().rounds):
        found = {way: measured(way) for way in (
            list(WAYS) if number % 2 else list(reversed(WAYS)))}
        for at, what in enumerate(ratios):
            ratios[what].append(found["run"][at] / found["two lines"][at])
        print({way: f"{1e3 * step:.3f} ms, {whole:.1f} s" for way, (step, whole) in found.items()},
              flush=True)
    for what, values in ratios.items():
        print(f"{what}: run / two lines {statistics.median(values):.3f} "
              f"({min(values):.3f} to {max(values):.3f}, {len(values)} rounds)")


if __name__ == "__main__":
    main()

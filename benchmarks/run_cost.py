"""What `hvdtrain run` costs against the same script with hvdtrain's own two lines.

    python benchmarks/run_cost.py --rounds 5 --epochs 30

Steps: one program on two ranks, in which two equal models train in turn for an epoch each, one by
the two lines and one as an unchanged script is served. Rank 0 times the steps from the 20th on, so
that traces are left out. The whole program, from start to end: both ways in turn, as programs of
their own, whose times vary by a fifth on a machine of two cores.
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

PREPARED = """
import keras
import numpy as np
rng = np.random.default_rng(0)
x, y = rng.normal(size=(16384, 128)).astype("f4"), rng.integers(0, 10, 16384)

def compiled():
    model = keras.Sequential([
        keras.Input((128,)), keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
STEPS = PREPARED + """
import json, sys, time
from pathlib import Path
import hvdtrain
from hvdtrain.script.run import _served
from hvdtrain.script.scan import Scan

class Clock(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 20:
            self.began = time.perf_counter()
    def on_train_batch_end(self, batch, logs=None):
        self.ended = time.perf_counter()

clock, session = Clock(), hvdtrain.init()
models = {"two lines": compiled(), "run": compiled()}
hvdtrain.distribute(models["two lines"])
scan, took = Scan.of(Path("plain.py"), Path()), {way: [] for way in models}
config = hvdtrain.TrainConfig()

def epoch(way):
    models[way].fit(x, y, batch_size=64, verbose=0, callbacks=[clock])
    took[way].append((clock.ended - clock.began) / (256 - 20))

for number in range(int(sys.argv[1])):
    for way in sorted(models, reverse=number % 2):
        if way == "run":
            with _served(scan, config):
                epoch(way)
        else:
            epoch(way)
if session.world.is_chief:
    Path("took.json").write_text(json.dumps(took))
"""
PROGRAM = PREPARED + """
{lines}
model = compiled()
{distribute}
model.fit(x, y, batch_size=64, epochs=3, verbose=0)
"""
WAYS = {
    "run": ({"lines": "", "distribute": ""}, ["run", "train.py"]),
    "two lines": ({"lines": "import hvdtrain\nhvdtrain.init()",
                   "distribute": "hvdtrain.distribute(model)"},
                  ["--", sys.executable, "train.py"]),
}


def launched(folder: Path, *words: str) -> float:
    """Seconds of a program on two ranks."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "hvdtrain", "launch", "-np", "2", *words], cwd=folder,
                   check=True, capture_output=True)
    return time.perf_counter() - begin


def steps(epochs: int) -> list[float]:
    """The ratio of each pair of epochs, run to two lines."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-run-") as name:
        folder = Path(name)
        (folder / "plain.py").write_text(PREPARED + "compiled().fit(x, y)\n")
        (folder / "steps.py").write_text(STEPS)
        launched(folder, "--", sys.executable, "steps.py", str(epochs))
        took = json.loads((folder / "took.json").read_text())
    print(", ".join(f"{way}: {1e3 * statistics.median(each):.3f} ms a step"
                    for way, each in took.items()), flush=True)
    return [a / b for a, b in zip(took["run"], took["two lines"], strict=True)]


def program(way: str) -> float:
    """Seconds of a whole program."""
    parts, command = WAYS[way]
    with tempfile.TemporaryDirectory(prefix="hvdtrain-run-") as name:
        Path(name, "train.py").write_text(PROGRAM.format(**parts))
        return launched(Path(name), *command)


def tell(what: str, ratios: list[float]) -> None:
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{what}: run / two lines {middle:.3f} (half of them {low:.3f} to {high:.3f}, "
          f"{len(ratios)} pairs)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30)
    given = parser.parse_args()
    tell("step", steps(given.epochs))
    ratios = []
    for number in range(given.rounds):
        found = {way: program(way) for way in sorted(WAYS, reverse=bool(number % 2))}
        ratios.append(found["run"] / found["two lines"])
    tell("program", ratios)


if __name__ == "__main__":
    main()

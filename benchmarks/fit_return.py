"""How long after its last file `hvdtrain.fit` returns, over many runs.

    python benchmarks/fit_return.py --runs 50

Each run is a training of its own on two ranks, whose data set has lived for some seconds: deleting
an iterator of tf.data waits for its tuning thread, the longer the iterator has lived. Prints the
times from the modification time of `model.keras` to the return of `fit` on the chief, and those
from the end of the training (`on_train_end`), which hold the deletion and the final model.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VARIABLE = "HVDTRAIN_FIT_RETURN"


def on_rank(order: dict) -> None:
    import keras
    import numpy as np

    import hvdtrain
    session = hvdtrain.init()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1200, 16)).astype("f4")
    y = x[:, :1].copy()
    times, ends, ended = [], [], [0.0]

    class Live(keras.callbacks.Callback):
        """Lets the iterator live for some seconds."""

        def on_epoch_end(self, epoch, logs=None):
            time.sleep(order["lives_s"] / 3)

        def on_train_end(self, logs=None):
            ended[0] = time.time()
    for number in range(order["runs"]):
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        output = Path(order["folder"]) / str(number)
        with contextlib.redirect_stdout(io.StringIO()):
            hvdtrain.fit(
                model, x, y, validation_data=(x[:100], y[:100]), callbacks=[Live()],
                config=hvdtrain.TrainConfig(epochs=3, output=output, tensorboard=False))
        times.append(time.time() - (output / "model.keras").stat().st_mtime)
        ends.append(time.time() - ended[0])
        keras.backend.clear_session(free_memory=False)
    if session.world.is_chief:
        (Path(order["folder"]) / "times.json").write_text(json.dumps([times, ends]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--lives-s", type=float, default=6.0, help="how long each data set lives")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        order = {"runs": given.runs, "lives_s": given.lives_s, "folder": folder}
        subprocess.run(
            [sys.executable, "-m", "hvdtrain", "launch", "-np", "2", "-H", "localhost:2", "--",
             sys.executable, __file__], check=True, stdout=subprocess.DEVNULL,
            env={**os.environ, VARIABLE: json.dumps(order), "TF_CPP_MIN_LOG_LEVEL": "3"})
        found = json.loads((Path(folder) / "times.json").read_text())
    for name, times in zip(("the last file", "on_train_end"), map(sorted, found), strict=True):
        print(f"{len(times)} runs: median {times[len(times) // 2]:.3f} s, the longest "
              f"{', '.join(f'{t:.3f}' for t in times[-3:])} s after {name}")


if __name__ == "__main__":
    if VARIABLE in os.environ:
        on_rank(json.loads(os.environ[VARIABLE]))
    else:
        main()

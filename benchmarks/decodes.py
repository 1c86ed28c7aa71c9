"""How often the samples of a stream are decoded, by each of the ranks that share it.

    python benchmarks/decodes.py --ranks 1 2 --samples 96 --epochs 2

Each run trains on a `tf.data` pipeline `range -> shuffle -> map(decode) -> batch`, and counts the
calls of `decode` in each process: with its length known, with a length that nobody knows (a
filter before), and with augmentation after the decoding. Beside training, the first samples are
looked at once. Prints a table: the decodes of each rank, and how many the epochs need.
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
from pathlib import Path

VARIABLE = "HVDTRAIN_DECODES"


def pipelines(tf, decode, samples: int) -> dict:
    whole = tf.data.Dataset.range(samples).shuffle(samples, seed=1)
    def decoded(dataset):
        return dataset.map(decode, num_parallel_calls=2)
    return {
        "known length": decoded(whole).batch(8).prefetch(2),
        "unknown length": decoded(whole.filter(lambda number: number >= 0)).batch(8),
        "then augmented": decoded(whole).map(
            lambda x, y: (x + tf.random.uniform([4]), y)).batch(8),
    }


def on_rank(order: dict) -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    import hvdtrain
    session = hvdtrain.init()
    calls = [0]

    def call(number):
        calls[0] += 1
        return np.full(4, number, np.float32)

    def decode(number):
        x = tf.numpy_function(call, [number], tf.float32)
        return tf.ensure_shape(x, [4]), tf.ones([1])
    found = {}
    for name, dataset in pipelines(tf, decode, order["samples"]).items():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        calls[0] = 0
        with contextlib.redirect_stdout(io.StringIO()):
            hvdtrain.fit(model, hvdtrain.StreamSource(dataset), config=hvdtrain.TrainConfig(
                epochs=order["epochs"], batch_per_rank=8, tensorboard=False))
        found[name] = session.collective.gather_objects(calls[0])
    if session.world.is_chief:
        Path(order["result"]).write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    print("| pipeline | ranks | decodes of each rank | needed for each |")
    print("|---|---|---|---|")
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            order = {"samples": given.samples, "epochs": given.epochs,
                     "result": f"{folder}/result.json"}
            subprocess.run(
                [sys.executable, "-m", "hvdtrain", "launch", "-np", str(ranks), "-H",
                 f"localhost:{ranks}", "--", sys.executable, __file__], check=True,
                stdout=subprocess.DEVNULL,
                env={**os.environ, VARIABLE: json.dumps(order), "TF_CPP_MIN_LOG_LEVEL": "3"})
            found = json.loads((Path(folder) / "result.json").read_text())
        for name, counts in found.items():
            needed = given.samples * given.epochs // ranks
            print(f"| {name} | {ranks} | {', '.join(map(str, counts))} | {needed} |", flush=True)


if __name__ == "__main__":
    if VARIABLE in os.environ:
        on_rank(json.loads(os.environ[VARIABLE]))
    else:
        main()

"""Compressed gradients: final accuracy and bytes per step on two of the examples.

    hvdtrain launch -np 2 -- python benchmarks/compression.py

Trains `digits_mlp` and `digits_cnn` of `examples/` as they are, with each compression and
`--seeds` seeds, and prints a table: accuracy on the held-out digits after the last epoch (mean and
range over the seeds), its distance to that without compression, the bytes of a step's gradients
that a rank sends (from the shapes and types of the tensors that the collective is given, as ring
algorithms send them), and all bytes that it sends per step after the first epoch (from its TCP
connections, so under Gloo only; with Horovod's own messages, which are many on a busy machine, and
the metrics and checksums that ranks exchange at the end of an epoch).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import runpy
import statistics
from pathlib import Path
from typing import get_args

from hvdtrain.config import Compression

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
JOBS = ("digits_mlp", "digits_cnn")
SHARES = {"reduce": lambda ranks: 2 * (ranks - 1) / ranks, "allgather": lambda ranks: ranks - 1,
          "alltoall": lambda ranks: (ranks - 1) / ranks}
COMPRESSIONS = get_args(Compression)


def counting(collective):
    """A copy of `collective` that adds up the bytes of its operations that a rank sends."""
    import copy

    import tensorflow as tf

    counted = copy.copy(collective)
    counted.sent = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def note(method):
        original, share = getattr(collective, method), SHARES[method](collective.size)

        def call(tensors, *, name, **options):
            each = tensors if isinstance(tensors, list) else [tensors]
            counted.sent.assign_add(share * sum(
                t.shape.num_elements() * t.dtype.size for t in each))
            return original(tensors, name=name, **options)
        setattr(counted, method, call)
    for method in SHARES:
        note(method)
    return counted


def meter(connections):
    import keras

    class Meter(keras.callbacks.Callback):
        before = after = steps = 0

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.before = connections.totals()[0]

        def on_epoch_end(self, epoch, logs=None):
            self.after = connections.totals()[0]
            self.steps = epoch * self.params["steps"]
    return Meter()


def train(name, compression, seed, session, options):
    import keras

    import hvdtrain
    from hvdtrain.bench.usage import Connections
    from hvdtrain.settings import replace
    job = runpy.run_path(str(EXAMPLES / f"{name}.py"))["job"]()
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model, splits, count = job.model(), job.data(), meter(Connections())
    config = replace(job.config, seed=seed, epochs=options.epochs)
    collective = counting(session.collective)
    hvdtrain.DistributedOptimizer(
        model.optimizer, collective=collective, options=hvdtrain.ReducerOptions(
            compression=compression, approximation_rank=options.approximation_rank))
    with contextlib.redirect_stdout(io.StringIO()):
        result = hvdtrain.fit(
            model, splits.train, validation_data=splits.validation, config=config,
            callbacks=[count])
    per_step = (count.after - count.before) / count.steps
    sent = statistics.mean(session.collective.gather_objects(per_step))
    gradients = collective.sent.numpy() / model.optimizer.iterations.numpy()
    return result.history["val_accuracy"][-1], float(gradients), sent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="default: those of the example")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--compressions", default=",".join(COMPRESSIONS))
    parser.add_argument("--approximation-rank", type=int, default=16)
    options = parser.parse_args()
    import hvdtrain
    session = hvdtrain.init()
    if session.world.is_chief:
        print(f"{session.collective.size} ranks, {session.collective.name}, {options.seeds} seeds, "
              f"approximation_rank {options.approximation_rank}\n\n"
              "| job | compression | accuracy | against none | KB of gradients per step | of none "
              "| KB in all |\n|---|---|---|---|---|---|---|", flush=True)
    for name in options.jobs.split(","):
        base = None
        for compression in options.compressions.split(","):
            runs = [train(name, compression, seed, session, options)
                    for seed in range(options.seeds)]
            accuracies = [accuracy for accuracy, *_ in runs]
            mean, gradients, sent = (statistics.mean(values) for values in zip(*runs, strict=True))
            base = base or (mean, gradients)
            if session.world.is_chief:
                print(f"| {name} | {compression} | {100 * mean:.2f} % "
                      f"({100 * min(accuracies):.2f} to {100 * max(accuracies):.2f}) "
                      f"| {100 * (mean - base[0]):+.2f} % | {gradients / 1e3:.2f} "
                      f"| {100 * gradients / base[1]:.1f} % | {sent / 1e3:.1f} |", flush=True)
    session.collective.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()

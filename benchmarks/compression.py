"""Compressed gradients: final accuracy and bytes per step on two of the examples.

    hvdtrain launch -np 2 -- python benchmarks/compression.py

Trains `digits_mlp` and `digits_cnn` of `examples/` as they are, with each compression and
`--seeds` seeds, and prints a table: accuracy on the held-out digits after the last epoch (mean and
range over the seeds), its distance to that without compression, and the bytes that a rank sends
per step after the first epoch (from its TCP connections, so under Gloo only; with the metrics and
checksums that ranks exchange at the end of an epoch).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import runpy
import statistics
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
JOBS = ("digits_mlp", "digits_cnn")
COMPRESSIONS = ("none", "fp16", "bf16", "topk", "lowrank")


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
    from hvdtrain.runtime.usage import Connections
    from hvdtrain.settings import replace
    job = runpy.run_path(str(EXAMPLES / f"{name}.py"))["job"]()
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model, splits, count = job.model(), job.data(), meter(Connections())
    config = replace(job.config, seed=seed, epochs=options.epochs)
    hvdtrain.DistributedOptimizer(model.optimizer, options=hvdtrain.ReducerOptions(
        compression=compression, topk_ratio=options.topk_ratio))
    with contextlib.redirect_stdout(io.StringIO()):
        result = hvdtrain.fit(model, splits.train, validation=splits.validation, config=config,
                              callbacks=[count], session=session)
    per_step = (count.after - count.before) / count.steps
    sent = statistics.mean(session.collective.gather_objects(per_step))
    return result.history["val_accuracy"][-1], sent


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="default: those of the example")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--compressions", default=",".join(COMPRESSIONS))
    parser.add_argument("--topk-ratio", type=float, default=0.04)
    options = parser.parse_args()
    import hvdtrain
    session = hvdtrain.init()
    if session.world.is_chief:
        print(f"{session.collective.size} ranks, {session.collective.name}, {options.seeds} seeds, "
              f"topk_ratio {options.topk_ratio:g}\n\n"
              "| job | compression | accuracy | against none | KB per step | of none |\n"
              "|---|---|---|---|---|---|", flush=True)
    for name in options.jobs.split(","):
        base = None
        for compression in options.compressions.split(","):
            runs = [train(name, compression, seed, session, options)
                    for seed in range(options.seeds)]
            accuracies = [accuracy for accuracy, _ in runs]
            mean, sent = statistics.mean(accuracies), statistics.mean(sent for _, sent in runs)
            base = base or (mean, sent)
            if session.world.is_chief:
                print(f"| {name} | {compression} | {100 * mean:.2f} % "
                      f"({100 * min(accuracies):.2f} to {100 * max(accuracies):.2f}) "
                      f"| {100 * (mean - base[0]):+.2f} % | {sent / 1e3:.1f} "
                      f"| {100 * sent / base[1]:.1f} % |", flush=True)
    session.collective.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()

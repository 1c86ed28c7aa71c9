"""N ranks with batch B against one process with batch N*B: the weights after 20 steps.

    python benchmarks/equality.py --write docs/equality.md

starts itself on 1, 2 and 4 ranks (`hvdtrain launch`) and writes the table. On each rank every
configuration is trained twice from the same weights: by `hvdtrain.fit` on this rank's share, and
by plain Keras (`model.fit`, an optimizer that hvdtrain never saw) on everything.
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

import equality_features
import numpy as np

BATCH, FEATURES, STEPS = 8, 16, 20


def configurations():
    import keras
    o, s = keras.optimizers, keras.optimizers.schedules
    return {
        "SGD": lambda: o.SGD(0.05),
        "SGD momentum": lambda: o.SGD(0.05, momentum=0.9),
        "SGD Nesterov": lambda: o.SGD(0.05, momentum=0.9, nesterov=True),
        "RMSprop": lambda: o.RMSprop(0.01),
        "RMSprop centered, momentum": lambda: o.RMSprop(0.01, momentum=0.5, centered=True),
        "Adam": lambda: o.Adam(0.01),
        "Adam AMSGrad": lambda: o.Adam(0.01, amsgrad=True),
        "AdamW, weight decay": lambda: o.AdamW(0.01, weight_decay=0.1),
        "Adadelta": lambda: o.Adadelta(0.1),
        "Adagrad": lambda: o.Adagrad(0.01),
        "Adamax": lambda: o.Adamax(0.01),
        "Adafactor": lambda: o.Adafactor(0.01),
        "Nadam": lambda: o.Nadam(0.01),
        "Ftrl": lambda: o.Ftrl(0.01),
        "Lion": lambda: o.Lion(0.001),
        "Lamb": lambda: o.Lamb(0.01),
        "Muon": lambda: o.Muon(0.01),
        "ScheduleFreeAdamW": lambda: o.ScheduleFreeAdamW(0.01),
        "SGD, clipnorm": lambda: o.SGD(0.05, clipnorm=0.02),
        "SGD, clipvalue": lambda: o.SGD(0.05, clipvalue=0.002),
        "SGD, global_clipnorm": lambda: o.SGD(0.05, global_clipnorm=0.05),
        "Adam, global_clipnorm": lambda: o.Adam(0.01, global_clipnorm=0.05),
        "SGD, weight decay, global_clipnorm": lambda: o.SGD(
            0.05, momentum=0.9, weight_decay=0.01, global_clipnorm=0.05),
        "SGD, EMA overwriting": lambda: o.SGD(
            0.05, momentum=0.9, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=5),
        "Adam, EMA at the end": lambda: o.Adam(0.01, use_ema=True, ema_momentum=0.9),
        "SGD, ExponentialDecay": lambda: o.SGD(s.ExponentialDecay(0.1, 3, 0.8), momentum=0.9),
        "Adam, CosineDecay with warmup": lambda: o.Adam(
            s.CosineDecay(0.0, 20, warmup_target=0.02, warmup_steps=5)),
        "Adam, PiecewiseConstantDecay": lambda: o.Adam(
            s.PiecewiseConstantDecay([5, 12], [0.01, 0.005, 0.001])),
        "SGD, accumulation 4": lambda: o.SGD(0.05, gradient_accumulation_steps=4),
        "SGD, accumulation 4, global_clipnorm": lambda: o.SGD(
            0.05, momentum=0.9, gradient_accumulation_steps=4, global_clipnorm=0.05),
        "Adam, accumulation 4": lambda: o.Adam(0.01, gradient_accumulation_steps=4),
        "AdamW, accumulation 5, EMA": lambda: o.AdamW(
            0.01, gradient_accumulation_steps=5, use_ema=True),
        "SGD, loss_scale_factor": lambda: o.SGD(
            0.05, loss_scale_factor=1024.0, global_clipnorm=0.05),
        "LossScaleOptimizer(Adam)": lambda: o.LossScaleOptimizer(
            o.Adam(0.01, global_clipnorm=0.05), dynamic_growth_steps=7),
        "LossScaleOptimizer(SGD, accumulation 4)": lambda: o.LossScaleOptimizer(
            o.SGD(0.05, gradient_accumulation_steps=4)),
        "MultiOptimizer(SGD, Adam)": lambda: o.MultiOptimizer(
            o.OptimizerMap(o.SGD(0.05, momentum=0.9), {"d0/.*": o.Adam(0.01)})),
    }


def make_data(size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * size * BATCH, FEATURES)).astype("f4")
    w = rng.normal(size=(FEATURES, 4))
    return x, (np.tanh(x @ w) + 0.1 * rng.normal(size=(len(x), 4))).astype("f4")


def make_model():
    import keras
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    inputs = keras.Input((FEATURES,))
    h = keras.layers.Dense(32, activation="tanh", name="d0",
                           kernel_regularizer=keras.regularizers.L2(1e-3))(inputs)
    h = keras.layers.Dense(32, activation="relu", name="d1",
                           kernel_constraint=keras.constraints.MaxNorm(1.2))(h)
    return keras.Model(inputs, keras.layers.Dense(4, name="d2")(h))


def train_plain(make_optimizer, size):
    x, y = make_data(size)
    model = make_model()
    optimizer = make_optimizer()
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse")
    start = [v.numpy() for v in model.trainable_variables]
    model.fit(x, y, batch_size=size * BATCH, shuffle=False, verbose=0)
    weights = [v.numpy() for v in model.trainable_variables]
    moved = max(float(np.abs(a - b).max()) for a, b in zip(start, weights, strict=True))
    return weights, moved


def train_distributed(make_optimizer, session):
    import hvdtrain
    model = make_model()
    model.compile(hvdtrain.DistributedOptimizer(make_optimizer()), "mse")
    config = hvdtrain.TrainConfig(
        batch_per_rank=BATCH, shuffle=False, lr_scaling="none", check_weights=True)
    with contextlib.redirect_stdout(io.StringIO()):
        hvdtrain.fit(model, *make_data(session.world.size), config=config)
    return model


def compare(name, make_optimizer, session):
    """The row of one configuration: difference, spread over ranks, how far weights moved."""
    from hvdtrain.optim import keras_seam, state
    reference, moved = train_plain(make_optimizer, session.world.size)
    model = train_distributed(make_optimizer, session)
    weights = [v.numpy() for v in model.trainable_variables]
    difference = max(float(np.abs(a - b).max()) for a, b in zip(reference, weights, strict=True))
    everything = [*model.trainable_variables,
                  *keras_seam.shared_variables(model.optimizer)]
    digests = session.collective.gather_objects(state.digests(everything))
    return {"name": name, "difference": difference, "moved": moved,
            "bitwise_equal": all(d == digests[0] for d in digests)}


def on_rank(path):
    import hvdtrain
    session = hvdtrain.init()
    rows = [compare(name, make, session) for name, make in configurations().items()]
    features = equality_features.rows(session)
    if session.world.is_chief:
        Path(path).write_text(json.dumps({"optimizers": rows, "features": features}))
    session.collective.barrier()
    sys.stdout.flush()
    os._exit(0)


def launch(size, path):
    program = [sys.executable, __file__, "--on-rank", path]
    command = program if size == 1 else [
        sys.executable, "-m", "hvdtrain", "launch", "-np", str(size), "--", *program]
    subprocess.run(command, check=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
    return json.loads(Path(path).read_text())


def render(runs):
    import keras
    import tensorflow as tf
    sizes = sorted(runs)
    tables = {size: run["optimizers"] for size, run in runs.items()}
    worst = max(row["difference"] for rows in tables.values() for row in rows)
    equal = all(row["bitwise_equal"] for rows in tables.values() for row in rows)
    lines = [
        "# N ranks against one process", "",
        f"{len(tables[sizes[0]])} optimizer configurations, {STEPS} steps of `fit`, "
        f"batch {BATCH} per rank, float32, against plain Keras on one process with batch "
        f"N*{BATCH}. The model has an L2 regulariser and a MaxNorm constraint.", "",
        f"Largest difference of all: **{worst:.1e}**. Weights and optimizer states of all ranks "
        f"bitwise equal in every row: **{'yes' if equal else 'NO'}**.", "",
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}; written by "
        "`python benchmarks/equality.py --write docs/equality.md`.", "",
        "| configuration | weights moved by | " + " | ".join(
            f"{n} rank{'s' if n > 1 else ''}" for n in sizes) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for i, row in enumerate(tables[sizes[-1]]):
        cells = " | ".join(f"{tables[n][i]['difference']:.1e}" for n in sizes)
        lines.append(f"| {row['name']} | {row['moved']:.2g} | {cells} |")
    lines += [
        "", "## Features", "",
        "The same comparison for what else a training uses (`benchmarks/equality_features.py` says "
        "of each row what is compared with what).", "",
        "| feature | weights moved by | " + " | ".join(
            f"{n} rank{'s' if n > 1 else ''}" for n in sizes) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for i, row in enumerate(runs[sizes[-1]]["features"]):
        cells = " | ".join(f"{runs[n]['features'][i]['difference']:.1e}" for n in sizes)
        moved = "" if row["moved"] is None else f"{row['moved']:.2g}"
        lines.append(f"| {row['name']} | {moved} | {cells} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on-rank")
    parser.add_argument("--sizes", default="1,2,4")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.on_rank:
        on_rank(options.on_rank)
    with tempfile.TemporaryDirectory() as folder:
        tables = {int(n): launch(int(n), f"{folder}/{n}.json") for n in options.sizes.split(",")}
    text = render(tables)
    print(text)
    if options.write:
        options.write.write_text(text)


if __name__ == "__main__":
    main()

"""Engine ps against Keras variables as TensorFlow's own strategy places them.

    python benchmarks/ps_speed.py [--models mlp,deep,embedding] [--rounds 5] [--steps 600]

Two workers and one server as processes of their own, and a chief per measurement, in turn:

- `stock`: a Keras model made under `ParameterServerStrategy.scope()`, each variable on the server;
  a closure trains one batch (the loop of TensorFlow's guide);
- `ps`: hvdtrain's engine in mode async with 10 batches per closure.

Both read the same batches by the same op. Prints batches per second of both workers together,
megabytes that the server sent and received per batch, and the ratios over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BATCH = 64
ROLES = (("worker", 0), ("worker", 1), ("ps", 0))


def make_model(name):
    import keras
    from keras import layers
    keras.utils.set_random_seed(1)
    if name == "mlp":  # 670,000 parameters in 6 variables
        return keras.Sequential([keras.Input((784,)), layers.Dense(512, activation="relu"),
                                 layers.Dense(512, activation="relu"), layers.Dense(10)])
    if name == "deep":  # 164 variables
        small = keras.initializers.RandomNormal(stddev=0.01)
        x = inputs = keras.Input((64,))
        for _ in range(40):
            y = layers.Dense(64, activation="relu")(x)
            x = layers.Add()([x, layers.Dense(64, kernel_initializer=small)(y)])
        return keras.Model(inputs, layers.Dense(10)(layers.Dense(64)(x)))
    return keras.Sequential([  # a table of 12.8 MB, of which a batch uses at most 1,024 rows
        keras.Input((16,), dtype="int32"), layers.Embedding(100_000, 32),
        layers.GlobalAveragePooling1D(), layers.Dense(10)])


def make_data(name):
    import numpy as np
    rng = np.random.default_rng(0)
    if name == "embedding":
        x = rng.integers(0, 100_000, (6400, 16)).astype("int32")
    else:
        x = rng.random((6400, 784 if name == "mlp" else 64), dtype=np.float32)
    return x, rng.integers(0, 10, 6400).astype("int32")


def make_job(name, steps):
    import keras

    import hvdtrain

    def model():
        made = make_model(name)
        made.compile(keras.optimizers.SGD(0.01),
                     keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made
    x, y = make_data(name)
    repeats = -(-steps * BATCH // len(x))
    import numpy as np
    data = (np.concatenate([x] * repeats)[:steps * BATCH],
            np.concatenate([y] * repeats)[:steps * BATCH])
    return hvdtrain.Job(
        name=name, model=model, data=lambda: data,
        config=hvdtrain.TrainConfig(batch_per_rank=BATCH, epochs=2, shuffle=False,
                                    lr_scaling="none"))


def serve(spec, kind, index, name, steps):
    from hvdtrain.bench.usage import start_usage
    from hvdtrain.data.source import splits_of
    from hvdtrain.engines.parameter_server import tf_seam
    from hvdtrain.engines.parameter_server.feeding import Reader
    start_usage(f"{kind}{index}", os.environ)
    if kind == "worker":
        job = make_job(name, steps)
        Reader(splits_of(job.data()), job.config, 1).register()
    tf_seam.serve(spec, kind, index, threads=1)
    sys.stdin.read()
    os._exit(0)


def chief_ps(spec, name, steps):
    import hvdtrain
    from hvdtrain.engines.parameter_server.chief import train
    from hvdtrain.engines.parameter_server.roles import Assignment, Role
    from hvdtrain.runtime.progress import Progress
    times = []
    job = make_job(name, steps)

    def clock():
        import keras

        class Clock(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                times.append(time.time())

            def on_train_batch_end(self, batch, logs=None):
                if batch == steps - 1:
                    times.append(time.time())
        return [Clock()]
    job = hvdtrain.Job(name=name, model=job.model, data=job.data, config=job.config,
                       callbacks=clock)
    train(job, job.config, Assignment(role=Role(kind="chief"), rank=0, size=1, host="here",
                                      cluster=spec, hosts=("here",) * 4),
          progress=Progress(), stop_asked=lambda: False, dry_run=False)
    return times[2], times[3]


def chief_stock(spec, name, steps):
    from hvdtrain.data.source import splits_of
    from hvdtrain.engines.parameter_server import tf_seam
    from hvdtrain.engines.parameter_server.feeding import read_batch
    coordinator = ExitStack().enter_context(tf_seam.connected(spec))
    strategy = coordinator.strategy
    import keras
    import tensorflow as tf
    job = make_job(name, steps)
    splits = splits_of(job.data())
    with strategy.scope():
        model = make_model(name)
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def one(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def closure(step):
        zero = tf.constant(0, tf.int64)
        x, y = read_batch("train", splits.train, zero, step, zero, step + 1)
        return strategy.run(one, args=(x, y))
    for epoch in range(2):
        began = time.time()
        for step in range(steps):
            coordinator.schedule(closure, args=(tf.constant(step, tf.int64),))
        coordinator.join()
        del epoch
    return began, time.time()


def ports(count):
    made = [socket.socket() for _ in range(count)]
    for one in made:
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in made]
    for one in made:
        one.close()
    return found


def server_bytes(folder, begin, end):
    """Bytes through the server between two times, by its own counters."""
    lines = [json.loads(line) for line in (folder / "ps0.jsonl").read_text().splitlines()]

    def at(moment):
        before = [line for line in lines if line["time_s"] <= moment][-1]
        after = next((line for line in lines if line["time_s"] > moment), before)
        span = after["time_s"] - before["time_s"]
        share = (moment - before["time_s"]) / span if span else 0.0
        sums = [line["bytes_sent"] + line["bytes_received"] for line in (before, after)]
        return sums[0] + share * (sums[1] - sums[0])
    return at(end) - at(begin)


def measure(name, options):
    with tempfile.TemporaryDirectory(prefix="hvdtrain-ps-speed-") as folder:
        numbers = ports(3)
        spec = {"worker": [f"127.0.0.1:{n}" for n in numbers[:2]],
                "ps": [f"127.0.0.1:{numbers[2]}"]}
        environ = {**os.environ, "HVDTRAIN_USAGE": folder, "TF_CPP_MIN_LOG_LEVEL": "3"}
        common = [json.dumps(spec), name, str(options.steps)]
        servers = [subprocess.Popen([sys.executable, __file__, "--serve", kind, str(index),
                                     *common], env=environ, stdin=subprocess.PIPE,
                                    stderr=subprocess.DEVNULL) for kind, index in ROLES]
        try:
            found = {"stock": [], "ps": []}
            for _ in range(options.rounds):
                for side, rates in found.items():
                    done = subprocess.run(
                        [sys.executable, __file__, "--chief", side, *common], text=True,
                        env={**environ, "HVDTRAIN_USAGE": ""}, capture_output=True, check=False)
                    if done.returncode:
                        raise SystemExit(done.stderr[-3000:])
                    begin, end = json.loads(done.stdout.splitlines()[-1])
                    time.sleep(0.5)
                    rates.append((options.steps / (end - begin), server_bytes(
                        Path(folder), begin, end) / options.steps / 1e6))
        finally:
            for server in servers:
                server.stdin.close()
                server.wait()
    return found


def summary(values):
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3),
            "max": round(max(values), 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="mlp,deep,embedding")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--serve", nargs=5)
    parser.add_argument("--chief", nargs=4)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.serve:
        kind, index, spec, name, steps = options.serve
        serve(json.loads(spec), kind, int(index), name, int(steps))
    if options.chief:
        side, spec, name, steps = options.chief
        chief = chief_ps if side == "ps" else chief_stock
        times = chief(json.loads(spec), name, int(steps))
        print(json.dumps(times), flush=True)
        os._exit(0)
    for name in options.models.split(","):
        found = measure(name, options)
        print(json.dumps({
            "model": name,
            **{f"{side} batches/s": summary([rate for rate, _ in runs])
               for side, runs in found.items()},
            **{f"{side} MB/batch": summary([size for _, size in runs])
               for side, runs in found.items()},
            "speed ratio": summary([a[0] / b[0] for a, b in zip(
                found["ps"], found["stock"], strict=True)]),
            "bytes ratio": summary([b[1] / a[1] for a, b in zip(
                found["ps"], found["stock"], strict=True)])}), flush=True)


if __name__ == "__main__":
    main()

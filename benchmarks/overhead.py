"""What hvdtrain costs: steps per second against plain Keras and a hand-written Horovod loop.

    python benchmarks/overhead.py                                    # 1 rank: fit / model.fit
    hvdtrain launch -np 2 -- python benchmarks/overhead.py           # 2 ranks: fit / own loop

The two sides run in turn in one process, `--rounds` times, each on a fresh model; the first
epoch of each (tracing) is not counted. Prints steps per second of both and their ratio, as
median and range over the rounds. `--job mlp` has steps of about a millisecond, so that the
share of the overhead is largest; `--job cnn` is the digits CNN.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import time

import numpy as np

BATCH = 32


def make_model(job):
    import keras

    from hvdtrain.zoo import models
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model = models.digits_mlp(dropout=0.0) if job == "mlp" else models.digits_cnn()
    return model, keras.optimizers.Adam(1e-3)


def make_data(job, steps, size):
    rng = np.random.default_rng(0)
    samples = steps * BATCH * size
    shape = (64,) if job == "mlp" else (8, 8, 1)
    return (rng.random((samples, *shape), dtype=np.float32),
            rng.integers(0, 10, samples).astype(np.int32))


def timer():
    import keras

    class Timer(keras.callbacks.Callback):
        begin = end = 0.0

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.begin = time.perf_counter()

        def on_train_end(self, logs=None):
            self.end = time.perf_counter()
    return Timer()


def hvdtrain_fit(job, data, steps, epochs, session):
    import hvdtrain
    model, optimizer = make_model(job)
    model.compile(hvdtrain.DistributedOptimizer(optimizer), "sparse_categorical_crossentropy",
                  metrics=["accuracy"])
    clock = timer()
    config = hvdtrain.TrainConfig(batch_per_rank=BATCH, epochs=epochs, lr_scaling="none")
    with contextlib.redirect_stdout(io.StringIO()):
        hvdtrain.fit(model, *data, config=config, callbacks=[clock])
    return steps * (epochs - 1) / (clock.end - clock.begin)


def plain_fit(job, data, steps, epochs):
    model, optimizer = make_model(job)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"],
                  jit_compile=False)
    clock = timer()
    with contextlib.redirect_stdout(io.StringIO()):
        model.fit(*data, batch_size=BATCH, epochs=epochs, verbose=2, callbacks=[clock])
    return steps * (epochs - 1) / (clock.end - clock.begin)


def own_loop(job, data, steps, epochs, session):
    """What one writes by hand: Horovod's grouped allreduce in a tf.function."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf
    hvd.init()
    rank, size = session.world.rank, session.world.size
    model, optimizer = make_model(job)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
    variables = [v.value for v in model.trainable_variables]
    x, y = data[0][rank::size], data[1][rank::size]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(
        BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            out = model(x, training=True)
            loss = loss_of(y, out)
        grads = tape.gradient(loss, variables)
        grads = hvd.grouped_allreduce(grads, op=hvd.Average, name="own")
        optimizer.apply(grads, model.trainable_variables)
        mean.update_state(loss)
        accuracy.update_state(y, out)

    for epoch in range(epochs):
        if epoch == 1:
            begin = time.perf_counter()
        mean.reset_state()
        accuracy.reset_state()
        for batch in dataset:
            step(*batch)
        float(mean.result()), float(accuracy.result())
    return steps * (epochs - 1) / (time.perf_counter() - begin)


def summary(values):
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3),
            "max": round(max(values), 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    import hvdtrain
    session = hvdtrain.init()
    size = session.world.size
    data = make_data(options.job, options.steps, size)
    args = (options.job, data, options.steps, options.epochs)
    ours, theirs = [], []
    for _ in range(options.rounds):
        ours.append(hvdtrain_fit(*args, session))
        theirs.append(plain_fit(*args) if size == 1 else own_loop(*args, session))
    if session.world.is_chief:
        print(json.dumps({
            "ranks": size, "job": options.job, "collective": session.collective.name,
            "hvdtrain steps/s": summary(ours),
            "model.fit steps/s" if size == 1 else "own loop steps/s": summary(theirs),
            "ratio": summary([a / b for a, b in zip(ours, theirs, strict=True)])}), flush=True)
    session.collective.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()

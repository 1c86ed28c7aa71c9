"""A small job whose rank 0 notes the time of each step, for `elastic.py`."""

import os
import time

import keras
import numpy as np

import hvdtrain


class Noted(keras.callbacks.Callback):
    """Appends to `steps.txt`: world, ranks, time, step."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)  # so that three ranks on two cores leave time for other processes
        if os.environ["HOROVOD_RANK"] == "0":
            with open("steps.txt", "a") as file:
                print(os.environ["HVDTRAIN_WORLD"], os.environ["HOROVOD_SIZE"], time.time(),
                      int(self.model.optimizer.iterations), file=file, flush=True)


def model():
    made = keras.Sequential([
        keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    made.compile(keras.optimizers.Adam(1e-3),
                 keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def data():
    rng = np.random.default_rng(0)
    return rng.random((4096, 64), dtype="f4"), rng.integers(0, 10, 4096)


def job():
    return hvdtrain.Job(
        name="elastic", model=model, data=data, callbacks=lambda: [Noted()],
        config=hvdtrain.TrainConfig(batch_per_rank=32, epochs=100000, lr_scaling="none",
                                    commit_every_steps=20, checkpoint_every_epochs=0))

"""A training that notes every step, for `benchmarks/resume_kills.py`.

CURVE names a folder: each rank appends `epoch step weight` after every step, the weight bit for
bit. KILL=RANK:STEP kills that rank (SIGKILL) after so many steps of this start.
"""

import os
import signal
from pathlib import Path

import keras
import numpy as np

import hvdtrain


class Note(keras.callbacks.Callback):
    """Notes each step, and dies where it was told to."""

    def __init__(self):
        super().__init__()
        rank = hvdtrain.detect_world(os.environ).rank
        self._path = Path(os.environ["CURVE"]) / f"rank{rank}"
        victim, _, step = os.environ.get("KILL", "-1:0").partition(":")
        self._left = int(step) if int(victim) == rank else -1
        self._epoch = 0

    def get_state(self):
        return {}

    def set_state(self, state):
        pass

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if logs is None or not logs:  # a step that the run before has done
            return
        weight = float(self.model.trainable_variables[0].numpy().reshape(-1)[0])
        with self._path.open("a") as stream:
            stream.write(f"{self._epoch} {batch} {weight.hex()}\n")
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def model():
    network = keras.Sequential([
        keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dropout(0.4),
        keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    network.compile(keras.optimizers.Adam(0.02, use_ema=True, ema_overwrite_frequency=10), "mse",
                    metrics=["mae"])
    return network


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(407, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True) + rng.normal(size=(407, 1)).astype("float32")
    return hvdtrain.DataSplits(hvdtrain.ArraySource((x, y)), hvdtrain.ArraySource((x[:50], y[:50])))


def callbacks():
    return [Note(), keras.callbacks.EarlyStopping(patience=50, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.7, min_delta=0.2)]


def job() -> hvdtrain.Job:
    return hvdtrain.Job(
        name="resume", model=model, data=data, callbacks=callbacks,
        config=hvdtrain.TrainConfig(
            batch_per_rank=8, epochs=8, remainder="join", checkpoint_every_steps=5,
            tensorboard=False))

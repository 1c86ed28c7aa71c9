"""A small training in which one rank breaks: the job of `benchmarks/faults.py`.

FAULT=KIND:RANK chooses what happens on which rank in the third epoch; that moment is printed as
`FAULT seconds-since-the-epoch`. Without KIND (`:0`) only the line is printed, for faults that come
from outside.
"""

import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np

import hvdtrain


def break_down(kind):
    if kind == "raise":
        raise ValueError("bad sample in shard 17")
    if kind == "child":
        # Like a data loader's worker: it holds the streams of the rank and outlives it.
        subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(300)",
                          *sys.argv])
        raise ValueError("bad sample in shard 17")
    if kind == "exit0":
        os._exit(0)
    if kind == "exit7":
        sys.exit(7)
    if kind == "hang":
        time.sleep(3600)
    numbers = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
    if kind in numbers:
        os.kill(os.getpid(), numbers[kind])


class Fault(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self._kind, _, rank = os.environ["FAULT"].partition(":")
        self._here = int(rank) == hvdtrain.detect_world(os.environ).rank
        self._epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.005)
        if self._here and self._epoch == 2 and batch == 3:
            print(f"FAULT {time.time():.3f}", file=sys.stderr, flush=True)
            break_down(self._kind)


def model():
    network = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    network.compile(keras.optimizers.Adam(1e-3), "mse")
    return network


def data():
    x = np.random.default_rng(0).normal(size=(320, 8)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def job() -> hvdtrain.Job:
    return hvdtrain.Job(
        name="fault", model=model, data=data, callbacks=lambda: [Fault()],
        config=hvdtrain.TrainConfig(batch_per_rank=16, epochs=100000, tensorboard=False))

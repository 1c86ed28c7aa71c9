"""A job one of whose workers is slow: its data comes late. For `ps_straggler.py`."""

import json
import os
import time

import keras
import numpy as np

import hvdtrain

SAMPLES, FEATURES = 1280, 32


class Late(hvdtrain.ArraySource):
    """Reading takes HVDTRAIN_BENCH_LATE_S seconds in the process of the worker with the number
    HVDTRAIN_BENCH_LATE_WORKER.
    """

    def __init__(self, data):
        super().__init__(data)
        role = json.loads(os.environ.get("HVDTRAIN_PS_ASSIGNMENT", "{}")).get("role", {})
        mine = (role.get("kind"), str(role.get("index")))
        late = mine == ("worker", os.environ.get("HVDTRAIN_BENCH_LATE_WORKER"))
        self.late_s = float(os.environ.get("HVDTRAIN_BENCH_LATE_S", "0")) if late else 0.0

    @property
    def arrays(self):
        return None

    def read(self, rows):
        time.sleep(self.late_s)
        return super().read(rows)


def model():
    network = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(64, "relu"),
                                keras.layers.Dense(10)])
    network.compile(keras.optimizers.SGD(0.05, momentum=0.9),
                    keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return network


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, FEATURES)).astype("float32")
    return Late((x, (x @ rng.normal(size=(FEATURES, 10))).argmax(1).astype("int32")))


def job():
    return hvdtrain.Job(
        name="straggler", model=model, data=data,
        config=hvdtrain.TrainConfig(batch_per_rank=32, epochs=5, lr_scaling="none"))

"""A dense autoencoder on the digits, 64 pixels through a code of 16: as autoencoder.toml.

    hvdtrain launch -np 2 fit examples/autoencoder.py
"""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import hvdtrain


def model():
    network = keras.Sequential([
        keras.Input((64,)),
        layers.Dense(64, activation="relu"),
        layers.Dense(16, name="code"),
        layers.Dense(64, activation="relu"),
        layers.Dense(64, activation="sigmoid"),
    ])
    network.compile(keras.optimizers.Adam(2e-3), "mse")
    return network


def data():
    x = (load_digits().data / 16).astype("float32")
    order = np.random.default_rng(20).permutation(len(x))
    held_out, train = np.split(order, [len(x) // 5])
    # The target is the input itself.
    return hvdtrain.DataSplits(train=hvdtrain.ArraySource((x[train], x[train])),
                               validation=hvdtrain.ArraySource((x[held_out], x[held_out])))


def job() -> hvdtrain.Job:
    return hvdtrain.Job(
        name="autoencoder", model=model, data=data,
        config=hvdtrain.TrainConfig(batch_per_rank=32, epochs=20, lr_scaling="sqrt"))

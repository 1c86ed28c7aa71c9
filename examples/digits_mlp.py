"""A perceptron on scikit-learn's handwritten digits: the same job as digits_mlp.toml.

    hvdtrain launch -np 2 fit examples/digits_mlp.py
"""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import hvdtrain


def model():
    network = keras.Sequential([
        keras.Input((64,)),
        layers.Dense(128, activation="relu"),
        layers.Dropout(0.1),
        layers.Dense(128, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ])
    network.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy",
                    metrics=["accuracy"])
    return network


def data():
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype("float32"), y.astype("int32")
    order = np.random.default_rng(20).permutation(len(x))
    held_out, train = np.split(order, [len(x) // 5])
    return hvdtrain.DataSplits(train=hvdtrain.ArraySource((x[train], y[train])),
                               validation=hvdtrain.ArraySource((x[held_out], y[held_out])))


def job() -> hvdtrain.Job:
    return hvdtrain.Job(
        name="digits_mlp", model=model, data=data,
        # Linear scaling is too much for Adam on a data set this small.
        config=hvdtrain.TrainConfig(batch_per_rank=32, epochs=15, lr_scaling="sqrt",
                                    warmup_epochs=1))

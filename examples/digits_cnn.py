"""A convolutional network on scikit-learn's handwritten digits: the same job as digits_cnn.toml.

    hvdtrain launch -np 2 fit examples/digits_cnn.py
"""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import hvdtrain


def model():
    network = keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 3, padding="same", activation="relu"),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ])
    network.compile(keras.optimizers.SGD(0.02, momentum=0.9), "sparse_categorical_crossentropy",
                    metrics=["accuracy"])
    return network


def data():
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype("float32").reshape(-1, 8, 8, 1), y.astype("int32")
    order = np.random.default_rng(20).permutation(len(x))
    held_out, train = np.split(order, [len(x) // 5])
    return hvdtrain.DataSplits(train=hvdtrain.ArraySource((x[train], y[train])),
                               validation=hvdtrain.ArraySource((x[held_out], y[held_out])))


def job() -> hvdtrain.Job:
    return hvdtrain.Job(
        name="digits_cnn", model=model, data=data,
        config=hvdtrain.TrainConfig(batch_per_rank=16, epochs=15, lr_scaling="linear",
                                    warmup_epochs=2))

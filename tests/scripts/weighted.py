"""Class weights and sample weights, with metrics that are weighted and metrics that are not."""

import keras
import numpy as np

keras.utils.set_random_seed(16)
digits = np.load("digits.npz")
x, y = digits["images"].reshape(-1, 64), digits["labels"]
rare = np.concatenate([np.flatnonzero(y < 7), np.flatnonzero(y >= 7)[:30]])
x, y = x[rare], y[rare]


def make_model():
    network = keras.Sequential([
        keras.Input((64,)), keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(10, activation="softmax")])
    network.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy",
                    metrics=["accuracy"], weighted_metrics=["sparse_categorical_crossentropy"])
    return network


counts = np.bincount(y, minlength=10)
by_class = make_model()
first = by_class.fit(x, y, batch_size=25, epochs=2, class_weight={
    label: len(y) / (10 * count) for label, count in enumerate(counts)})

model = make_model()
weights = np.random.default_rng(16).uniform(0.2, 2.0, len(y)).astype("float32")
history = model.fit(x[:180], y[:180], sample_weight=weights[:180], batch_size=25, epochs=3,
                    validation_data=(x[180:], y[180:], weights[180:]))
evaluation = model.evaluate(x, y, sample_weight=weights, return_dict=True)
predictions = model.predict(x)

"""Batches from a generator that has no end."""

import keras
import numpy as np

keras.utils.set_random_seed(14)
digits = np.load("digits.npz")
images, labels = digits["images"].reshape(-1, 64), digits["labels"]
BATCH = 20


def batches(images, labels, seed):
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(images))
        for start in range(0, len(order), BATCH):
            rows = order[start:start + BATCH]
            yield images[rows] + rng.normal(0, 0.05, (len(rows), 64)), labels[rows]


model = keras.Sequential([
    keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
model.compile(keras.optimizers.Adam(0.01, epsilon=1e-4),
              keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
history = model.fit(batches(images[:240], labels[:240], seed=1), steps_per_epoch=12, epochs=3,
                    shuffle=False, validation_data=(images[240:], labels[240:]))
evaluation = model.evaluate(images[240:], labels[240:], return_dict=True)
predictions = model.predict(images[240:])

"""A `PyDataset` that makes its batches in several threads, and draws their order anew."""

import math

import keras
import numpy as np

keras.utils.set_random_seed(15)
digits = np.load("digits.npz")


class Digits(keras.utils.PyDataset):
    def __init__(self, rows, batch_size, **kwargs):
        super().__init__(**kwargs)
        self.images, self.labels = digits["images"][rows], digits["labels"][rows]
        self.batch_size = batch_size

    def __len__(self):
        return math.ceil(len(self.labels) / self.batch_size)

    def __getitem__(self, number):
        rows = slice(number * self.batch_size, (number + 1) * self.batch_size)
        return self.images[rows].reshape(-1, 64) * 2 - 1, self.labels[rows]


model = keras.Sequential([
    keras.Input((64,)), keras.layers.Dense(32, activation="tanh"),
    keras.layers.Dense(10, activation="softmax")])
model.compile(keras.optimizers.RMSprop(0.005, epsilon=1e-4), "sparse_categorical_crossentropy",
              metrics=["accuracy"])
train, held_out = Digits(slice(0, 230), 32, workers=2), Digits(slice(230, 300), 32, workers=2)
history = model.fit(train, epochs=3, validation_data=held_out)
evaluation = model.evaluate(held_out, return_dict=True)
predictions = model.predict(held_out)

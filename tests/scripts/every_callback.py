"""Callbacks of every kind; one of them predicts."""

import csv

import keras
import numpy as np
from keras import callbacks

keras.utils.set_random_seed(17)
digits = np.load("digits.npz")
x, y = digits["images"].reshape(-1, 64), digits["labels"]
x_train, y_train, x_held, y_held = x[:240], y[:240], x[240:], y[240:]


class Confusion(callbacks.Callback):
    """Counts what is taken for something else after each epoch."""

    def __init__(self):
        super().__init__()
        self.wrong = []

    def on_epoch_end(self, epoch, logs=None):
        found = self.model.predict(x_held, verbose=0).argmax(axis=-1)
        self.wrong.append(int((found != y_held).sum()))


model = keras.Sequential([
    keras.Input((64,)), keras.layers.Dense(32, activation="relu"),
    keras.layers.Dense(10, activation="softmax")])
model.compile(keras.optimizers.SGD(0.2, momentum=0.9), "sparse_categorical_crossentropy",
              metrics=["accuracy"])
confusion, epochs_seen = Confusion(), []
history = model.fit(
    x_train, y_train, batch_size=40, epochs=12, verbose=2, validation_data=(x_held, y_held),
    callbacks=[
        callbacks.LearningRateScheduler(lambda epoch, rate: rate * (0.9 if epoch else 1.0)),
        callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.05),
        callbacks.EarlyStopping(monitor="val_accuracy", patience=3, min_delta=0.02,
                                restore_best_weights=True),
        callbacks.ModelCheckpoint("best-callbacks.keras", monitor="val_loss",
                                  save_best_only=True),
        callbacks.CSVLogger("log.csv"),
        callbacks.TensorBoard("logs"),
        callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs_seen.append(epoch)),
        callbacks.TerminateOnNaN(),
        confusion,
    ])

best = keras.models.load_model("best-callbacks.keras")
evaluation = {"last": model.evaluate(x_held, y_held, verbose=0),
              "best": best.evaluate(x_held, y_held, verbose=0)}
with open("log.csv") as log:
    logged = [float(row["val_loss"]) for row in csv.DictReader(log)]
figures = {"wrong": confusion.wrong, "epochs": epochs_seen, "logged": logged}
predictions = best.predict(x_held)

"""Windows of a time series: a class with weights of classes, a number with weights of samples."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

# hvdtrain: import hvdtrain
# hvdtrain: hvdtrain.init()

keras.utils.set_random_seed(6)
LENGTH, TRAIN = 12, 400

steps = np.arange(520)
series = np.stack([np.sin(steps / 7), np.cos(steps / 11)], axis=1).astype("float32")
series += np.random.default_rng(6).normal(0, 0.1, series.shape).astype("float32")
series = (series - series[:TRAIN].mean(axis=0)) / series[:TRAIN].std(axis=0)
rises = (series[LENGTH:, 0] > 1).astype("int32")


def make_model(activation, optimizer, loss, **metrics):
    network = keras.Sequential([
        keras.Input((LENGTH, 2)), layers.LSTM(16), layers.Dense(1, activation=activation)])
    # hvdtrain: hvdtrain.distribute(network)
    network.compile(optimizer, loss, **metrics)
    return network


train = keras.utils.timeseries_dataset_from_array(
    series[:TRAIN], rises, sequence_length=LENGTH, batch_size=32, shuffle=True, seed=6)
held_out = keras.utils.timeseries_dataset_from_array(
    series[TRAIN:], rises[TRAIN:], sequence_length=LENGTH, batch_size=32)
classifier = make_model("sigmoid", keras.optimizers.Adam(0.01), "binary_crossentropy",
                        metrics=["accuracy"], weighted_metrics=["auc"])
first = classifier.fit(train, validation_data=held_out, epochs=2, class_weight={0: 1.0, 1: 4.0})
classes = classifier.predict(held_out)

windows = keras.utils.timeseries_dataset_from_array(
    series[:TRAIN], None, sequence_length=LENGTH, batch_size=None)
targets = tf.data.Dataset.from_tensor_slices(series[LENGTH:TRAIN, 0])
recent = tf.data.Dataset.from_tensor_slices(np.linspace(0.2, 1.8, TRAIN - LENGTH).astype("float32"))
weighted = tf.data.Dataset.zip((windows, targets, recent)).shuffle(500, seed=6).batch(32)
model = make_model(None, keras.optimizers.RMSprop(0.005), "mse", metrics=["mae"],
                   weighted_metrics=["mse"])
history = model.fit(weighted, epochs=3)
evaluation = model.evaluate(weighted, return_dict=True)
predictions = model.predict(held_out)

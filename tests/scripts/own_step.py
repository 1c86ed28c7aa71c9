"""A model with a `train_step` and a `test_step` of its own, which return metrics."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(13)
digits = np.load("digits.npz")
x, y = digits["images"].reshape(-1, 64), digits["labels"]


class Classifier(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy()

    @property
    def metrics(self):
        return [self.loss_tracker, self.accuracy]

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            probabilities = self(images, training=True)
            loss = self.loss_fn(labels, probabilities)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss, sample_weight=tf.shape(images)[0])
        self.accuracy.update_state(labels, probabilities)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        images, labels = data
        probabilities = self(images, training=False)
        self.loss_tracker.update_state(self.loss_fn(labels, probabilities),
                                       sample_weight=tf.shape(images)[0])
        self.accuracy.update_state(labels, probabilities)
        return {metric.name: metric.result() for metric in self.metrics}


inputs = keras.Input((64,))
hidden = keras.layers.Dense(32, activation="relu")(inputs)
model = Classifier(inputs=inputs, outputs=keras.layers.Dense(10, activation="softmax")(hidden))
model.compile(keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True))
history = model.fit(x[:240], y[:240], batch_size=24, epochs=3, validation_data=(x[240:], y[240:]))
evaluation = model.evaluate(x[240:], y[240:], return_dict=True)
predictions = model.predict(x[240:])

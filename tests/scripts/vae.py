"""A variational autoencoder: a `train_step` of its own, with trackers and sampling."""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

# hvdtrain: import hvdtrain
# hvdtrain: hvdtrain.init()

keras.utils.set_random_seed(4)
# Each rank draws its own noise; made of the data it is the same on any number of ranks.
RANDOM_NOISE = "EXACT" not in os.environ


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = (keras.random.normal(ops.shape(mean), seed=self.seed_generator) if RANDOM_NOISE
                 else ops.stop_gradient(ops.sin(20 * mean)))
        return mean + ops.exp(0.5 * log_variance) * noise


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance, code = self.encoder(data)
            reconstruction = self.decoder(code)
            reconstruction_loss = ops.mean(ops.sum(
                keras.losses.binary_crossentropy(data, reconstruction), axis=(1, 2)))
            kl_loss = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        gradients = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {metric.name: metric.result() for metric in self.metrics}


encoder_inputs = keras.Input((8, 8, 1))
x = layers.Conv2D(8, 3, activation="relu", strides=2, padding="same")(encoder_inputs)
x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
z_mean = layers.Dense(2, name="z_mean")(x)
z_log_var = layers.Dense(2, name="z_log_var")(x)
encoder = keras.Model(encoder_inputs, [z_mean, z_log_var, Sampling()([z_mean, z_log_var])])

decoder = keras.Sequential([
    keras.Input((2,)),
    layers.Dense(4 * 4 * 8, activation="relu"),
    layers.Reshape((4, 4, 8)),
    layers.Conv2DTranspose(8, 3, activation="relu", strides=2, padding="same"),
    layers.Conv2D(1, 3, activation="sigmoid", padding="same"),
])

digits = np.load("digits.npz")["images"]
model = VAE(encoder, decoder)
# hvdtrain: hvdtrain.distribute(model)
model.compile(optimizer=keras.optimizers.Adam(0.005))
history = model.fit(digits, epochs=3, batch_size=64)

z_mean, _, _ = model.encoder.predict(digits)
predictions = model.decoder.predict(z_mean)

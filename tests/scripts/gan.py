"""A generative adversarial network: two optimizers, a `compile` and a `train_step` of its own."""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

# hvdtrain: import hvdtrain
# hvdtrain: hvdtrain.init()

keras.utils.set_random_seed(5)
# Each rank draws its own noise; made of the data it is the same on any number of ranks.
RANDOM_NOISE = "EXACT" not in os.environ
LATENT = 8
PROJECTION = np.random.default_rng(5).normal(size=(64, LATENT)).astype("float32")


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def latent_vectors(self, images):
        if RANDOM_NOISE:
            return keras.random.normal((ops.shape(images)[0], LATENT), seed=self.seed_generator)
        return ops.matmul(ops.reshape(images, (-1, 64)) - 0.5, PROJECTION)

    def train_step(self, images):
        batch_size = ops.shape(images)[0]
        generated = self.generator(self.latent_vectors(images))
        both = ops.concatenate([generated, images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        if RANDOM_NOISE:
            labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed_generator)

        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(
            zip(gradients, self.discriminator.trainable_weights, strict=True))

        with tf.GradientTape() as tape:
            faked = self.discriminator(self.generator(self.latent_vectors(images)))
            g_loss = self.loss_fn(ops.zeros((batch_size, 1)), faked)
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(
            zip(gradients, self.generator.trainable_weights, strict=True))

        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}


discriminator = keras.Sequential([
    keras.Input((8, 8, 1)),
    layers.Conv2D(8, 3, strides=2, padding="same"),
    layers.LeakyReLU(negative_slope=0.2),
    layers.GlobalAveragePooling2D(),
    layers.Dense(1),
])
generator = keras.Sequential([
    keras.Input((LATENT,)),
    layers.Dense(4 * 4 * 8),
    layers.LeakyReLU(negative_slope=0.2),
    layers.Reshape((4, 4, 8)),
    layers.Conv2DTranspose(8, 4, strides=2, padding="same"),
    layers.LeakyReLU(negative_slope=0.2),
    layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
])

digits = tf.data.Dataset.from_tensor_slices(np.load("digits.npz")["images"])
digits = digits.shuffle(buffer_size=1024, seed=5).batch(64)
model = GAN(discriminator, generator)
# hvdtrain: hvdtrain.distribute(model)
model.compile(
    d_optimizer=keras.optimizers.Adam(0.003), g_optimizer=keras.optimizers.Adam(0.003),
    loss_fn=keras.losses.BinaryCrossentropy(from_logits=True))
history = model.fit(digits, epochs=3)

latent = np.random.default_rng(6).normal(size=(10, LATENT)).astype("float32")
predictions = model.generator.predict(latent)

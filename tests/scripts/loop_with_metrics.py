"""A loop of one's own with a `GradientTape`, and metrics of Keras for the figures."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(18)
digits = np.load("digits.npz")
x, y = digits["images"].reshape(-1, 64), digits["labels"]
train_dataset = tf.data.Dataset.from_tensor_slices((x[:240], y[:240]))
train_dataset = train_dataset.shuffle(buffer_size=240, seed=18).batch(30)
val_dataset = tf.data.Dataset.from_tensor_slices((x[240:], y[240:])).batch(30)

inputs = keras.Input((64,))
hidden = keras.layers.Dense(32, activation="relu")(inputs)
model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
optimizer = keras.optimizers.SGD(learning_rate=0.1, momentum=0.9)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
train_loss = keras.metrics.Mean()
train_accuracy = keras.metrics.SparseCategoricalAccuracy()
val_accuracy = keras.metrics.SparseCategoricalAccuracy()


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = loss_fn(labels, logits)
    gradients = tape.gradient(loss, model.trainable_weights)
    optimizer.apply(gradients, model.trainable_weights)
    train_loss.update_state(loss)
    train_accuracy.update_state(labels, logits)


history = {"loss": [], "accuracy": [], "val_accuracy": []}
for epoch in range(3):
    for images, labels in train_dataset:
        train_step(images, labels)
    for images, labels in val_dataset:
        val_accuracy.update_state(labels, model(images, training=False))
    history["loss"].append(float(train_loss.result()))
    history["accuracy"].append(float(train_accuracy.result()))
    history["val_accuracy"].append(float(val_accuracy.result()))
    print(f"Epoch {epoch}: {train_loss.result():.4f}, {val_accuracy.result():.3f}")
    for metric in (train_loss, train_accuracy, val_accuracy):
        metric.reset_state()

predictions = model.predict(x[240:])
evaluation = {"accuracy": float(np.mean(predictions.argmax(-1) == y[240:]))}

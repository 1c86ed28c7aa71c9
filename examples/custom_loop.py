"""A training loop of one's own on N ranks, each with its part of the same batches.

    hvdtrain launch -np 2 -- python examples/custom_loop.py
    python examples/custom_loop.py
"""

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdtrain

EPOCHS, BATCH = 15, 32

hvdtrain.init()

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0)

keras.utils.set_random_seed(0)
# The same batches on all ranks, of which each has its part.
batches = hvdtrain.shard(
    tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(BATCH))
x_test, y_test = hvdtrain.shard((x_test, y_test))

model = keras.Sequential([
    keras.Input((64,)),
    layers.Dense(128, activation="relu"),
    layers.Dense(128, activation="relu"),
    layers.Dense(10, activation="softmax"),
])
loss_fn = keras.losses.SparseCategoricalCrossentropy()
optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam(1e-3))
optimizer.build(model.trainable_variables)

# All ranks begin with the chief's weights, whatever their random seeds did.
hvdtrain.broadcast_variables([*model.variables, *optimizer.variables])


@tf.function
def train_step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = loss_fn(targets, model(inputs, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)  # averages over the ranks first
    return loss


for epoch in range(EPOCHS):
    loss_sum, samples = 0.0, 0
    for inputs, targets in batches:
        loss_sum += float(train_step(inputs, targets)) * len(targets)
        samples += len(targets)
    loss_sum, samples = hvdtrain.allreduce((loss_sum, samples), op="sum")
    hvdtrain.print_on_chief(f"epoch {epoch + 1}: loss {loss_sum / float(samples):.4f}")

everyone = hvdtrain.gather([v.numpy() for v in model.trainable_variables])
equal = all((a == b).all() for theirs in everyone for a, b in zip(theirs, everyone[0], strict=True))
hvdtrain.print_on_chief(f"all ranks hold the same weights: {equal}")

right = tf.math.count_nonzero(tf.argmax(model(x_test), -1) == y_test)
right, samples = hvdtrain.allreduce((right, len(y_test)), op="sum")
hvdtrain.print_on_chief(
    f"accuracy on {samples} held-out samples: {float(right) / float(samples):.4f}")

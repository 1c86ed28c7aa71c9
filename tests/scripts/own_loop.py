"""A training loop of one's own, with two optimizers that clip by the global norm."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

# hvdtrain: import hvdtrain
# hvdtrain: hvdtrain.init()
# hvdtrain: print = hvdtrain.print_on_chief

keras.utils.set_random_seed(8)
digits = np.load("digits.npz")
x, y = digits["images"], digits["labels"]
train = tf.data.Dataset.from_tensor_slices((x[:240], y[:240])).shuffle(240, seed=8).batch(24)
# hvdtrain: train = hvdtrain.shard(train)

features = keras.Sequential([
    keras.Input((8, 8, 1)), layers.Conv2D(8, 3, activation="relu"), layers.Flatten()])
head = keras.Sequential([keras.Input((288,)), layers.Dense(10)])
model = keras.Sequential([features, head])
slow = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)
fast = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
slow.build(features.trainable_variables)
fast.build(head.trainable_variables)
# hvdtrain: slow, fast = map(hvdtrain.DistributedOptimizer, (slow, fast))
# hvdtrain: hvdtrain.broadcast_variables([*model.variables, *slow.variables, *fast.variables])
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train_step(images, labels):
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_fn(labels, model(images, training=True))
    for optimizer, part in ((slow, features), (fast, head)):
        gradients = tape.gradient(loss, part.trainable_variables)
        optimizer.apply(gradients, part.trainable_variables)
    return loss


history = {"loss": []}
for epoch in range(4):
    loss = np.mean([train_step(images, labels) for images, labels in train])
    # hvdtrain: loss = float(hvdtrain.allreduce(loss))
    history["loss"].append(loss)
    print(f"Epoch {epoch}: loss {loss:.4f}")

evaluation = {"loss": float(loss_fn(y[240:], model(x[240:])))}
predictions = model(x[240:]).numpy()

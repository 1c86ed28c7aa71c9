"""A training loop of one's own: what `hvdtrain.fit` does, in its barest form.

    hvdtrain launch -np 2 -- python examples/custom_loop.py
    python examples/custom_loop.py
"""

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdtrain
from hvdtrain.data.shard import ShardPlan, evaluation_rows
from hvdtrain.optim import state

EPOCHS, BATCH_PER_RANK = 15, 32

session = hvdtrain.init()
rank, size = session.world.rank, session.world.size

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
x, x_test, y, y_test = map(tf.constant, train_test_split(x, y, test_size=0.2, random_state=0))
# Which samples this rank takes, in which order; every rank has the same number of steps.
shards = ShardPlan(samples=len(x), rank=rank, size=size, batch_per_rank=BATCH_PER_RANK)

keras.utils.set_random_seed(0)
model = keras.Sequential([
    keras.Input((64,)),
    layers.Dense(128, activation="relu"),
    layers.Dense(128, activation="relu"),
    layers.Dense(10, activation="softmax"),
])
loss_fn = keras.losses.SparseCategoricalCrossentropy()
optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam(1e-3 * size ** 0.5))
optimizer.build(model.trainable_variables)

# All ranks begin with the chief's weights, whatever their random seeds did.
variables = [*model.variables, *optimizer.variables]
state.broadcast(session.collective, variables)


@tf.function
def train_step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = loss_fn(targets, model(inputs, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)  # averages over the ranks first
    return loss


def sum_over_ranks(name, *values):
    sums = session.collective.reduce([tf.constant(values, tf.float64)], name=name, op="sum")
    return sums[0].numpy()


for epoch in range(EPOCHS):
    rows, loss_sum = shards.order(epoch), 0.0
    for start in range(0, len(rows), BATCH_PER_RANK):
        batch = rows[start:start + BATCH_PER_RANK]
        loss_sum += float(train_step(tf.gather(x, batch), tf.gather(y, batch))) * len(batch)
    loss_sum, samples = sum_over_ranks("loss", loss_sum, len(rows))
    state.check_equal(session.collective, variables, when=f"after epoch {epoch + 1}")
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {loss_sum / samples:.4f}")

held_out = evaluation_rows(len(x_test), rank, size)
right = tf.argmax(model(tf.gather(x_test, held_out)), -1) == tf.gather(y_test, held_out)
right, samples = sum_over_ranks("right", float(tf.math.count_nonzero(right)), len(held_out))
if rank == 0:
    print(f"accuracy on {samples:.0f} held-out samples: {right / samples:.4f}")

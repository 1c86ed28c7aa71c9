"""Horovod's example of a loop of one's own in TensorFlow 2 (2019)."""

import argparse
import os

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

parser = argparse.ArgumentParser()
parser.add_argument('--batch-size', type=int, default=8)
parser.add_argument('--base-lr', type=float, default=0.001)
parser.add_argument('--steps', type=int, default=48)
args = parser.parse_args()

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin GPU to be used to process local rank (one GPU per process)
gpus = tf.config.experimental.list_physical_devices('GPU')
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], 'GPU')

tf.keras.utils.set_random_seed(11)
with np.load('digits.npz') as digits:
    mnist_images, mnist_labels = digits['images'], digits['labels']

dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(mnist_images, tf.float32), tf.cast(mnist_labels, tf.int64))
)
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().batch(args.batch_size)

mnist_model = tf.keras.Sequential([
    tf.keras.layers.Conv2D(8, [3, 3], activation='relu'),
    tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(32, activation='relu'),
    tf.keras.layers.Dense(10, activation='softmax')
])
loss = tf.losses.SparseCategoricalCrossentropy()

# Horovod: adjust learning rate based on number of GPUs.
opt = tf.optimizers.Adam(args.base_lr * hvd.size(), epsilon=1e-4)

checkpoint_dir = './custom-loop'
checkpoint = tf.train.Checkpoint(model=mnist_model, optimizer=opt)
mean_loss = tf.keras.metrics.Mean()


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = mnist_model(images, training=True)
        loss_value = loss(labels, probs)

    # Horovod: add Horovod Distributed GradientTape.
    tape = hvd.DistributedGradientTape(tape)

    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables))

    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    # This is necessary to ensure consistent initialization of all workers when
    # training is started with random weights or restored from a checkpoint.
    #
    # Note: broadcast should be done after the first gradient step to ensure optimizer
    # initialization.
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)

    return loss_value


history = {'loss': []}
# Horovod: adjust number of steps based on number of GPUs.
for batch, (images, labels) in enumerate(dataset.take(args.steps // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)
    mean_loss.update_state(loss_value)

    if batch % 4 == 3:
        history['loss'].append(float(hvd.allreduce(mean_loss.result())))
        mean_loss.reset_states()
        if hvd.local_rank() == 0:
            print('Step #%d\tLoss: %.6f' % (batch, history['loss'][-1]))

# Horovod: save checkpoints only on worker 0 to prevent other workers from
# corrupting it.
if hvd.rank() == 0:
    checkpoint.save(os.path.join(checkpoint_dir, 'checkpoint'))
predictions = mnist_model(mnist_images[:20]).numpy()

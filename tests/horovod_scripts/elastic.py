"""Horovod's elastic example of Keras in TensorFlow 2 (2020)."""

import argparse

import numpy as np
import tensorflow as tf

import horovod.tensorflow.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument('--batch-size', type=int, default=8)
parser.add_argument('--base-lr', type=float, default=0.001)
parser.add_argument('--steps', type=int, default=36)
args = parser.parse_args()

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin GPU to be used to process local rank (one GPU per process)
gpus = tf.config.experimental.list_physical_devices('GPU')
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], 'GPU')

tf.keras.utils.set_random_seed(21)
with np.load('digits.npz') as digits:
    images, labels = digits['images'], digits['labels']
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(images, tf.float32), tf.cast(labels, tf.int64)))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().batch(args.batch_size)

model = tf.keras.Sequential([
    tf.keras.layers.Conv2D(8, [3, 3], activation='relu'),
    tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(10, activation='softmax')
])

# Horovod: adjust learning rate based on number of GPUs.
scaled_lr = args.base_lr * hvd.size()
opt = tf.optimizers.Adam(scaled_lr, epsilon=1e-4)

# Horovod: add Horovod DistributedOptimizer.
opt = hvd.DistributedOptimizer(opt)

model.compile(loss=tf.losses.SparseCategoricalCrossentropy(),
              optimizer=opt,
              metrics=['accuracy'],
              experimental_run_tf_function=False)

# Horovod: initialize optimizer state so we can synchronize across workers
# (in TensorFlow 2 it is empty before the first step)
model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)

state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def on_state_reset():
    tf.keras.backend.set_value(state.model.optimizer.lr, args.base_lr * hvd.size())
    # Re-initialize, to join with possible new ranks
    state.model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None)


state.register_reset_callbacks([on_state_reset])

callbacks = [
    # Horovod: average metrics among workers at the end of every epoch.
    hvd.callbacks.MetricAverageCallback(),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state, batches_per_commit=4),
]

# Horovod: save checkpoints only on worker 0 to prevent other workers from corrupting them.
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint('./elastic-{epoch}.h5'))

# Horovod: write logs on worker 0.
verbose = 1 if hvd.rank() == 0 else 0


# Train the model.
# Horovod: adjust number of steps based on number of GPUs.
@hvd.elastic.run
def train(state):
    return state.model.fit(dataset, steps_per_epoch=args.steps // hvd.size(),
                           epochs=3 - state.epoch, callbacks=callbacks, verbose=verbose)


history = train(state)
figures = {'epoch': state.epoch, 'batch': state.batch}

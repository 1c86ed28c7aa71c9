"""Skip-grams with negative samples: sparse gradients (after Horovod's example of 2017)."""

import argparse

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

parser = argparse.ArgumentParser()
parser.add_argument('--batch-size', type=int, default=24)
parser.add_argument('--base-lr', type=float, default=0.2)
parser.add_argument('--epochs', type=int, default=2)
parser.add_argument('--sparse-as-dense', action='store_true')
parser.add_argument('--optimizer', action='store_true', help='wrap the optimizer, not the tape')
args = parser.parse_args()

hvd.init()
gpus = tf.config.experimental.list_physical_devices('GPU')
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], 'GPU')

VOCABULARY, DIMENSION, NEGATIVE = 60, 8, 4
rng = np.random.RandomState(5)
words = np.minimum(rng.geometric(0.08, 721), VOCABULARY) - 1
pairs = np.stack([words[:-1], words[1:]], axis=1)
sampled = rng.randint(0, VOCABULARY, (len(pairs), NEGATIVE))
pairs, sampled = pairs[hvd.rank()::hvd.size()], sampled[hvd.rank()::hvd.size()]


class SkipGram(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.inputs_of = tf.keras.layers.Embedding(VOCABULARY, DIMENSION, name='inputs')
        self.outputs_of = tf.keras.layers.Embedding(VOCABULARY, DIMENSION, name='outputs')

    def call(self, centers, candidates):
        vectors = tf.expand_dims(self.inputs_of(centers), 1)
        return tf.reduce_sum(vectors * self.outputs_of(candidates), axis=-1)


tf.keras.utils.set_random_seed(5)
model = SkipGram()
model(tf.zeros([1], tf.int64), tf.zeros([1, 1], tf.int64))

# Horovod: adjust learning rate based on number of GPUs.
opt = tf.keras.optimizers.SGD(args.base_lr * hvd.size())
if args.optimizer:
    opt = hvd.DistributedOptimizer(opt, sparse_as_dense=args.sparse_as_dense)


@tf.function
def training_step(batch, negative):
    with tf.GradientTape() as tape:
        logits = model(batch[:, 0], tf.concat([batch[:, 1:], negative], axis=1))
        labels = tf.concat([tf.ones_like(logits[:, :1]), tf.zeros_like(logits[:, 1:])], axis=1)
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
    if not args.optimizer:
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=args.sparse_as_dense)
    grads = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss


history = {'loss': []}
for epoch in range(args.epochs):
    losses = []
    for step in range(len(pairs) // args.batch_size):
        rows = slice(step * args.batch_size, (step + 1) * args.batch_size)
        losses.append(training_step(tf.constant(pairs[rows]), tf.constant(sampled[rows])))
        if epoch == step == 0:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(opt.variables(), root_rank=0)
    history['loss'].append(float(hvd.allreduce(tf.reduce_mean(losses), name='loss')))
    if hvd.rank() == 0:
        print('Epoch %d: loss %.5f' % (epoch, history['loss'][-1]))

"""A rank of Horovod's own elastic mode, for `elastic.py`; commits every 20 steps."""

import os
import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
x = tf.constant(np.random.default_rng(0).random((32, 64)), tf.float32)
state = hvd.elastic.ObjectState(
    bcast_object=hvd.broadcast_object, get_rank=hvd.rank, weights=np.zeros((64, 10), "f4"), step=0)


@hvd.elastic.run
def train(state):
    first = True
    while True:
        gradient = hvd.allreduce(tf.matmul(x, tf.matmul(x, state.weights) - 1.0, transpose_a=True),
                                 name="gradient")
        state.weights = state.weights - 1e-4 * gradient.numpy()
        state.step += 1
        time.sleep(0.02)
        if first:
            first = False
            with open("steps.txt", "a") as file:
                print(hvd.rank(), hvd.size(), time.time(), state.step, os.getpid(), file=file,
                      flush=True)
        if state.step % 20 == 0:
            state.commit()


train(state)

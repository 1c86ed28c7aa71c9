"""Jobs for engine tf, and what plain Keras makes of them in one process."""

from __future__ import annotations

import dataclasses
import os

import numpy as np

from hvdtrain.config import TrainConfig
from hvdtrain.data.plans import ShardPlan
from hvdtrain.engine_config import TfConfig
from hvdtrain.job import Job
from hvdtrain.world.detect import detect_world

SAMPLES, VALIDATION, BATCH, EPOCHS = 150, 37, 8, 2
TWO = {"devices": 2}
SGD = "sgd", lambda keras: keras.optimizers.SGD(0.05, momentum=0.9)
ADAM = "adam", lambda keras: keras.optimizers.Adam(0.01, global_clipnorm=0.5, weight_decay=0.01)


def numbers(samples=SAMPLES, seed=0):
    x = np.random.default_rng(seed).normal(size=(samples, 8)).astype("float32")
    return x, x[:, :3].argmax(1).astype("int32")


def words(samples=SAMPLES):
    rng = np.random.default_rng(0)
    return (rng.integers(0, 20, size=(samples, 6)).astype("int32"),
            rng.integers(0, 3, size=samples).astype("int32"))


def mlp(keras):
    return [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)]


def with_state(keras):
    """BatchNorm's statistics and dropout's seeds are of each replica."""
    return [keras.Input((8,)), keras.layers.Dense(16), keras.layers.BatchNormalization(),
            keras.layers.ReLU(), keras.layers.Dropout(0.2), keras.layers.Dense(3)]


def normalized(keras):
    return [layer for layer in with_state(keras) if not isinstance(layer, keras.layers.Dropout)]


def embedding(keras):
    return [keras.Input((6,), dtype="int32"), keras.layers.Embedding(20, 4),
            keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]


class Case:
    """A job that keeps the models it has made.

    Args:
        optimizer: Callable that makes one from `keras`.
        layers: Callable that makes a list of layers from `keras`.
        data: Arrays `(x, y)`.
        validation: Integer, the first so many samples are validated on; 0 for none.
        callbacks: List of Keras callbacks.
        metrics: Callable that makes a list of metrics from `keras`.
        loss: A name, or None for crossentropy of logits.
        compiled: Other arguments of `compile`.
    """

    def __init__(self, optimizer, layers=mlp, data=None, validation=VALIDATION, callbacks=(),
                 metrics=lambda keras: ["accuracy"], loss=None, **compiled):
        self.x, self.y = numbers() if data is None else data
        self.models, self.validation = [], validation
        self._optimizer, self._layers, self._metrics = optimizer, layers, metrics
        self._loss, self._compiled, self.kind = loss, compiled, None
        self.job = Job(name="case", model=self.make, data=self.data,
                       callbacks=lambda: list(callbacks))

    def make(self, **changes):
        import keras
        keras.utils.set_random_seed(7)
        model = (self.kind or keras.Sequential)(self._layers(keras))
        model.compile(self._optimizer(keras),
                      self._loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=self._metrics(keras), **{**self._compiled, **changes})
        self.models.append(model)
        return model

    def data(self):
        from hvdtrain.data.source import ArraySource, DataSplits
        first = self.validation
        return DataSplits(
            train=ArraySource((self.x, self.y), name="train"),
            validation=ArraySource((self.x[:first], self.y[:first]), name="validation")
            if first else None)

    @property
    def weights(self):
        return self.models[-1].get_weights()

    def plain(self, replicas, epochs=EPOCHS, batch=BATCH):
        """Plain Keras on the global batches: the model and its history."""
        import tensorflow as tf
        plan = ShardPlan(samples=len(self.x), rank=0, size=replicas, batch_per_rank=batch)
        shards = [dataclasses.replace(plan, rank=r) for r in range(replicas)]

        def batches():
            for epoch in range(epochs):
                orders = [shard.order(epoch) for shard in shards]
                for step in range(plan.steps):
                    rows = np.concatenate([o[step * batch:(step + 1) * batch] for o in orders])
                    yield self.x[rows], self.y[rows]

        spec = tuple(tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in (self.x, self.y))
        model = self.make(steps_per_execution=1, jit_compile=False)
        history = model.fit(
            tf.data.Dataset.from_generator(batches, output_signature=spec).repeat(),
            epochs=epochs, steps_per_epoch=plan.steps, shuffle=False, verbose=0).history
        return model, history


def settings(strategy="auto", tf=None, **changes):
    return TrainConfig(**{
        "engine": "tf", "tf": TfConfig(strategy=strategy, **(tf or {})), "batch_per_rank": BATCH,
        "epochs": EPOCHS, "lr_scaling": "none", "tensorboard": False, **changes})


def train(case, config, *, stop_asked=lambda: False, dry_run=False):
    """Engine tf in this process alone."""
    from hvdtrain.engines.tf_distribute.training import open_strategy, train_job
    with open_strategy(config, detect_world({}), os.environ) as under:
        return train_job(case.job, config, under, stop_asked=stop_asked, dry_run=dry_run)


def distance(one, other):
    return max(float(abs(a - b).max()) for a, b in zip(one, other, strict=True))

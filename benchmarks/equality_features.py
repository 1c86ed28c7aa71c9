"""What else a training uses, on N ranks and on one process: rows for `benchmarks/equality.py`.

Each feature trains a small model for 20 steps (fewer where it says so) on N ranks, and again in one
process with the larger batch, by plain Keras where plain Keras can do it. The difference is the
largest of all trained weights; of `evaluate` and `predict`, of the figures and predictions.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BATCH, STEPS, FEATURES, CLASSES, WORDS, LENGTH = 8, 20, 12, 4, 50, 6


def vectors(samples):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, FEATURES)).astype("f4")
    return x, np.argmax(x @ rng.normal(size=(FEATURES, CLASSES)), axis=1)


def weighted(samples):
    x, y = vectors(samples)
    return x, y, np.random.default_rng(1).uniform(0.0, 2.0, samples).astype("f4")


def words(samples):
    rng = np.random.default_rng(2)
    x = rng.integers(1, WORDS, size=(samples, LENGTH))
    x[np.arange(LENGTH) >= rng.integers(1, LENGTH + 1, size=(samples, 1))] = 0
    return x, rng.integers(0, CLASSES, size=samples)


def tagged(samples):
    x, _ = words(samples)
    return x, np.random.default_rng(3).integers(0, CLASSES, size=x.shape)


def perceptron(keras, *more):
    return keras.Sequential([
        keras.Input((FEATURES,)), keras.layers.Dense(16, activation="tanh",
                                                     kernel_regularizer="l2"),
        *more, keras.layers.Dense(CLASSES, activation="softmax")])


def normalized(keras):
    return perceptron(keras, keras.layers.BatchNormalization())


def reader(keras, *, mask=False, tags=False):
    return keras.Sequential([
        keras.Input((LENGTH,)), keras.layers.Embedding(WORDS, 8, mask_zero=mask),
        keras.layers.LSTM(8, return_sequences=True),
        *([] if tags else [keras.layers.GlobalAveragePooling1D()]),
        keras.layers.Dense(CLASSES, activation="softmax")])


def momentum(keras):
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam(keras):
    return keras.optimizers.Adam(0.01)


def clipped_adam(keras):
    return keras.optimizers.AdamW(0.01, weight_decay=0.01, global_clipnorm=0.5)


def accumulating(keras):
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=4)


def scaled(keras):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One row: how to train on N ranks what plain Keras trains on one."""

    model: Callable[..., Any] = perceptron
    data: Callable[[int], Any] = vectors
    optimizer: Callable[..., Any] = momentum
    loss: Callable[..., Any] = lambda keras: "sparse_categorical_crossentropy"
    left: int = 0
    """Samples of a last batch beyond full ones."""
    config: dict[str, Any] = field(default_factory=dict)
    reducer: dict[str, Any] = field(default_factory=dict)
    zero: bool = False
    merged: bool = False
    """The reference sums repeated rows of embeddings, which plain Keras does not."""


def crossentropy(**settings):
    return lambda keras: keras.losses.SparseCategoricalCrossentropy(**settings)


def masked(keras):
    return reader(keras, mask=True, tags=True)


TRAININGS = {
    "last batch of 5 samples, `join`": Feature(left=5, config={"remainder": "join"}),
    "last batch of 1 sample, `join`": Feature(left=1, config={"remainder": "join"}),
    "weights of samples": Feature(data=weighted),
    "loss `sum`, last batch of 3": Feature(
        loss=crossentropy(reduction="sum"), optimizer=clipped_adam, left=3,
        config={"remainder": "join"}),
    "loss `mean_with_sample_weight`, last batch of 3": Feature(
        data=weighted, loss=crossentropy(reduction="mean_with_sample_weight"), left=3,
        config={"remainder": "join"}),
    "loss with `ignore_class`": Feature(loss=crossentropy(ignore_class=1)),
    "masked sequences, LSTM, last batch of 3": Feature(
        model=masked, data=tagged, left=3, config={"remainder": "join"}),
    "embedding, gather, SGD momentum": Feature(
        model=reader, data=words, reducer={"sparse": "gather"}),
    "embedding, dense, SGD momentum": Feature(
        model=reader, data=words, reducer={"sparse": "dense"}),
    "embedding, auto, Adam": Feature(
        model=reader, data=words, optimizer=adam, merged=True),
    "embedding, gather, Adam, rows as plain Keras": Feature(
        model=reader, data=words, optimizer=adam, reducer={"sparse": "gather", "merge": "none"}),
    "predivide 2": Feature(reducer={"predivide": 2.0}),
    "SyncBatchNormalization": Feature(model=normalized, config={"sync_batch_norm": True}),
    "SyncBatchNormalization, last batch of 1, `join`": Feature(
        model=normalized, left=1, config={"sync_batch_norm": True, "remainder": "join"}),
    "ZeRO-1, AdamW, global_clipnorm": Feature(optimizer=clipped_adam, zero=True),
    "ZeRO-1, Adam, accumulation 4": Feature(optimizer=accumulating, zero=True),
    "ZeRO-1, LossScaleOptimizer(Adam)": Feature(optimizer=scaled, zero=True),
    "XLA halves, Adam": Feature(optimizer=adam, config={"xla": True}),
}


def train(feature, session):
    """The largest difference of all trained weights, and how far they moved."""
    import keras

    import hvdtrain
    from hvdtrain.collectives.single import SingleCollective
    from hvdtrain.optim import ReducerOptions
    size = session.world.size
    x, y, *weight = feature.data(STEPS * size * BATCH + feature.left)
    models = []
    for ours in (True, False):
        keras.backend.clear_session()
        keras.utils.set_random_seed(7)
        model, optimizer = feature.model(keras), feature.optimizer(keras)
        start = [v.numpy() for v in model.trainable_variables]
        if ours:
            hvdtrain.DistributedOptimizer(
                optimizer, options=ReducerOptions(**feature.reducer), zero=feature.zero)
        elif feature.merged:
            hvdtrain.DistributedOptimizer(optimizer, collective=SingleCollective())
        model.compile(optimizer, feature.loss(keras))
        if ours:
            with contextlib.redirect_stdout(io.StringIO()):
                hvdtrain.fit(
                    model, x, y, sample_weight=next(iter(weight), None),
                    config=hvdtrain.TrainConfig(
                    batch_per_rank=BATCH, shuffle=False, lr_scaling="none", **feature.config))
        else:
            model.fit(x, y, batch_size=size * BATCH, shuffle=False, verbose=0,
                      sample_weight=weight[0] if weight else None)
        models.append([v.numpy() for v in model.trainable_variables])
    moved = max(float(np.abs(a - b).max()) for a, b in zip(start, models[1], strict=True))
    return largest(models[0], models[1]), moved


def largest(ours, theirs):
    return max(float(np.abs(np.asarray(a, "f8") - np.asarray(b, "f8")).max())
               for a, b in zip(ours, theirs, strict=True))


def tape(session):
    """A loop of one's own, with `DistributedGradientTape` and a plain optimizer."""
    import keras
    import tensorflow as tf

    import hvdtrain
    size, rank = session.world.size, session.world.rank
    x, y = vectors(STEPS * size * BATCH)
    loss_of, found = keras.losses.SparseCategoricalCrossentropy(), []
    for ours in (True, False):
        keras.backend.clear_session()
        keras.utils.set_random_seed(7)
        model, optimizer = perceptron(keras), clipped_adam(keras)
        optimizer.build(model.trainable_variables)
        start = [v.numpy() for v in model.trainable_variables]

        @tf.function
        def step(x, y, ours=ours, model=model, optimizer=optimizer):
            with (hvdtrain.DistributedGradientTape() if ours else tf.GradientTape()) as tape:
                loss = loss_of(y, model(x, training=True)) + sum(model.losses)
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        for number in range(STEPS):
            begin = number * size * BATCH
            rows = (slice(begin + rank * BATCH, begin + (rank + 1) * BATCH) if ours
                    else slice(begin, begin + size * BATCH))
            step(tf.constant(x[rows]), tf.constant(y[rows]))
        found.append([v.numpy() for v in model.trainable_variables])
    return largest(*found), max(float(np.abs(a - b).max())
                                for a, b in zip(start, found[1], strict=True))


def uneven(session, source, shares, x, y):
    """`source`, of which rank r has the rows `shares[r]`, against the union of the batches."""
    import keras

    import hvdtrain
    found = []
    for ours in (True, False):
        keras.backend.clear_session()
        keras.utils.set_random_seed(7)
        model = perceptron(keras)
        start = [v.numpy() for v in model.trainable_variables]
        optimizer = clipped_adam(keras)
        model.compile(hvdtrain.DistributedOptimizer(optimizer) if ours else optimizer,
                      "sparse_categorical_crossentropy")
        if ours:
            with contextlib.redirect_stdout(io.StringIO()):
                hvdtrain.fit(
                    model, source,
                    config=hvdtrain.TrainConfig(
                    batch_per_rank=BATCH, lr_scaling="none", shuffle=False))
        else:
            for begin in range(0, max(map(len, shares)), BATCH):
                rows = np.concatenate([share[begin:begin + BATCH] for share in shares])
                model.train_on_batch(x[rows], y[rows])
        found.append([v.numpy() for v in model.trainable_variables])
    return largest(*found), max(float(np.abs(a - b).max())
                                for a, b in zip(start, found[1], strict=True))


def stream(session):
    """Shares of different lengths (5 steps)."""
    import tensorflow as tf

    import hvdtrain
    size = session.world.size
    lengths = [4 * BATCH + 3 - 5 * rank for rank in range(size)]
    x, y = vectors(sum(lengths))
    shares = np.split(np.arange(len(x)), np.cumsum(lengths)[:-1])

    def share(rank, ranks):
        rows = shares[rank] if ranks == size else np.arange(len(x))
        return tf.data.Dataset.from_tensor_slices((x[rows], y[rows])).filter(lambda a, b: True)
    return uneven(session, hvdtrain.StreamSource(share), shares, x, y)


def files(session):
    """Files of different lengths, more than ranks, each opened by one of them."""
    import hvdtrain
    size = session.world.size
    lengths = [2 * BATCH + 3 * (number % 4) for number in range(2 * size + 1)]
    x, y = vectors(sum(lengths))
    rows_of = np.split(np.arange(len(x)), np.cumsum(lengths)[:-1])
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(session.collective.gather_objects(mine)[0])
        if session.world.is_chief:
            for number, rows in enumerate(rows_of):
                np.save(folder / f"{number:03}.npy", rows)
        session.collective.barrier()

        def load(paths):
            rows = np.concatenate([np.load(path) for path in paths])
            return x[rows], y[rows]
        source = hvdtrain.by_file(folder / "*.npy", load)
        shares = [np.concatenate([np.load(path) for path in source.files_of(rank, size)])
                  for rank in range(size)]
        found = uneven(session, source, shares, x, y)
        session.collective.barrier()
    return found


def metrics_of(keras):
    m = keras.metrics
    return [
        m.BinaryAccuracy(), m.BinaryCrossentropy(), m.AUC(), m.AUC(curve="PR", name="auc_pr"),
        m.Precision(), m.Recall(), m.TruePositives(), m.TrueNegatives(), m.FalsePositives(),
        m.FalseNegatives(), m.PrecisionAtRecall(0.5), m.RecallAtPrecision(0.5),
        m.SensitivityAtSpecificity(0.5), m.SpecificityAtSensitivity(0.5), m.Hinge(),
        m.SquaredHinge(), m.BinaryIoU(), m.MeanSquaredError(), m.RootMeanSquaredError(),
        m.MeanAbsoluteError(), m.MeanSquaredLogarithmicError(), m.LogCoshError(), m.R2Score(),
        m.Poisson(), m.KLDivergence(), m.CosineSimilarity(), m.F1Score(threshold=0.5),
        m.FBetaScore(beta=2.0, threshold=0.5)]


def evaluation(samples):
    def evaluate(session):
        import keras

        import hvdtrain
        x, y = vectors(samples)
        y = (y > 1).astype("f4")[:, None]

        def made():
            keras.backend.clear_session()
            keras.utils.set_random_seed(7)
            model = keras.Sequential([keras.Input((FEATURES,)),
                                      keras.layers.Dense(1, activation="sigmoid")])
            model.compile("sgd", "binary_crossentropy", metrics=metrics_of(keras))
            return model
        expected = made().evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
        found = hvdtrain.evaluate(made(), x, y, batch_size=7, return_dict=True)
        return max(abs(found[name] - float(np.mean(value))) / max(1.0, abs(float(np.mean(value))))
                   for name, value in expected.items()), None
    return evaluate


def prediction(session):
    import keras

    import hvdtrain
    keras.utils.set_random_seed(7)
    model = reader(keras)
    x, _ = words(203)
    return largest([model.predict(x, verbose=0)],
                   [hvdtrain.predict(model, x)]), None


FEATURES_BY_NAME: dict[str, Callable[[Any], tuple[float, float | None]]] = {
    **{name: lambda session, feature=feature: train(feature, session)
       for name, feature in TRAININGS.items()},
    "`DistributedGradientTape`, a loop of one's own": tape,
    "stream of unknown length, uneven shares": stream,
    "files of uneven lengths, each opened by one rank": files,
    "`evaluate`, 28 metrics and the loss, 203 samples": evaluation(203),
    "`evaluate`, 28 metrics and the loss, 3 samples": evaluation(3),
    "`predict`, 203 samples": prediction,
}


def rows(session):
    """For each feature its name, difference and how far the weights moved."""
    found = []
    for name, run in FEATURES_BY_NAME.items():
        difference, moved = run(session)
        found.append({"name": name, "difference": difference, "moved": moved})
    return found

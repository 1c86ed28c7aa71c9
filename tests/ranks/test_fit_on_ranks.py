"""`fit`, `evaluate` and `predict` on real ranks against plain Keras in one process.

What takes the time here is that TensorFlow traces each model anew; so models of plain Keras are
shared where they are the same, and no case says what another one has said.
"""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.rank_checks import assert_same_everywhere

RANKS = pytest.mark.ranks(3)
BATCH = 4
FULL = 3 * BATCH


def numbers(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 6)).astype("f4")
    return x, (np.abs(x[:, :1] * 3).astype("i4") % 3)[:, 0]


def dense(keras, **compiled):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([
        keras.Input((6,)), keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
        keras.layers.Dense(3, activation="softmax")])
    settings = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"], **compiled}
    model.compile(keras.optimizers.Adam(0.02, global_clipnorm=0.5), **settings)
    return model


@functools.cache
def traced_dense():
    import keras
    model = dense(keras)
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    return model, [(v, v.numpy()) for v in variables]


def plain_dense(keras):
    """`dense` as it begins, for plain Keras: always the same object, which is traced once."""
    del keras
    model, begin = traced_dense()
    for variable, value in begin:
        variable.assign(value)
    return model


def masked(keras, **compiled):
    """Sequences of different lengths: the loss is a mean over what is not masked."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([
        keras.Input((5,)), keras.layers.Embedding(9, 4, mask_zero=True),
        keras.layers.LSTM(6, return_sequences=True), keras.layers.Dense(3, activation="softmax")])
    settings = {"loss": "sparse_categorical_crossentropy", **compiled}
    model.compile(keras.optimizers.SGD(0.2), **settings)
    return model


def sequences(n):
    rng = np.random.default_rng(1)
    x = rng.integers(1, 9, size=(n, 5))
    for row, length in enumerate(rng.integers(1, 6, size=n)):
        x[row, length:] = 0
    return x, rng.integers(0, 3, size=(n, 5))


def train(keras, session, make, data):
    """The model and the figures of all ranks; and of plain Keras with the larger batch."""
    import hvdtrain
    ours, plain = make(keras), (plain_dense if make is dense else make)(keras)
    hvdtrain.DistributedOptimizer(ours.optimizer)
    config = hvdtrain.TrainConfig(batch_per_rank=BATCH, epochs=2, shuffle=False,
                                  lr_scaling="none", remainder="join")
    x, y, *weight = data
    result = hvdtrain.fit(ours, x, y, sample_weight=weight[0] if weight else None, config=config)
    theirs = plain.fit(x, y, batch_size=FULL, epochs=2, shuffle=False, verbose=0,
                       sample_weight=weight[0] if weight else None)
    return ours, plain, result.history, theirs.history


def assert_equal(ours, plain, history, expected):
    for a, b in zip(ours.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
    moved = max(float(np.abs(v.numpy()).max()) for v in plain.optimizer.variables[2:] or [
        plain.trainable_variables[0]])
    assert moved > 1e-4
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=2e-6, atol=1e-6, err_msg=name)


@RANKS
@pytest.mark.parametrize("left", [1, 7])
def test_a_last_batch_of_any_size_trains_as_in_one_process(left, rank_session, keras):
    """With one sample left two ranks have none. Below 2 are left, and 4."""
    assert_equal(*train(keras, rank_session, dense, numbers(2 * FULL + left)))


@RANKS
def test_a_rank_without_samples_runs_every_layer_and_keeps_its_statistics(rank_session, keras):
    """One sample is left: a true empty batch would give NaN in one layer, an error in another."""
    import hvdtrain
    keras.utils.set_random_seed(3)
    model = keras.Sequential([
        keras.Input((5,)), keras.layers.Embedding(9, 4), keras.layers.BatchNormalization(),
        keras.layers.LSTM(4), keras.layers.Dropout(0.5), keras.layers.Dense(3, "softmax")])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)),
                  "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = sequences(FULL + 1)
    seen = []

    class Statistics(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append([v.numpy() for v in self.model.layers[1].non_trainable_variables])

        def on_train_batch_end(self, batch, logs=None):
            seen.append([v.numpy() for v in self.model.layers[1].non_trainable_variables])
    hvdtrain.fit(
        model, x, y[:, 0], callbacks=[Statistics()],
        config=hvdtrain.TrainConfig(batch_per_rank=BATCH, shuffle=False,
                                             lr_scaling="none", remainder="join"))
    assert len(seen) == 4
    assert all(np.isfinite(v).all() for v in seen[-1])
    assert not np.array_equal(seen[0][0], seen[1][0])
    kept = all(np.array_equal(a, b) for a, b in zip(seen[2], seen[3], strict=True))
    everyone = rank_session.collective.gather_objects(kept)
    assert everyone == [True, True, False], "the last rank has the one sample"


@RANKS
@pytest.mark.parametrize(("reduction", "left"), [
    ("sum", 2), ("mean_with_sample_weight", 2), ("sum_over_batch_size", 0)])
def test_reductions_and_weights_of_samples(reduction, left, rank_session, keras):
    x, y = numbers(2 * FULL + left)
    weight = np.random.default_rng(5).uniform(0, 2, size=len(x)).astype("f4")

    def make(keras):
        return dense(keras, loss=keras.losses.SparseCategoricalCrossentropy(reduction=reduction),
                     weighted_metrics=["accuracy"])
    assert_equal(*train(keras, rank_session, make, (x, y, weight)))


def ignoring(keras):
    return dense(keras, metrics=[],
                 loss=keras.losses.SparseCategoricalCrossentropy(ignore_class=1))


@RANKS
@pytest.mark.parametrize(("make", "data", "left"), [
    (masked, sequences, 0), (ignoring, numbers, 2)])
def test_masks_and_ignored_classes(make, data, left, rank_session, keras):
    assert_equal(*train(keras, rank_session, make, data(2 * FULL + left)))


@RANKS
def test_several_outputs_and_steps_per_execution(rank_session, keras):
    def make(keras):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(5, activation="tanh", activity_regularizer="l2")(inputs)
        outputs = {"a": keras.layers.Dense(3, activation="softmax", name="a")(hidden),
                   "b": keras.layers.Dense(1, name="b")(hidden)}
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), steps_per_execution=3,
                      loss={"a": "sparse_categorical_crossentropy",
                            "b": keras.losses.MeanSquaredError(reduction="sum")},
                      loss_weights={"a": 1.0, "b": 0.1})
        return model
    x, y = numbers(2 * FULL + 2)
    import hvdtrain
    ours, plain = make(keras), make(keras)
    hvdtrain.DistributedOptimizer(ours.optimizer)
    hvdtrain.fit(
        ours, x, {"a": y, "b": x[:, :1]},
        config=hvdtrain.TrainConfig(batch_per_rank=BATCH, epochs=2, shuffle=False,
                                             lr_scaling="none", remainder="join"))
    plain.fit(x, {"a": y, "b": x[:, :1]}, batch_size=FULL, epochs=2, shuffle=False, verbose=0)
    for a, b in zip(ours.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)


@RANKS
def test_a_train_step_that_does_not_scale_its_loss_trains_on_parts_of_any_size(
        rank_session, keras, tf):
    """Its gradients are weighted, the loss that it tells a mean, and figures of its own."""
    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            self.mean.update_state(loss)
            return {"loss": loss, "mean": self.mean.result()}

    def made(keras):
        keras.utils.set_random_seed(3)
        model = Own([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
        model.mean = keras.metrics.Mean(name="mean")
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model
    for left in (1, 7):
        assert_equal(*train(keras, rank_session, made, numbers(2 * FULL + left)))


METRICS = {
    "classes": (3, lambda m: [
        m.SparseCategoricalAccuracy(), m.SparseCategoricalCrossentropy(),
        m.SparseTopKCategoricalAccuracy(k=2)]),
    "one_hot": (3, lambda m: [
        m.CategoricalAccuracy(), m.CategoricalCrossentropy(), m.TopKCategoricalAccuracy(k=2),
        m.CategoricalHinge(), m.KLDivergence(), m.CosineSimilarity(), m.F1Score(average="macro"),
        m.FBetaScore(average="weighted", beta=2.0), m.OneHotMeanIoU(num_classes=3),
        m.OneHotIoU(num_classes=3, target_class_ids=[1])]),
    "binary": (1, lambda m: [
        m.BinaryAccuracy(), m.BinaryCrossentropy(), m.AUC(), m.AUC(curve="PR", name="auc_pr"),
        m.Precision(), m.Recall(), m.TruePositives(), m.TrueNegatives(), m.FalsePositives(),
        m.FalseNegatives(), m.PrecisionAtRecall(0.5), m.RecallAtPrecision(0.5),
        m.SensitivityAtSpecificity(0.5), m.SpecificityAtSensitivity(0.5), m.Hinge(),
        m.SquaredHinge(), m.BinaryIoU()]),
    "numbers": (1, lambda m: [
        m.MeanSquaredError(), m.RootMeanSquaredError(), m.MeanAbsoluteError(),
        m.MeanAbsolutePercentageError(), m.MeanSquaredLogarithmicError(), m.LogCoshError(),
        m.R2Score(), m.Poisson()]),
}


@RANKS
@pytest.mark.parametrize("kind", METRICS)
def test_figures_of_evaluate_are_those_of_one_process(kind, rank_session, keras):
    """With two samples one rank has none: at first, and after it had some."""
    import hvdtrain
    outputs, make = METRICS[kind]
    x, y = numbers(40, seed=4)
    loss = "mse"
    if kind == "classes":
        loss = "sparse_categorical_crossentropy"
    elif kind == "one_hot":
        y = np.eye(3, dtype="f4")[y]
    elif kind == "binary":
        y = (y > 0).astype("f4")[:, None]
    else:
        y = np.abs(x[:, :1]) + 1.0

    def model():
        keras.backend.clear_session()  # names of metrics are counted
        keras.utils.set_random_seed(3)
        last = {1: "sigmoid", 3: "softmax"}[outputs]
        built = keras.Sequential([keras.Input((6,)), keras.layers.Dense(outputs, last)])
        built.compile("sgd", loss, metrics=make(keras.metrics))
        return built
    plain, ours = model(), model()
    for samples in (2, 40, 2):
        data = x[:samples], y[:samples]
        expected = plain.evaluate(*data, batch_size=7, verbose=0, return_dict=True)
        found = hvdtrain.evaluate(ours, *data, batch_size=7, return_dict=True)
        assert found.keys() == expected.keys()
        assert len(found) == len(make(keras.metrics)) + 1
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], np.mean(value), rtol=1e-6, atol=1e-6,
                                       err_msg=f"{name} of {samples} samples")
        everyone = rank_session.collective.gather_objects(found)
        assert all(other == found for other in everyone)


@RANKS
def test_predictions_come_in_order_on_every_rank(rank_session, keras, tf):
    import hvdtrain
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    model = keras.Model(inputs, {"a": keras.layers.Dense(3)(inputs),
                                 "b": keras.layers.Dense(2, dtype="bfloat16")(inputs)})
    for samples in (1, 2, 50):
        x, _ = numbers(samples)
        expected = model.predict(x, batch_size=4, verbose=0)
        stream = hvdtrain.StreamSource(tf.data.Dataset.from_tensor_slices(x))
        for data in (x, hvdtrain.ArraySource(x), stream):
            found = hvdtrain.predict(model, data, batch_size=4)
            assert found["a"].shape == (samples, 3)
            assert found["b"].dtype == np.asarray(expected["b"]).dtype
            for name in ("a", "b"):
                np.testing.assert_allclose(found[name].astype("f4"),
                                           np.asarray(expected[name]).astype("f4"), atol=1e-6)


@RANKS
def test_a_metric_says_how_it_is_merged_or_is_refused(rank_session, keras, tf):
    import hvdtrain
    from hvdtrain.errors import TrainingError

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.most = self.add_variable((), initializer="zeros", name="most")
            self.reset_state()

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_true)))

        def result(self):
            return self.most

        def reset_state(self):
            self.most.assign(-np.inf)

    class Merged(Largest):
        def merge_states(self, states):
            return [np.max([own[0] for own in states], axis=0)]

    def model(metric):
        made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        made.compile("sgd", "mse", metrics=[metric])
        return made
    x, _ = numbers(30)
    y = np.arange(30, dtype="f4")[:, None]
    with pytest.raises(TrainingError, match="`largest` .* begins with -inf"):
        hvdtrain.evaluate(model(Largest()), x, y, return_dict=True)
    assert hvdtrain.evaluate(model(Merged()), x, y, return_dict=True)["largest"] == 29.0


@RANKS
def test_callbacks_of_keras_decide_alike_and_only_the_chief_writes(
        rank_session, keras, tmp_path_factory):
    import hvdtrain
    folder = rank_session.collective.gather_objects(str(tmp_path_factory.mktemp("run")))[0]
    rank, seen = rank_session.world.rank, []

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(dict(logs))

    class Note(keras.callbacks.Callback):
        chief_only = True

        def on_epoch_end(self, epoch, logs=None):
            seen.append("written")
    callbacks = [
        keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0,
                                      restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0),
        keras.callbacks.ModelCheckpoint(f"{folder}/best-{{epoch}}.keras", save_best_only=True),
        keras.callbacks.CSVLogger(f"{folder}/log.csv"),
        keras.callbacks.TensorBoard(f"{folder}/tb"),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch)),
        Own(), Note()]
    model = dense(keras)
    hvdtrain.DistributedOptimizer(model.optimizer)
    result = hvdtrain.fit(
        model, *numbers(50), validation_data=numbers(20, seed=9), callbacks=callbacks,
        config=hvdtrain.TrainConfig(
            batch_per_rank=BATCH, epochs=9, lr_scaling="none", output=f"{folder}/out"))
    epochs = len(result.history["loss"])
    assert epochs == 2, "min_delta is never reached, so patience ends the run"
    everyone = rank_session.collective.gather_objects(
        [result.history, [v.numpy().tolist() for v in model.trainable_variables]])
    assert all(other == everyone[0] for other in everyone)
    assert seen.count("written") == (epochs if rank == 0 else 0)
    assert [s for s in seen if isinstance(s, int)] == list(range(epochs))
    assert "val_accuracy" in next(s for s in seen if isinstance(s, dict))
    rank_session.collective.barrier()
    if rank == 0:
        root = Path(folder)
        assert len((root / "log.csv").read_text().splitlines()) == epochs + 1
        losses = result.history["val_loss"]
        assert sorted(p.name for p in root.glob("best-*")) == [
            f"best-{number + 1}.keras" for number, loss in enumerate(losses)
            if loss < min([np.inf, *losses[:number]])]
        assert list(root.glob("tb/*/*"))


@RANKS
def test_backup_and_restore_begins_all_ranks_with_the_same_weights(
        rank_session, keras, tmp_path_factory):
    import hvdtrain
    folder = rank_session.collective.gather_objects(str(tmp_path_factory.mktemp("backup")))[0]

    def fit(epochs, extra=()):
        model = dense(keras)
        hvdtrain.DistributedOptimizer(model.optimizer)
        backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        result = hvdtrain.fit(
            model, *numbers(50), callbacks=[backup, *extra],
            config=hvdtrain.TrainConfig(batch_per_rank=BATCH, epochs=epochs, lr_scaling="none"))
        return model, result
    whole, _ = fit(3)
    rank_session.collective.barrier()
    if rank_session.world.is_chief:
        import shutil
        shutil.rmtree(folder)
    rank_session.collective.barrier()
    fit(2)
    rank_session.collective.barrier()
    resumed, result = fit(3)
    assert len(result.history["loss"]) == 1
    for a, b in zip(whole.trainable_variables, resumed.trainable_variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@RANKS
def test_own_figures_of_a_train_step_are_averaged_over_ranks(rank_session, keras):
    import hvdtrain

    class Own(keras.Sequential):
        def train_step(self, data):
            super().train_step(data)
            return {"mine": keras.ops.cast(rank_session.world.rank, "float32")}
    model = Own([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)),
                  "sparse_categorical_crossentropy")
    result = hvdtrain.fit(
        model, *numbers(FULL), config=hvdtrain.TrainConfig(batch_per_rank=BATCH))
    assert result.history["mine"] == [1.0]


@RANKS
def test_a_run_goes_on_from_a_checkpoint_within_an_epoch(rank_session, keras, tmp_path_factory,
                                                         monkeypatch):
    import hvdtrain
    from hvdtrain.train import coordinator
    monkeypatch.setattr(coordinator, "AGREE_EVERY_S", 0.0)
    folder = rank_session.collective.gather_objects(str(tmp_path_factory.mktemp("every")))[0]
    figures = []

    class Lose(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if figures and figures[-1] is None and batch == 4:
                raise KeyboardInterrupt

        def on_epoch_end(self, epoch, logs=None):
            figures.append(logs["loss"])

    def fit(lost, output, **config):
        model = dense(keras)
        hvdtrain.DistributedOptimizer(model.optimizer)
        if lost:
            figures.append(None)
        stopping = keras.callbacks.EarlyStopping("loss", patience=9)
        hvdtrain.fit(
            model, *numbers(6 * FULL), callbacks=[Lose(), stopping],
            config=hvdtrain.TrainConfig(
                         batch_per_rank=BATCH, epochs=2, lr_scaling="none", tensorboard=False,
                         output=f"{folder}/{output}", **config))
        return model, stopping
    whole, expected = fit(False, "whole", checkpoint_every_steps=3)
    for name, every in {
            "steps": {"checkpoint_every_steps": 3},
            "seconds": {"checkpoint_every_s": 1e-3, "checkpoint_every_epochs": 0}}.items():
        with pytest.raises(KeyboardInterrupt):
            fit(True, name, **every)
        rank_session.collective.barrier()
        figures.clear()
        resumed, stopping = fit(False, name, resume=True, **every)
        assert stopping.best == expected.best
        assert stopping.wait == expected.wait
        for a, b in zip(whole.variables, resumed.variables, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
        rank_session.collective.barrier()
        lines = Path(f"{folder}/{name}/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == [1, 2]


@RANKS
@pytest.mark.parametrize("kind", ["dataset", "generator"])
def test_a_stream_of_unknown_length_trains_as_the_union_of_its_batches(
        kind, rank_session, keras, tf):
    """One rank has two steps less than another, and a last batch of one sample."""
    import hvdtrain
    lengths = (9, 3, 11)
    x, y = numbers(sum(lengths))
    begins = np.cumsum([0, *lengths])

    def share(rank, size):
        if size == 1:
            return iter(zip(x, y, strict=True))
        rows = slice(begins[rank], begins[rank + 1])
        made = tf.data.Dataset.from_tensor_slices((x[rows], y[rows]))
        if kind == "generator":
            return ((a, b) for a, b in zip(x[rows], y[rows], strict=True))
        return made.filter(lambda a, b: True)  # its length is not known
    ours, plain = dense(keras), plain_dense(keras)
    hvdtrain.DistributedOptimizer(ours.optimizer)
    result = hvdtrain.fit(
        ours, hvdtrain.StreamSource(share), validation_data=hvdtrain.StreamSource(share),
        config=hvdtrain.TrainConfig(batch_per_rank=BATCH, epochs=2, lr_scaling="none"))
    steps = [np.concatenate([np.arange(begins[r], begins[r + 1])[s * BATCH:(s + 1) * BATCH]
                             for r in range(3)]) for s in range(3)]
    for _ in range(2):
        for rows in steps:
            plain.train_on_batch(x[rows], y[rows])
    for a, b in zip(ours.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
    expected = plain.evaluate(x, y, verbose=0, return_dict=True)
    np.testing.assert_allclose(result.history["val_loss"][-1], expected["loss"], atol=1e-5)


@RANKS
def test_a_data_set_is_divided_sample_by_sample_and_a_stream_that_changes_is_told(
        rank_session, keras, tf):
    import hvdtrain
    x, y = numbers(20)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    model = dense(keras)
    hvdtrain.DistributedOptimizer(model.optimizer)
    config = hvdtrain.TrainConfig(batch_per_rank=BATCH, epochs=1)
    result = hvdtrain.fit(model, hvdtrain.StreamSource(dataset), config=config)
    assert len(result.history["loss"]) == 1
    found = hvdtrain.evaluate(model, hvdtrain.StreamSource(dataset), return_dict=True)
    expected = hvdtrain.evaluate(model, x, y, return_dict=True)
    np.testing.assert_allclose(found["accuracy"], expected["accuracy"], atol=1e-6)
    for later in (9, 13):
        length = [12]
        changing = hvdtrain.StreamSource(
            lambda rank, size: iter([(x[i], y[i]) for i in range(length[0])]))  # noqa: B023
        assert changing.count(rank_session.world.rank, 3) == 12
        length[0] = later
        with pytest.raises(tf.errors.InvalidArgumentError, match="the stream changed"):
            hvdtrain.fit(model, changing, config=config)


def write_packed_files(tf, folder, x, y, lengths):
    begins = np.cumsum([0, *lengths])
    for name, begin, end in zip("abcdefgh", begins, begins[1:], strict=False):
        with tf.io.TFRecordWriter(f"{folder}/{name}.gz", "GZIP") as writer:
            for i in range(begin, end):
                writer.write(tf.train.Example(features=tf.train.Features(feature={
                    "x": tf.train.Feature(float_list=tf.train.FloatList(value=x[i])),
                    "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[y[i]])),
                })).SerializeToString())


@RANKS
def test_files_of_each_rank_train_as_the_union_of_its_batches_and_go_on_within_an_epoch(
        rank_session, keras, tf, tmp_path_factory, monkeypatch):
    """Shares of 30, 21 and 18 samples: two ranks have none in the last steps."""
    import hvdtrain
    rank, everyone = rank_session.world.rank, rank_session.collective.gather_objects
    folder = everyone(str(tmp_path_factory.mktemp("files")))[0]
    monkeypatch.setenv("HVDTRAIN_CACHE", f"{folder}/cache-{rank}")
    lengths = (5, 30, 12, 1, 21)
    x, y = numbers(sum(lengths))
    if rank == 0:
        write_packed_files(tf, folder, x, y, lengths)
    rank_session.collective.barrier()

    def load(files):
        return hvdtrain.load_tfrecord(files, {"x": {"shape": [6]}, "y": {"dtype": "int32"}},
                                      target="y")

    class Lose(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            if self.epoch == 1 and batch == 5:
                raise KeyboardInterrupt

    def fit(output, callbacks=(), **config):
        model = dense(keras)
        train, held_out = (hvdtrain.by_file(f"{folder}/*.gz", load) for _ in range(2))
        hvdtrain.DistributedOptimizer(model.optimizer)
        result = hvdtrain.fit(
            model, train, validation_data=held_out, callbacks=callbacks,
            config=hvdtrain.TrainConfig(
                batch_per_rank=BATCH, epochs=2, seed=5, lr_scaling="none", tensorboard=False,
                output=f"{folder}/{output}", checkpoint_every_steps=3, **config))
        return model, (train, held_out), result
    ours, (train, held_out), result = fit("whole")
    files, begins = ["b", "e", "acd"], np.cumsum([0, *lengths])
    shares = [np.concatenate([np.arange(begins[f], begins[f + 1]) for f in map("abcde".index, own)])
              for own in files]
    assert [file.stem for file in train.files_of(rank, 3)] == list(files[rank])
    indexed = train.index_bytes_read + held_out.index_bytes_read  # who came first
    assert indexed == 12 * len(shares[rank])
    unpacked = Path(f"{folder}/cache-{rank}/data/unpacked").glob("*.gz")
    assert sorted(path.stem[-1] for path in unpacked) == list(files[rank])

    plain = plain_dense(keras)
    for epoch in range(2):
        orders = [share[np.random.default_rng([5, epoch, r]).permutation(len(share))]
                  for r, share in enumerate(shares)]
        for step in range(8):
            rows = np.concatenate([o[step * BATCH:(step + 1) * BATCH] for o in orders])
            plain.train_on_batch(x[rows], y[rows])
    for a, b in zip(ours.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)
    expected = plain.evaluate(x, y, verbose=0, return_dict=True)
    np.testing.assert_allclose(result.history["val_loss"][-1], expected["loss"], atol=1e-5)

    with pytest.raises(KeyboardInterrupt):
        fit("lost", [Lose()])
    rank_session.collective.barrier()
    resumed, _, again = fit("lost", resume=True)
    assert again.epoch == [1]
    assert again.history["loss"] == result.history["loss"][1:]
    for a, b in zip(ours.variables, resumed.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@RANKS
def test_files_that_one_rank_cannot_share_are_refused_on_all(rank_session, keras, tf,
                                                             tmp_path_factory, monkeypatch):
    import hvdtrain
    from hvdtrain.errors import ConfigError, DataError
    rank, everyone = rank_session.world.rank, rank_session.collective.gather_objects
    folder = Path(everyone(str(tmp_path_factory.mktemp("files")))[0])
    monkeypatch.setenv("HVDTRAIN_CACHE", f"{folder}/cache")
    if rank == 0:
        for number in range(4):
            np.savetxt(folder / f"{number}.csv", np.ones((5, 2)), header="u,v", comments="",
                       delimiter=",")
    rank_session.collective.barrier()

    def evaluate(pattern, load=lambda files: hvdtrain.load_csv(files, target="v")):
        return hvdtrain.evaluate(dense(keras), hvdtrain.by_file(pattern, load), return_dict=True)
    with pytest.raises(DataError, match="2 files for 3 ranks"):
        evaluate(f"{folder}/[01].csv")
    with pytest.raises(ConfigError, match="number of files is 4 on rank 0 and 3 on rank 2"):
        evaluate(f"{folder}/[012].csv" if rank == 2 else f"{folder}/*.csv")
    rank_session.collective.barrier()
    if rank == 0:
        (folder / "1.csv").write_text("u,w\n" + "1,1\n" * 5)
    rank_session.collective.barrier()
    with pytest.raises(DataError, match=r"1\.csv has no column 'v'") as caught:
        evaluate(f"{folder}/[012].csv")
    assert ("Rank 2 cannot open its files" in str(caught.value)) == (rank != 2)


@RANKS
@pytest.mark.parametrize(("zero", "optimizer"), [
    (False, "loss_scale, accumulation"), (True, "adam")])
def test_compiled_halves_and_divided_state_train_as_without(zero, optimizer, rank_session, keras):
    import hvdtrain
    o = keras.optimizers
    makes = {"adam": lambda: o.Adam(0.02, global_clipnorm=0.5),
             "loss_scale, accumulation": lambda: o.LossScaleOptimizer(o.SGD(
                 0.1, momentum=0.9, gradient_accumulation_steps=2, global_clipnorm=0.5))}

    def train(xla, zero):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([
            keras.Input((5,)), keras.layers.Embedding(9, 4), keras.layers.Flatten(),
            keras.layers.BatchNormalization(), keras.layers.Dense(3, activation="softmax")])
        model.compile(hvdtrain.DistributedOptimizer(makes[optimizer](), zero=zero),
                      "sparse_categorical_crossentropy", metrics=["accuracy"])
        x, y = sequences(3 * FULL + 4)
        result = hvdtrain.fit(
            model, x, y[:, 0],
            config=hvdtrain.TrainConfig(
                batch_per_rank=BATCH, epochs=2, lr_scaling="none", remainder="join", xla=xla,
                zero=zero))
        return model, result.history
    (plain, expected), (compiled, history) = train(False, False), train(True, zero)
    for a, b in zip(plain.variables, compiled.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=2e-6, err_msg=a.path)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, atol=1e-6)


@RANKS
def test_layers_that_each_rank_has_for_itself_may_have_other_shapes(rank_session, keras):
    import hvdtrain
    rank = rank_session.world.rank
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([
        keras.Input((6,)), keras.layers.Dense(8, activation="tanh", name="shared"),
        keras.layers.Dense(4 + rank, name="own"),
        keras.layers.Dense(3, activation="softmax", name="own_out")])
    optimizer = hvdtrain.DistributedOptimizer(
        keras.optimizers.Adam(0.02),
        options=hvdtrain.ReducerOptions(local_variables=("own", "own_out")))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    begin = model.get_layer("own").kernel.numpy()
    hvdtrain.fit(
        model, *numbers(3 * FULL),
        config=hvdtrain.TrainConfig(batch_per_rank=BATCH, lr_scaling="none"))
    own = model.get_layer("own").kernel.numpy()
    assert own.shape == (8, 4 + rank)
    assert 0 < np.abs(own - begin).max() < 0.1  # three steps from where this rank began
    assert_same_everywhere(rank_session, model.get_layer("shared").trainable_variables)


@RANKS
def test_what_xla_cannot_compile_is_refused(rank_session, keras):
    import hvdtrain
    from hvdtrain.errors import ConfigError
    config = hvdtrain.TrainConfig(batch_per_rank=BATCH, xla=True)
    model = masked(keras)
    hvdtrain.DistributedOptimizer(model.optimizer)
    with pytest.raises(ConfigError, match="cannot be compiled by XLA"):
        hvdtrain.fit(model, *sequences(FULL), config=config)

    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)
    own = Own([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    own.compile(hvdtrain.DistributedOptimizer(keras.optimizers.SGD(0.1)),
                "sparse_categorical_crossentropy")
    with pytest.raises(ConfigError, match="has one of its own"):
        hvdtrain.fit(own, *numbers(FULL), config=config)

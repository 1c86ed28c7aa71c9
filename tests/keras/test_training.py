"""One rank: data, learning rate, checkpoints, resume, files; what is refused."""

import contextlib
import io
import json
import os
import resource
import signal
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.config import TrainConfig
from hvdtrain.data.arrays import load_npz
from hvdtrain.data.pipeline import evaluation_dataset, training_dataset
from hvdtrain.data.plans import ShardPlan
from hvdtrain.data.source import ArraySource, as_source
from hvdtrain.errors import CheckpointError, DataError, TrainingError
from hvdtrain.optim.distributed import DistributedOptimizer
from hvdtrain.settings import replace
from hvdtrain.train import schedule
from hvdtrain.train.checkpoint import CheckpointStore, RunState, read_state


def data(n=40):
    x = np.random.default_rng(0).normal(size=(n, 4)).astype("f4")
    return x, x[:, :1]


def compiled(optimizer=None, seed=1, metrics=()):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"),
                              keras.layers.Dense(1)])
    model.compile(DistributedOptimizer(optimizer or keras.optimizers.Adam(0.01)), "mse",
                  metrics=list(metrics))
    return model


# data


@pytest.mark.parametrize("mapped", [False, True])
def test_batches_follow_the_plan_epoch_after_epoch(tmp_path, mapped):
    x = np.arange(10, dtype="f4")[:, None]
    if mapped:
        np.savez(tmp_path / "d.npz", x=x, y=x)
        source = load_npz(tmp_path / "d.npz")
        assert source.arrays is None
    else:
        source = ArraySource((x, x))
    plan = ShardPlan(samples=10, rank=1, size=2, batch_per_rank=2)
    dataset = training_dataset(source, plan, first_epoch=4).take(2 * plan.steps)
    seen = [a[:, 0].tolist() for a, b in dataset.as_numpy_iterator()]
    expected = []
    for epoch in (4, 5):
        order = plan.order(epoch)
        expected += [order[:2].tolist(), order[2:4].tolist(), order[4:].tolist()]
    assert seen == expected


def test_full_batches_have_a_static_shape():
    source = ArraySource(np.zeros((8, 3), "f4"))
    even = ShardPlan(samples=8, rank=0, size=1, batch_per_rank=4)
    assert training_dataset(source, even).element_spec.shape.as_list() == [4, 3]
    uneven = ShardPlan(samples=8, rank=0, size=1, batch_per_rank=3)
    assert training_dataset(source, uneven).element_spec.shape.as_list() == [None, 3]


def test_evaluation_reads_the_rows_once_in_order():
    source = ArraySource({"a": np.arange(7), "b": np.arange(7) * 2})
    dataset = evaluation_dataset(source, np.array([2, 3, 6]), 2)
    assert dataset.cardinality() == 2
    assert [b["b"].tolist() for b in dataset.as_numpy_iterator()] == [[4, 6], [12]]


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_npz_files_are_read_as_they_were_written(tmp_path, write):
    x = np.asfortranarray(np.random.default_rng(0).random((6, 5)))
    write(tmp_path / "d.npz", x=x, y=np.arange(6))
    source = load_npz(tmp_path / "d.npz")
    rows = np.array([5, 0, 3])
    np.testing.assert_array_equal(source.read(rows)[0], x[rows])
    np.testing.assert_array_equal(source.read(rows)[1], rows)


def test_bad_data_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere.npz does not exist"):
        load_npz(tmp_path / "nowhere.npz")
    (tmp_path / "bad.npz").write_bytes(b"PK not really")
    with pytest.raises(DataError, match="cannot be read as an .npz file"):
        load_npz(tmp_path / "bad.npz")
    np.savez(tmp_path / "d.npz", images=np.zeros(3))
    with pytest.raises(DataError, match="no array 'x'; it has images"):
        load_npz(tmp_path / "d.npz")
    np.savez(tmp_path / "e.npz", x=np.zeros((0, 2)), y=np.zeros(0))
    with pytest.raises(DataError, match="the data set is empty"):
        load_npz(tmp_path / "e.npz")
    np.savez(tmp_path / "o.npz", x=np.array([{}, {}], dtype=object), y=np.zeros(2))
    with pytest.raises(DataError, match="Python objects"):
        load_npz(tmp_path / "o.npz")
    with pytest.raises(DataError, match="different numbers of samples: 2, 3"):
        ArraySource((np.zeros(3), np.zeros(2)))
    with pytest.raises(DataError, match=r"Received: an array of shape \(\)"):
        ArraySource([1.0, 2.0])


def test_what_is_no_array_is_refused_by_name():
    for given in ("x.npz", lambda: None):
        with pytest.raises(DataError, match=r"train: expected arrays x, \(x, y\)"):
            as_source(given, "train")
        with pytest.raises(ValueError, match="Unrecognized data type"):  # as Keras says it
            hvdtrain.fit(compiled(), given)


# learning rate


def rates_used(model, config, steps):
    """The weights of a model whose gradient is always 1 tell the rate of each step."""
    seen = []
    before = [float(model.weights[0].numpy()[0, 0])]

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            now = float(model.weights[0].numpy()[0, 0])
            seen.append(before[0] - now)
            before[0] = now
    hvdtrain.fit(
        model, np.ones((steps * 4, 1), "f4"), np.zeros((steps * 4, 1), "f4"), config=config,
        callbacks=[Watch()])
    return seen


def linear_model(rate):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(DistributedOptimizer(keras.optimizers.SGD(rate)),
                  lambda y, p: keras.ops.mean(p))
    return model


@pytest.mark.parametrize("as_schedule", [False, True])
def test_the_rate_rises_step_by_step_to_the_scaled_one(monkeypatch, as_schedule):
    # Four ranks' worth of scaling on one rank: the plan is the same code.
    monkeypatch.setattr(schedule, "scale_factor", lambda size, rule: 4.0)
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1000, 1.0) if as_schedule else 0.1
    model = linear_model(rate)
    config = TrainConfig(batch_per_rank=4, warmup_epochs=0.5, stop_on_nan=False)
    seen = rates_used(model, config, steps=8)
    expected = [0.1 * (1 + 3 * min(1, step / 4)) for step in range(8)]
    np.testing.assert_allclose(seen, expected, rtol=1e-4)
    if not as_schedule:
        assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.1)


def test_a_callback_sees_and_sets_the_rate_of_one_process(monkeypatch):
    monkeypatch.setattr(schedule, "scale_factor", lambda size, rule: 4.0)
    model = linear_model(0.1)

    class Halve(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
                model.optimizer.learning_rate = float(model.optimizer.learning_rate) / 2
    result = hvdtrain.fit(
        model, np.ones((8, 1), "f4"), np.zeros((8, 1), "f4"),
        config=TrainConfig(batch_per_rank=4, epochs=2), callbacks=[Halve()])
    np.testing.assert_allclose(result.history["learning_rate"], [0.4, 0.2], rtol=1e-6)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 16.0), ("sqrt", 4.0), ("none", 1.0)])
def test_scale_factors(rule, factor):
    assert schedule.scale_factor(16, rule) == factor


# files


def test_a_run_leaves_whole_files(tmp_path):
    config = TrainConfig(epochs=5, batch_per_rank=10, output=tmp_path / "run", keep_checkpoints=2)
    result = hvdtrain.fit(
        compiled(metrics=["mae"]), *data(), validation_data=data(8), config=config)
    assert sorted(os.listdir(tmp_path / "run")) == [
        "checkpoints", "metrics.jsonl", "model.keras", "tensorboard"]
    assert sorted(os.listdir(tmp_path / "run/checkpoints")) == [
        "epoch-00004.keras", "epoch-00005.keras"]
    lines = [json.loads(line) for line in
             (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[-1]["val_mae"] == result.history["val_mae"][-1]
    state = read_state(tmp_path / "run/checkpoints/epoch-00004.keras")
    assert (state.epoch, state.step, state.ranks) == (4, 16, 1)
    # A plain Keras file: Adam is Adam, and training goes on without hvdtrain.
    loaded = keras.models.load_model(tmp_path / "run/model.keras")
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert int(loaded.optimizer.iterations.numpy()) == 20
    loaded.fit(*data(), verbose=0)


def test_a_resumed_run_ends_like_one_that_was_not_cut(tmp_path):
    """Dropout goes on from the seed of the checkpoint."""
    def make(seed):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"),
                                  keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.compile(DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
        return model
    config = TrainConfig(epochs=4, batch_per_rank=8, output=tmp_path / "a", tensorboard=False,
                         seed=3)
    whole = make(1)
    history = hvdtrain.fit(whole, *data(), config=config).history
    cut = replace(config, output=tmp_path / "b", epochs=2)
    hvdtrain.fit(make(1), *data(), config=cut)
    resumed = make(99)
    result = hvdtrain.fit(resumed, *data(), config=replace(cut, epochs=4, resume=True))
    assert result.epoch == [2, 3]
    np.testing.assert_allclose(result.history["loss"], history["loss"][2:], rtol=1e-6)
    for a, b in zip(whole.weights, resumed.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    lines = [json.loads(line)["epoch"] for line in
             (tmp_path / "b/metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, 4]


def test_a_former_run_is_not_written_over(tmp_path):
    config = TrainConfig(output=tmp_path, tensorboard=False)
    hvdtrain.fit(compiled(), *data(), config=config)
    with pytest.raises(CheckpointError, match=r"holds files of a former run.*--resume"):
        hvdtrain.fit(compiled(), *data(), config=config)
    hvdtrain.fit(compiled(), *data(), config=replace(config, overwrite=True))


def test_a_strangers_file_is_neither_replaced_nor_deleted(tmp_path):
    (tmp_path / "model.keras").write_text("mine")
    config = TrainConfig(output=tmp_path, checkpoint_every_epochs=0)
    with pytest.raises(CheckpointError, match=r"holds files of a former run \(model.keras\)"):
        hvdtrain.fit(compiled(), *data(), config=config)
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard/mine.txt").write_text("mine")
    hvdtrain.fit(compiled(), *data(), config=replace(config, overwrite=True))
    assert (tmp_path / "tensorboard/mine.txt").read_text() == "mine"


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "f").touch()
    with pytest.raises(CheckpointError, match="is a file; a folder is needed"):
        hvdtrain.fit(compiled(), *data(), config=TrainConfig(output=tmp_path / "f"))


def saved_store(folder, epochs=(1, 2)):
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    store = CheckpointStore(folder, keep=5)
    for epoch in epochs:
        model.trainable_variables[0].assign(np.full((4, 8), epoch, "f4"))
        store.save(model, RunState(epoch=epoch, step=epoch, ranks=1, version="t"))
    return store, model


def truncate(path):
    path.write_bytes(path.read_bytes()[:-200])


def flip(path):
    blob = bytearray(path.read_bytes())
    blob[len(blob) // 2] ^= 0xFF
    path.write_bytes(bytes(blob))


def test_the_step_of_a_checkpoint_counts_what_was_trained(tmp_path):
    config = TrainConfig(epochs=1, batch_per_rank=8, output=tmp_path, tensorboard=False)
    hvdtrain.fit(compiled(), *data(), config=config)
    hvdtrain.fit(
        compiled(), *data(),
        config=replace(
        config, epochs=2, batch_per_rank=4, resume=True))
    assert read_state(tmp_path / "checkpoints/epoch-00002.keras").step == 5 + 10


@pytest.mark.parametrize("damage", [truncate, flip, lambda p: p.write_bytes(b"")],
                         ids=["truncated", "one byte", "empty"])
def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(tmp_path, damage, caplog):
    store, model = saved_store(tmp_path)
    damage(tmp_path / "epoch-00002.keras")
    from hvdtrain.log import get_logger
    get_logger().propagate = True
    state = store.load_newest(model)
    assert state.epoch == 1
    assert float(model.trainable_variables[0].numpy()[0, 0]) == 1.0
    assert "epoch-00002.keras is damaged" in caplog.text
    assert "Using the one before it" in caplog.text


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    store, model = saved_store(tmp_path, epochs=(1,))
    truncate(tmp_path / "epoch-00001.keras")
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* can be read"):
        store.load_newest(model)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    store, _ = saved_store(tmp_path)
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(1)])
    other.compile(keras.optimizers.Adam(), "mse")
    other.optimizer.build(other.trainable_variables)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        store.load_newest(other)


def test_a_full_disk_leaves_the_older_checkpoint_whole(tmp_path):
    """The kernel refuses to let files grow: the same path as a full disk, without a mount."""
    store, model = saved_store(tmp_path, epochs=(1,))
    before = (tmp_path / "epoch-00001.keras").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="epoch-00002.keras could not be written"):
            store.save(model, RunState(epoch=2, step=2, ranks=1, version="t"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == ["epoch-00001.keras"]
    assert (tmp_path / "epoch-00001.keras").read_bytes() == before


def test_the_state_is_one_more_member_of_a_plain_keras_file(tmp_path):
    saved_store(tmp_path, epochs=(1,))
    with zipfile.ZipFile(tmp_path / "epoch-00001.keras") as archive:
        assert set(archive.namelist()) == {
            "metadata.json", "config.json", "model.weights.h5", "hvdtrain.json"}


# stopping


def test_a_loss_that_is_not_finite_stops_the_run():
    x, y = data()
    x[20] = np.inf
    with pytest.raises(TrainingError, match="since step 3, first on rank 0"):
        hvdtrain.fit(compiled(), x, y, config=TrainConfig(batch_per_rank=8, shuffle=False))


def test_a_request_to_stop_ends_the_run_with_its_own_code():
    with pytest.raises(TrainingError, match="Stopped on request") as caught:
        hvdtrain.fit(
            compiled(), *data(), stop_asked=lambda: True, config=TrainConfig(batch_per_rank=8))
    assert caught.value.exit_code == 75


def test_an_unbuilt_model_is_built_before_training():
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    hvdtrain.fit(model, *data())
    assert model.built


def test_steps_per_execution_that_do_not_divide_the_epoch_take_no_step_too_many():
    models = [compiled(keras.optimizers.SGD(0.01)) for _ in range(2)]
    for model, per_execution in zip(models, (1, 4), strict=True):
        model.compile(model.optimizer, "mse", steps_per_execution=per_execution)
        hvdtrain.fit(model, *data(60), config=TrainConfig(batch_per_rank=10, epochs=2))
        assert int(model.optimizer.iterations.numpy()) == 12
    for a, b in zip(models[0].weights, models[1].weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-6)


def test_threads_are_those_of_the_plan(one_rank):
    assert tf.config.threading.get_intra_op_parallelism_threads() == one_rank.devices.threads


class Lying(hvdtrain.Source):
    """Says one thing and gives another."""

    name = "lying"

    def __init__(self, given):
        self.given = given

    def __len__(self):
        return 8

    @property
    def signature(self):
        import tensorflow as tf
        return tf.TensorSpec((3,), tf.float32), tf.TensorSpec((), tf.int32)

    def read(self, rows):
        return self.given


@pytest.mark.parametrize(("given", "words"), [
    ((np.zeros((1, 3)), np.zeros(1, "int32")), "dtype float64, but signature tells float32"),
    ((np.zeros((1, 4), "float32"), np.zeros(1, "int32")), r"shape \(1, 4\)"),
    (np.zeros((1, 3), "float32"), "another structure than signature tells")])
def test_a_source_that_does_not_keep_its_word(given, words):
    from hvdtrain.data.source import check_source
    with pytest.raises(DataError, match=words):
        check_source(Lying(given))

def test_an_error_in_reading_names_the_source_on_every_path():
    class Broken(ArraySource):
        arrays = None

        def read(self, rows):
            if len(rows) > 3:
                raise OSError("the disk is gone")
            return super().read(rows)
    # Not capfd: batches are read by two threads, and a write during its reading is lost.
    with contextlib.redirect_stderr(io.StringIO()) as printed, \
            pytest.raises(DataError, match="cannot read its data. mine: OSError: the disk is gone"):
        hvdtrain.fit(compiled(), Broken(data(), name="mine"))
    assert "Traceback" in printed.getvalue()


def test_a_metric_that_gives_an_array_is_an_array_in_history_and_files(tmp_path):
    """As in Keras, which callbacks see in the logs."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(name="f1")])
    x, y = np.eye(4, dtype="f4"), np.eye(4, 3, dtype="f4")
    result = hvdtrain.fit(
        model, x, y, validation_data=(x, y), config=TrainConfig(output=tmp_path))
    expected = model.evaluate(x, y, verbose=0, return_dict=True)["f1"]
    np.testing.assert_allclose(result.history["val_f1"][0], expected)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    np.testing.assert_allclose(line["val_f1"], expected)

"""A run that is told to stop within an epoch, and goes on, ends like one that was not stopped."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.config import TrainConfig
from hvdtrain.data.plans import ShardPlan
from hvdtrain.optim.distributed import DistributedOptimizer
from hvdtrain.settings import replace
from hvdtrain.train import coordinator
from hvdtrain.train.checkpoint import read_state
from hvdtrain.train.coordinator import StoppedError

STEPS = 25


def data(n=STEPS * 8):
    x = np.random.default_rng(0).normal(size=(n, 4)).astype("f4")
    return x, x[:, :1]


def compiled(seed=1, optimizer=None, steps_per_execution=1, ema=False):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([
        keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.3),
        keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    optimizer = optimizer or keras.optimizers.Adam(0.01, use_ema=ema)
    model.compile(DistributedOptimizer(optimizer), "mse", metrics=["mae"],
                  steps_per_execution=steps_per_execution)
    return model


class AskAt(keras.callbacks.Callback):
    """Asks for a stop in the given epoch, before the given step."""

    def __init__(self, epoch, step):
        super().__init__()
        self._at = (epoch, step)
        self._epoch = 0
        self.asked = False

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.asked = self.asked or (self._epoch, batch) >= self._at


@pytest.fixture(autouse=True)
def agree_at_every_step(monkeypatch):
    monkeypatch.setattr(coordinator, "AGREE_EVERY_S", 0.0)


CASES = {
    "last step": ((1, STEPS - 1), {}),
    "steps per execution": ((1, 10), {"steps_per_execution": 5}),
    "ema in the first epoch": ((0, 22), {"ema": True}),
    "accumulation": ((1, 10), {"optimizer": lambda: keras.optimizers.SGD(
        0.05, momentum=0.9, gradient_accumulation_steps=4)}),
}


def made(options, seed=1):
    return compiled(seed, **{name: value() if callable(value) else value
                             for name, value in options.items()})


@pytest.mark.parametrize("name", CASES)
def test_the_end_is_the_same(tmp_path, name):
    at, options = CASES[name]
    config = TrainConfig(epochs=2, batch_per_rank=8, output=tmp_path / "whole",
                         tensorboard=False, seed=3)
    whole = made(options)
    expected = hvdtrain.fit(whole, *data(), validation_data=data(16), config=config)
    cut, ask = replace(config, output=tmp_path / "cut"), AskAt(*at)
    with pytest.raises(StoppedError, match=r"All of it is in .*-sample-\d+\.keras; go on") as told:
        hvdtrain.fit(
            made(options), *data(), validation_data=data(16), config=cut, callbacks=[ask],
            stop_asked=lambda: ask.asked)
    assert told.value.exit_code == 75
    resumed = made(options, seed=99)
    result = hvdtrain.fit(
        resumed, *data(), validation_data=data(16), config=replace(cut, resume=True))
    for figure, values in expected.history.items():
        np.testing.assert_allclose(result.history[figure], values[result.epoch[0]:], rtol=2e-5)
    for a, b in zip(whole.variables, resumed.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    lines = [json.loads(line) for line in
             (tmp_path / "cut/metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("at", [(1, 5), (2, 5)])
@pytest.mark.parametrize("known", [True, False], ids=["known length", "unknown length"])
def test_a_shuffled_pipeline_goes_on_in_its_order(known, at, tmp_path):
    """Keras makes an iterator more than it uses after each epoch of a known length."""
    def pipeline():
        keras.utils.set_random_seed(7)
        made = tf.data.Dataset.from_tensor_slices(data()).shuffle(STEPS * 8, seed=2).batch(8)
        return made if known else made.filter(lambda x, y: True)
    config = TrainConfig(epochs=4, output=tmp_path / "whole", tensorboard=False, seed=3)
    whole = compiled()
    hvdtrain.fit(whole, pipeline(), shuffle=False, config=config)
    config, ask, resumed = replace(config, output=tmp_path / "cut"), AskAt(*at), compiled()
    with pytest.raises(StoppedError):
        hvdtrain.fit(compiled(), pipeline(), shuffle=False, config=config, callbacks=[ask],
                     stop_asked=lambda: ask.asked)
    hvdtrain.fit(resumed, pipeline(), shuffle=False, config=replace(config, resume=True))
    for a, b in zip(whole.variables, resumed.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


class Reshuffled(keras.utils.PyDataset):
    """Draws another order at each end of an epoch."""

    def __init__(self):
        super().__init__()
        self._order, self._rng = np.arange(STEPS * 8), np.random.default_rng(8)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = self._order[8 * index:8 * (index + 1)]
        return tuple(array[rows] for array in data())

    def on_epoch_end(self):
        self._rng.shuffle(self._order)


INPUTS = {
    "pipeline": lambda: [tf.data.Dataset.from_tensor_slices(data()).shuffle(
        STEPS * 8, seed=2).batch(8)],
    "steps per epoch": lambda: [tf.data.Dataset.from_tensor_slices(data()).shuffle(
        STEPS * 8, seed=2).batch(8).repeat()],
    "PyDataset": lambda: [Reshuffled()],
    "arrays": data,
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", INPUTS)
def test_data_go_on_from_the_first_epoch_that_was_trained(name, first, tmp_path):
    given = {"initial_epoch": first, "shuffle": name == "arrays",
             "batch_size": 8 if name == "arrays" else None,
             "steps_per_epoch": STEPS - 5 if name == "steps per epoch" else None}
    config = TrainConfig(epochs=first + 4, output=tmp_path / "whole", tensorboard=False, seed=3)

    def log():
        return keras.callbacks.CSVLogger(tmp_path / "log.csv")
    whole, cut, resumed = compiled(), compiled(), compiled()
    hvdtrain.fit(whole, *INPUTS[name](), config=config, callbacks=[log()], **given)
    expected = (tmp_path / "log.csv").read_text()
    config, ask, until_then = replace(config, output=tmp_path / "cut"), AskAt(first + 2, 5), log()
    with pytest.raises(StoppedError):
        hvdtrain.fit(cut, *INPUTS[name](), config=config, callbacks=[until_then, ask],
                     stop_asked=lambda: ask.asked, **given)
    until_then.csv_file.close()
    hvdtrain.fit(resumed, *INPUTS[name](), config=replace(config, resume=True),
                 callbacks=[log()], **given)
    for a, b in zip(whole.variables, resumed.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    found = (tmp_path / "log.csv").read_text()
    assert _rows(found).keys() == _rows(expected).keys()
    for epoch, row in _rows(expected).items():
        np.testing.assert_allclose(_rows(found)[epoch], row, rtol=2e-5)


def _rows(text):
    """The figures of a CSV file, by epoch."""
    lines = [line.split(",") for line in text.splitlines()]
    assert lines[0][0] == "epoch"
    assert len(lines) == len({line[0] for line in lines})
    return {line[0]: [float(value.replace("NA", "nan")) for value in line[1:]]
            for line in lines[1:]}


def test_rows_of_epochs_that_are_done_again_are_cut(tmp_path):
    config = TrainConfig(epochs=2, batch_per_rank=8, output=tmp_path, tensorboard=False)
    path = tmp_path / "log.csv"
    hvdtrain.fit(compiled(), *data(), config=config, callbacks=[keras.callbacks.CSVLogger(path)])
    # As after a kill: the row of an epoch was written, and its checkpoint not.
    path.write_text(path.read_text() + "2,9.0,9.0\n")
    logger = keras.callbacks.CSVLogger(path)
    hvdtrain.fit(compiled(), *data(), config=replace(config, epochs=4, resume=True),
                 callbacks=[logger])
    assert list(_rows(path.read_text())) == ["0", "1", "2", "3"]
    assert not logger.append


def test_another_batch_size_goes_on_at_the_same_sample(tmp_path):
    config = TrainConfig(epochs=2, batch_per_rank=8, output=tmp_path, tensorboard=False)
    ask = AskAt(1, 10)
    with pytest.raises(StoppedError):
        hvdtrain.fit(
            compiled(), *data(), config=config, callbacks=[ask], stop_asked=lambda: ask.asked)
    (path,) = tmp_path.glob("checkpoints/*sample*")
    state = read_state(path)
    assert (state.epoch, path.name) == (1, f"epoch-00001-sample-{state.samples:09d}.keras")
    hvdtrain.fit(compiled(), *data(), config=replace(config, batch_per_rank=4, resume=True))
    done = state.step + (STEPS * 8 - state.samples) // 4
    assert read_state(tmp_path / "checkpoints/epoch-00002.keras").step == done


def test_without_an_output_folder_nothing_is_saved():
    ask = AskAt(0, 0)
    with pytest.raises(StoppedError, match="Nothing was saved"):
        hvdtrain.fit(
            compiled(), *data(), config=TrainConfig(), callbacks=[ask],
            stop_asked=lambda: ask.asked)


@pytest.mark.parametrize(("samples", "remainder"), [(200, "pad"), (203, "pad"), (203, "drop")])
def test_steps_and_samples_of_a_position(samples, remainder):
    plan = ShardPlan(samples=samples, rank=0, size=2, batch_per_rank=8, remainder=remainder)
    for step in range(plan.steps + 1):
        assert plan.step_after(plan.samples_before(step)) == step
    assert plan.samples_before(3) == 48
    assert plan.step_after(50) == 3

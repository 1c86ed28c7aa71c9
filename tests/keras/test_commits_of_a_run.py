"""When a run commits, what it goes on from, and what it refuses; in one process."""

import json

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.commit_names import CHANGE, commits_in
from hvdtrain.config import TrainConfig
from hvdtrain.errors import ConfigError, NotFiniteError, WorldError
from hvdtrain.train import coordinator, writers
from hvdtrain.train.commits import CommitStore
from hvdtrain.train.coordinator import ChangedError, StoppedError
from hvdtrain.train.elastic import Elastic
from tests.elastic_runs import data, model_of

STEPS = 8


@pytest.fixture(autouse=True)
def agree_at_every_step(monkeypatch):
    monkeypatch.setattr(coordinator, "AGREE_EVERY_S", 0.0)


@pytest.fixture
def world(one_rank, tmp_path, monkeypatch):
    """Begins a world of this process: its folder of commits is `tmp_path / "commits"`."""
    folder = tmp_path / "commits"
    folder.mkdir()

    def begun(number=1, first=1):
        (folder / CHANGE).unlink(missing_ok=True)
        made = Elastic.of({"HVDTRAIN_COMMITS": str(folder), "HVDTRAIN_WORLD": str(number),
                           "HVDTRAIN_FIRST_RANKS": str(first)}, one_rank.world)
        monkeypatch.setitem(one_rank.__dict__, "elastic", made)
        return folder
    return begun


class At(keras.callbacks.Callback):
    """Does something before a step of an epoch, and notes the commits that are there then."""

    def __init__(self, folder, at=(9, 9), then=lambda: None):
        super().__init__()
        self._folder, self._at, self._then = folder, at, then
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.seen += [n for n in commits_in(self._folder) if n not in self.seen]
        if (self._epoch, batch) == self._at:
            self._then()

    def get_state(self):
        return {}

    def set_state(self, state):
        pass


def fit(model=None, *, callbacks=(), epochs=2, batch_size=4, stop_asked=lambda: False, **settings):
    """A training of two epochs of eight steps."""
    model = model or model_of(keras)
    history = hvdtrain.fit(
        model, *data(STEPS * 4), batch_size=batch_size, epochs=epochs, verbose=0,
        stop_asked=stop_asked, callbacks=list(callbacks),
        config=TrainConfig(seed=3, tensorboard=False, **settings))
    return model, history


@pytest.mark.parametrize(("settings", "expected"), [
    ({"commit_every_steps": 3}, [0, 3, 6, 9, 12, 15]),
    ({"commit_every_steps": 8}, [0, 8, 16]),  # at the ends of epochs as well
    ({"commit_every_s": 0.0}, [0]),
    ({}, [0]),
])
def test_when_a_run_commits(settings, expected, world):
    folder = world()
    at = At(folder)
    fit(callbacks=[at], **settings)
    assert sorted({*at.seen, *commits_in(folder)}) == expected


def test_by_the_clock_commits_take_a_small_part_of_the_time(world, monkeypatch):
    folder = world()
    monkeypatch.setattr(writers, "_PAUSE", 0)
    often = At(folder)
    fit(callbacks=[often], commit_every_s=1e-9)
    assert len(often.seen) > STEPS
    monkeypatch.setattr(writers, "_PAUSE", 1_000_000)
    rarely = At(world())
    fit(callbacks=[rarely], commit_every_s=1e-9, epochs=4)
    assert len(rarely.seen) <= 3


def test_without_the_launcher_nothing_is_committed(one_rank, tmp_path):
    assert one_rank.elastic is None
    _, history = fit(commit_every_steps=1)
    assert len(history.epoch) == 2


@pytest.mark.parametrize(("epoch", "batch"), [(1, 3), (0, STEPS - 1), (1, STEPS - 1)])
def test_a_change_ends_with_a_commit_and_no_checkpoint(epoch, batch, world, tmp_path):
    expected, whole = fit()
    folder = world()
    at = At(folder, (epoch, batch), (folder / CHANGE).touch)
    with pytest.raises(ChangedError, match=f"committed after step {batch + 1} of epoch {epoch + 1}"
                       ".*goes on") as told:
        fit(callbacks=[at], output=tmp_path / "run", checkpoint_every_epochs=0)
    assert told.value.exit_code == 75
    assert commits_in(folder) == [STEPS * epoch + batch + 1]
    assert not list((tmp_path / "run").rglob("*.keras"))
    world(2)
    model, history = fit(output=tmp_path / "run", checkpoint_every_epochs=0)
    assert history.epoch == [0, 1]
    for figure, values in whole.history.items():
        np.testing.assert_allclose(history.history[figure], values, rtol=1e-6)
    for a, b in zip(expected.variables, model.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]


def test_a_position_between_steps_is_kept(world, caplog):
    """Else each of several changes would repeat more samples."""
    folder = world()
    with pytest.raises(ChangedError):
        fit(callbacks=[At(folder, (1, 3), (folder / CHANGE).touch)])
    world(2)
    samples, store = [], CommitStore(folder)
    at = At(folder, (1, 2), lambda: samples.append(store.about(store.newest())["state"].samples))
    fit(callbacks=[at], batch_size=6)
    assert samples == [16]
    assert "No step begins after 16 samples: 4 of them are trained on once more." in caplog.text


def test_a_signal_ends_with_a_checkpoint(world, tmp_path):
    folder, asked = world(), []
    at = At(folder, (0, 3), lambda: (asked.append(1), (folder / CHANGE).touch()))
    with pytest.raises(StoppedError, match=r"signal.*All of it is in"):
        fit(callbacks=[at], output=tmp_path / "run", stop_asked=lambda: bool(asked))
    assert commits_in(folder) == [0]
    assert len(list((tmp_path / "run").rglob("*-sample-*.keras"))) == 1


def test_nothing_is_committed_of_a_loss_that_is_not_finite(world):
    folder, model = world(), model_of(keras)
    at = At(folder, (0, 4), lambda: model.weights[0].assign(
        np.full(model.weights[0].shape, np.nan)))
    with pytest.raises(NotFiniteError):
        fit(model, callbacks=[at], commit_every_steps=2)
    assert commits_in(folder) == [4]


def test_a_stop_of_a_callback_is_not_committed(world):
    """Another world would train on."""
    folder = world()

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1
    fit(callbacks=[Stop()], epochs=4, commit_every_steps=4)
    assert commits_in(folder) == [STEPS + 4]


def test_nothing_was_committed_yet(world, tmp_path):
    """The former world has begun files."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("")
    world(2)
    assert len(fit(output=tmp_path / "run")[1].epoch) == 2


@pytest.mark.parametrize("own_batches", [True, False])
def test_the_first_world_was_lost_before_it_committed(own_batches, world, one_rank, monkeypatch):
    """The next one has its global batch and its learning rate all the same."""
    world(2, first=3)
    ours, theirs = model_of(keras), model_of(keras)
    batch = {} if own_batches else {"batch_size": 4}

    def config(count):
        return TrainConfig(epochs=2, batch="per_rank", lr_scaling="linear", warmup_epochs=0, **(
            {"batch_per_rank": count} if own_batches else {}))
    given = [hvdtrain.ArraySource(data())] if own_batches else data()
    hvdtrain.fit(ours, *given, config=config(4), **batch)
    monkeypatch.setitem(one_rank.__dict__, "elastic", None)
    theirs.optimizer.learning_rate = float(theirs.optimizer.learning_rate) * 3
    hvdtrain.fit(theirs, *given, config=config(12), **({"batch_size": 12} if batch else {}))
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-7)


def test_a_commit_of_another_model_is_told(world, caplog):
    folder = world()
    fit(commit_every_steps=4)
    [number] = commits_in(folder)
    caplog.clear()
    world(2)
    other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
    other.compile("adam", "mse")
    _, history = fit(other)
    assert len(history.epoch) == 2
    assert "the job was changed" in caplog.text
    assert "else the training begins anew" in caplog.text
    assert commits_in(folder)[-1] >= number  # its commits are newer


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "bfloat16"])
def test_every_type_of_variable_is_kept(policy, world):
    keras.config.set_dtype_policy(policy)
    try:
        folder = world()
        at = At(folder, (1, 3), (folder / CHANGE).touch)
        model = model_of(keras)
        with pytest.raises(ChangedError):
            fit(model, callbacks=[at])
        arrays = dict(CommitStore(folder).arrays(STEPS + 4))
        for variable in model.variables:
            if "seed" not in variable.path:
                np.testing.assert_array_equal(arrays[variable.path], variable.numpy())
        world(2)
        assert len(fit()[1].epoch) == 2
    finally:
        keras.config.set_dtype_policy("float32")


def test_the_watchdog_is_told(world, one_rank):
    world()
    before = one_rank.progress.seconds["committing"]
    fit()
    assert one_rank.progress.seconds["committing"] > before


def test_what_cannot_be_kept_is_refused_at_the_start(world):
    world()
    fixed = keras.Sequential([keras.Input(batch_shape=(4, 5, 6)),
                              keras.layers.LSTM(2, stateful=True), keras.layers.Dense(1)])
    fixed.compile("sgd", "mse")
    with pytest.raises(ConfigError, match=r"batches of one size.*keep=\"batch_per_rank\""):
        hvdtrain.fit(fixed, np.zeros((8, 5, 6)), np.zeros((8, 1)), batch_size=4)
    with pytest.raises(ConfigError, match=r"remainder='pad' needs a batch that divides"):
        fit(remainder="pad")
    with pytest.raises(ConfigError, match=r"batch_size is that of all ranks.*batch=\"per_rank\""):
        fit(keep="batch_per_rank")
    assert fit(keep="batch_per_rank", batch="per_rank")[1].epoch
    with pytest.raises(ConfigError, match=r"batch_global fixes that of all"):
        TrainConfig(keep="batch_per_rank", batch_global=4)


@pytest.mark.parametrize(("folder", "number"), [("no/such", "1"), (".", ""), (".", "0"),
                                                (".", "one")])
def test_odd_variables_are_refused(folder, number, one_rank):
    with pytest.raises(WorldError, match=r"HVDTRAIN_COMMITS must be a folder.*The launcher sets"):
        Elastic.of({"HVDTRAIN_COMMITS": folder, "HVDTRAIN_WORLD": number}, one_rank.world)


def test_a_plan_says_the_world(world, capsys):
    world(3)
    hvdtrain.fit(model_of(keras), *data(), config=TrainConfig(epochs=2), dry_run=True)
    assert "world 3: 1 rank; global batch" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["ps", "tf"])
def test_other_engines_say_what_they_do_instead(engine, tmp_path, monkeypatch):
    from hvdtrain.rank_main import fit_on_this_rank
    from hvdtrain.runtime.guard import Guard
    monkeypatch.setattr(Guard, "fail", lambda guard, error: None)  # else it ends
    monkeypatch.setenv("HVDTRAIN_COMMITS", str(tmp_path))
    (tmp_path / "job.toml").write_text(
        '[model]\nname = "digits_mlp"\n[data]\nname = "digits"\n[compile]\nloss = "mse"\n')
    with pytest.raises(ConfigError, match="Elastic training needs engine 'allreduce'"):
        fit_on_this_rank(str(tmp_path / "job.toml"), {"engine": engine}, dry_run=True)

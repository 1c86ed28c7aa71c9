"""Checkpoints in the background and at steps, and what callbacks remember in them."""

import errno
import json
import subprocess
import threading
import time
import zipfile

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.config import TrainConfig
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.optim.distributed import DistributedOptimizer
from hvdtrain.settings import replace
from hvdtrain.train import checkpoint, coordinator
from hvdtrain.train.callbacks import CallbackStates
from hvdtrain.train.checkpoint import CheckpointStore, RunState, read_state
from hvdtrain.train.writers import SaveTimes
from hvdtrain.whole_file import _place


def data(n=40):
    x = np.random.default_rng(0).normal(size=(n, 4)).astype("f4")
    return x, x[:, :1]


def compiled(seed=1):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


STATE = RunState(epoch=1, step=5, ranks=1, version="test", callbacks=(
    {"class": "Own", "state": {"best": 0.25, "kept": [np.arange(3.0), {"a": np.eye(2)}]}},))


@pytest.mark.parametrize("background", [False, True])
def test_a_file_holds_model_and_state_either_way(tmp_path, background):
    model = compiled()
    store = CheckpointStore(tmp_path / "c", keep=2, background=background)
    path = store.save(model, STATE)
    store.wait()
    found = read_state(path)
    (own,) = found.callbacks
    assert own["state"]["best"] == 0.25
    np.testing.assert_array_equal(own["state"]["kept"][0], np.arange(3.0))
    np.testing.assert_array_equal(own["state"]["kept"][1]["a"], np.eye(2))
    plain = keras.saving.load_model(path)
    for a, b in zip(plain.variables, model.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    other = compiled(seed=9)
    assert CheckpointStore(tmp_path / "c", keep=2).load_newest(other).step == 5
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["epoch-00001.keras"]
    with zipfile.ZipFile(path) as archive:
        assert {"hvdtrain.json", "hvdtrain.npz", "model.weights.h5"} <= set(archive.namelist())


def test_training_goes_on_while_a_file_is_written(tmp_path, monkeypatch):
    """The weights in the file are those of the moment of the save."""
    begun = []
    write = checkpoint.write_file

    def slowly(data, path):
        begun.append(time.monotonic())
        time.sleep(0.3)
        write(data, path)
    monkeypatch.setattr(checkpoint, "write_file", slowly)
    model = compiled()
    before = [v.numpy() for v in model.variables]
    store = CheckpointStore(tmp_path, keep=2, background=True)
    path = store.save(model, STATE)
    assert not path.exists()
    for variable in model.variables:
        variable.assign(variable * 0)
    store.wait()
    assert begun
    for a, b in zip(keras.saving.load_model(path).variables, before, strict=True):
        np.testing.assert_array_equal(a.numpy(), b)


def test_a_disk_that_is_full_is_told_at_the_next_save_and_at_the_end(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")
    model = compiled()
    store = CheckpointStore(tmp_path, keep=2, background=True)
    monkeypatch.setattr("os.replace", full)
    store.save(model, STATE)
    with pytest.raises(CheckpointError, match=r"could not be written: No space left"):
        store.wait()
    store.save(model, STATE)
    with pytest.raises(CheckpointError, match="No space left"):
        store.save(model, STATE)
    store.wait()
    assert list(tmp_path.iterdir()) == []


def test_any_error_of_the_writing_thread_is_told(tmp_path, monkeypatch):
    def too_little(*args):
        raise MemoryError("no memory for it")
    model = compiled()
    store = CheckpointStore(tmp_path, keep=2, background=True)
    monkeypatch.setattr(checkpoint, "write_file", too_little)
    store.save(model, STATE)
    with pytest.raises(CheckpointError, match="could not be written: MemoryError: no memory"):
        store.wait()


@pytest.mark.parametrize(("background", "threads"), [
    (True, {"hvdtrain-checkpoint_0"}), (False, set())])
def test_a_thread_of_its_own_writes_where_the_settings_say_so(tmp_path, monkeypatch, background,
                                                              threads):
    found, write = set(), checkpoint.write_file

    def watched(*args):
        found.add(threading.current_thread().name)
        write(*args)
    monkeypatch.setattr(checkpoint, "write_file", watched)
    hvdtrain.fit(compiled(), *data(), config=TrainConfig(
        batch_per_rank=4, epochs=2, output=tmp_path, tensorboard=False,
        checkpoint_background=background))
    assert found == threads
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_figures_of_a_former_run_are_kept_whole_or_as_they_were(tmp_path, monkeypatch):
    """A run that is killed while it goes on has not lost what was there."""
    def killed(*args):
        raise KeyboardInterrupt
    config = TrainConfig(batch_per_rank=4, epochs=2, output=tmp_path / "o", tensorboard=False)
    hvdtrain.fit(compiled(), *data(), config=config)
    path = tmp_path / "o/metrics.jsonl"
    before = path.read_text()
    assert before.count("\n") == 2
    monkeypatch.setattr("hvdtrain.whole_file._synchronize", killed)
    with pytest.raises(KeyboardInterrupt):
        hvdtrain.fit(compiled(), *data(), config=replace(config, resume=True, epochs=3))
    assert path.read_text() == before


def test_a_script_that_resumes_needs_an_output_folder():
    with pytest.raises(ConfigError, match="resume needs the output folder"):
        hvdtrain.fit(compiled(), *data(), config=TrainConfig(resume=True))


def test_what_a_killed_run_left_is_removed_when_it_goes_on(tmp_path):
    config = TrainConfig(batch_per_rank=4, epochs=1, output=tmp_path / "o", tensorboard=False)
    hvdtrain.fit(compiled(), *data(), config=config)
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = tmp_path / f"o/checkpoints/.epoch-00002.keras.tmp-{_place()}-{dead.pid}.keras"
    left.write_text("half")
    hvdtrain.fit(compiled(), *data(), config=replace(config, resume=True, epochs=2))
    assert sorted(p.name for p in left.parent.iterdir()) == ["epoch-00001.keras",
                                                             "epoch-00002.keras"]


def test_checkpoints_by_steps_and_by_the_clock(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator, "AGREE_EVERY_S", 0.0)
    config = TrainConfig(batch_per_rank=4, epochs=2, output=tmp_path / "steps", tensorboard=False,
                         checkpoint_every_epochs=0, checkpoint_every_steps=4, keep_checkpoints=99)
    hvdtrain.fit(compiled(), *data(), config=config)
    assert sorted(p.name for p in (tmp_path / "steps/checkpoints").iterdir()) == [
        "epoch-00000-sample-000000016.keras", "epoch-00000-sample-000000032.keras",
        "epoch-00001-sample-000000008.keras", "epoch-00001-sample-000000024.keras",
        "epoch-00002.keras"]
    clock = replace(config, output=tmp_path / "clock", checkpoint_every_steps=0,
                    checkpoint_every_s=1e-6)
    hvdtrain.fit(compiled(), *data(), config=clock)
    assert len(list((tmp_path / "clock/checkpoints").iterdir())) > 4
    hvdtrain.fit(compiled(seed=5), *data(), config=replace(clock, resume=True, epochs=3))


def test_times_are_counted_from_the_last_checkpoint():
    times = SaveTimes(every_steps=10)
    assert not times.by_steps(30)
    times.begin(3)
    assert [times.by_steps(step) for step in (4, 9, 10, 12)] == [False, False, True, True]
    times.begin(12)
    assert not times.by_steps(19)
    assert times.by_steps(20)
    assert not times.by_clock()


class Counting(keras.callbacks.Callback):
    """Attributes of many kinds; some are settings."""

    def __init__(self, patience):
        super().__init__()
        self.patience = patience
        self.seen = 0
        self.figures = []
        self.function = print

    def on_train_begin(self, logs=None):
        self.seen = 0

    def on_epoch_end(self, epoch, logs=None):
        self.seen += 1
        self.figures.append(logs["loss"])


class Told(keras.callbacks.Callback):
    """Says itself what it keeps."""

    def __init__(self):
        super().__init__()
        self.hidden = {"a": {1, 2}}
        self.given = None

    def get_state(self):
        return {"size": len(self.hidden["a"])}

    def set_state(self, state):
        self.given = state


def test_callbacks_go_on_where_they_were_and_settings_may_change(tmp_path):
    config = TrainConfig(batch_per_rank=4, epochs=2, output=tmp_path, tensorboard=False)
    stop = keras.callbacks.EarlyStopping("loss", patience=3, min_delta=1e9,
                                         restore_best_weights=True)
    hvdtrain.fit(compiled(), *data(), config=config, callbacks=[Counting(3), stop, Told()])
    assert stop.wait == 1
    counting, told = Counting(5), Told()
    again = keras.callbacks.EarlyStopping("loss", patience=3, min_delta=1e9,
                                          restore_best_weights=True)
    result = hvdtrain.fit(
        compiled(), *data(), config=replace(config, resume=True, epochs=9),
        callbacks=[counting, again, told])
    assert (counting.patience, counting.seen, len(counting.figures)) == (5, 4, 4)
    assert told.given == {"size": 2}
    assert (again.stopped_epoch, again.best_epoch) == (3, 0), "patience counts the first run's"
    assert len(result.history["loss"]) == 2


def test_states_that_do_not_belong_are_told(caplog):
    states = CallbackStates([Counting(3)])
    states.restore([{"class": "Told", "state": {}}])
    assert "no state of the callback Counting" in caplog.text
    assert json.dumps(states.collect()) == '[{"class": "Counting", "state": {}}]'

"""Engine tf on two processes: MultiWorkerMirroredStrategy."""

import json
import os
import signal
import socket

import numpy as np
import pytest

from hvdtrain.errors import ConfigError, DataError
from hvdtrain.settings import replace
from tests.engines.tf.cases import Case, distance, embedding, settings, with_state, words

pytestmark = pytest.mark.ranks(2)
SIGNALS = []


@pytest.fixture(scope="module")
def run():
    """Processes that have met, until they end."""
    from hvdtrain.engines.tf_distribute.training import open_strategy
    from hvdtrain.world.detect import detect_world
    world = detect_world(os.environ)
    before = signal.signal(signal.SIGTERM, lambda number, frame: SIGNALS.append(number))
    with open_strategy(settings(hang_timeout_s=0.0), world, os.environ) as opened:
        yield opened
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def cleared(run):
    import keras
    keras.backend.clear_session(free_memory=False)


@pytest.fixture
def folder(run, tmp_path):
    """One folder for both processes."""
    from pathlib import Path
    return Path(run.collective.gather_objects(str(tmp_path))[0])


def train(run, case, config, *, stop_asked=lambda: False):
    from hvdtrain.engines.tf_distribute.training import train_job
    return train_job(case.job, config, run, stop_asked=stop_asked, dry_run=False)


def test_processes_tell_each_other(run):
    import tensorflow as tf
    collective, rank = run.collective, run.world.rank
    assert (collective.rank, collective.size) == (rank, 2)
    assert collective.gather_objects({"rank": rank, "x": "y" * rank}) == [
        {"rank": 0, "x": ""}, {"rank": 1, "x": "y"}]
    for array in (np.arange(5, dtype="uint8"), np.float16([[1.5], [-0.0], [np.nan]])):
        received = collective.broadcast_array(array if rank == 1 else array * 0, root=1)
        assert received.tobytes() == array.tobytes()
        assert (received.dtype, received.shape) == (array.dtype, array.shape)
    rows = tf.fill([rank + 1, 2], float(rank))
    assert collective.allgather(rows, name="rows").numpy().tolist() == [
        [0, 0], [1, 1], [1, 1]]
    average, = collective.reduce([tf.constant([rank, 4.0])], name="mean", op="average")
    assert average.numpy().tolist() == [0.5, 4.0]


def test_a_stranger_does_not_reach_tensorflow(run):
    resolver = run.strategy.cluster_resolver
    own = resolver.cluster_spec().as_dict()[resolver.task_type][resolver.task_id]
    port = int(own.rpartition(":")[2])
    for source, refused in (("127.0.0.1", False), ("127.0.0.2", True)):
        with socket.socket() as connection:
            connection.settimeout(0.5)
            connection.bind((source, 0))
            assert bool(connection.connect_ex(("127.0.0.1", port))) == refused


def test_a_request_to_stop_still_comes_to_python(run):
    """TensorFlow's coordination service takes the signal for itself."""
    os.kill(os.getpid(), signal.SIGTERM)
    assert SIGNALS == [signal.SIGTERM]


@pytest.mark.parametrize(("optimizer", "per_call", "validation"), [
    ("sgd", 1, 37), ("adam", 5, 1)])
def test_it_trains_as_one_process_on_the_global_batch(run, folder, optimizer, per_call,
                                                      validation, warnings_of):
    def make(keras):
        return (keras.optimizers.SGD(0.05, momentum=0.9) if optimizer == "sgd" else
                keras.optimizers.Adam(0.01, global_clipnorm=0.5, weight_decay=0.01))
    case = Case(make, validation=validation, steps_per_execution=per_call)
    result = train(run, case, settings(output=folder))
    weights = case.weights
    assert int(case.models[-1].optimizer.iterations.numpy()) == 20
    warned = any("steps_per_execution is 1" in line for line in warnings_of())
    assert warned == (per_call > 1 and run.world.is_chief)
    model, history = case.plain(2)
    assert distance(weights, model.get_weights()) < 1e-6
    for name in ("loss", "accuracy"):
        assert result.history[name] == pytest.approx(history[name], abs=1e-6)
    expected = model.evaluate(case.x[:validation], case.y[:validation], verbose=0,
                              return_dict=True)
    for name, value in expected.items():
        assert result.history[f"val_{name}"][-1] == pytest.approx(value, abs=1e-6)
    written = sorted(p.name for p in folder.rglob("*") if p.is_file())
    assert written == ["epoch-00001.keras", "epoch-00002.keras", "metrics.jsonl", "model.keras"]


def test_rows_of_an_embedding(run):
    case = Case(lambda keras: keras.optimizers.SGD(0.5, momentum=0.9), embedding, words(),
                validation=0)
    train(run, case, settings())
    weights = case.weights
    assert distance(weights, case.plain(2)[0].get_weights()) < 1e-6


def test_a_run_that_was_cut_is_the_run_that_was_not(run, folder):
    """With statistics and dropout of each process; cut at an epoch's end, then within one."""
    from hvdtrain.train.coordinator import StoppedError

    def make():
        return Case(lambda keras: keras.optimizers.Adam(0.01), with_state)
    whole, cut = make(), make()
    config = settings(output=folder / "whole", batch_per_rank=2)
    expected = train(run, whole, config).history
    everyone = run.collective.gather_objects(whole.weights)
    assert distance(*everyone) == 0.0
    config = replace(config, output=folder / "cut")
    train(run, cut, replace(config, epochs=1))
    config = replace(config, resume=True)
    asked = iter([False, run.world.rank == 1])  # one process is told, all stop
    with pytest.raises(StoppedError, match=r"after step 2\d of epoch 2"):
        train(run, cut, config, stop_asked=lambda: next(asked, False))
    result = train(run, cut, config)
    # Where it was cut within the epoch the statistics were averaged once more.
    assert distance(whole.weights, cut.weights) < 1e-6
    for name, values in result.history.items():
        assert values == pytest.approx(expected[name][1:], abs=1e-6)
    lines = (folder / "cut" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]


def test_processes_with_other_settings_stop(run):
    config = settings(seed=run.world.rank)
    with pytest.raises(ConfigError, match="seed is 0 on rank 0 and 1 on rank 1"):
        train(run, Case(lambda keras: keras.optimizers.SGD(0.1)), config)


def test_fewer_samples_than_processes(run):
    case = Case(lambda keras: keras.optimizers.SGD(0.1), data=(np.zeros((1, 8), "float32"),
                                                              np.zeros(1, "int32")))
    with pytest.raises(DataError, match="1 training samples for 2 ranks"):
        train(run, case, settings())

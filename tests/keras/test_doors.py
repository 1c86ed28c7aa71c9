"""A setting of the reduction acts from every door: job file, Python job, `fit`, command line."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.config import COLLECTIVE_VARIABLE, TrainConfig
from hvdtrain.entry import load_job
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.optim.distributed import state_of
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.run import run_job, with_default_output
from hvdtrain.session import _asked_collective

JOB = """
import keras
import numpy as np
import hvdtrain


def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    made.compile(hvdtrain.DistributedOptimizer(optimizer) if OWN else optimizer, "mse")
    models.append(made)
    return made


models = []


def job():
    return hvdtrain.Job(name="doors", model=model,
                        data=lambda: (np.zeros((8, 2), "f4"), np.zeros((8, 1), "f4")))
"""
SETTINGS = [{"compression": "bf16"}, {"sparse": "dense"}, {"bucket_mb": 2.0}, {"predivide": 4.0},
            {"compression": "topk", "topk_ratio": 0.01},
            {"compression": "lowrank", "approximation_rank": 3}]


@pytest.mark.parametrize("own", [False, True], ids=["plain", "distributed in the job"])
@pytest.mark.parametrize("given", SETTINGS, ids=lambda given: "-".join(given))
def test_the_command_line_reaches_the_reduction_of_a_python_job(given, own, tmp_path, one_rank):
    path = tmp_path / "job.py"
    path.write_text(JOB.replace("OWN", repr(own)))
    job = load_job(str(path))
    config = with_default_output(job, {**given, "output": tmp_path / "out"})
    run_job(job, config, one_rank, dry_run=True)
    model = job.model.__globals__["models"][0]
    assert state_of(model.optimizer).options == ReducerOptions.of(TrainConfig(**given))


def test_what_the_launcher_asks_for_is_heard_by_init():
    assert _asked_collective("auto", {COLLECTIVE_VARIABLE: "mpi4py"}) == "mpi4py"
    assert _asked_collective("horovod-gloo", {}) == "horovod-gloo"
    with pytest.raises(ConfigError, match=r"'single' is asked for here, and 'mpi4py' by the laun"):
        _asked_collective("single", {COLLECTIVE_VARIABLE: "mpi4py"})


def test_options_that_contradict_the_settings_are_refused_and_others_are_joined():
    given = ReducerOptions(compression="fp16", local_variables=("expert",))
    assert given.changed_by(ReducerOptions()) == given
    joined = given.changed_by(ReducerOptions(bucket_bytes=1 << 20))
    assert (joined.compression, joined.bucket_bytes, joined.local_variables) == (
        "fp16", 1 << 20, ("expert",))
    with pytest.raises(ConfigError, match=r"compression='bf16', and the options given to"):
        given.changed_by(ReducerOptions(compression="bf16"))


def test_counting_a_stream_says_so(monkeypatch, caplog):
    from hvdtrain.data import stream
    monkeypatch.setattr(stream, "_SAY_EVERY_S", 0.0)
    source = hvdtrain.StreamSource(lambda rank, size: iter(np.zeros((200, 2), "f4")))
    assert source.count(0, 1) == 200
    assert "counting its samples, 64 so far. A stream that never ends" in caplog.text
    with pytest.raises(DataError, match="never ends"):
        hvdtrain.StreamSource(tf.data.Dataset.range(3).repeat()).count(0, 1)


def test_everything_is_taken_away_after_a_run_and_after_an_error(one_rank):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, "mse")
    data = (np.ones((8, 2), "f4"), np.ones((8, 1), "f4"))
    hvdtrain.fit(model, *data)
    before = set(vars(model)), set(vars(optimizer)), set(vars(model._compile_loss))

    class Odd(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ZeroDivisionError
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            hvdtrain.fit(model, *data, callbacks=[Odd()])
        assert (set(vars(model)), set(vars(optimizer)), set(vars(model._compile_loss))) == before
    assert not {"train_step", "evaluate", "_get_metrics_result_or_logs"} & before[0]
    assert state_of(optimizer).learning_rate_multiplier is None
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    plain.set_weights(model.get_weights())
    for each in (plain, model):
        each.fit(*data, batch_size=8, verbose=0)
    np.testing.assert_array_equal(plain.get_weights()[0], model.get_weights()[0])

"""The curve that `hvdtrain lr` prints is what training uses."""

import csv

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.cli.job import lr_command
from hvdtrain.config import TrainConfig
from hvdtrain.data.source import ArraySource
from hvdtrain.errors import ConfigError
from hvdtrain.optim.distributed import DistributedOptimizer
from hvdtrain.train.schedule import learning_rates, scale_factor

JOB = """
import keras
import numpy as np
import hvdtrain


def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 20)), "mse")
    return made


def job():
    return hvdtrain.Job(
        name="curve", model=model, data=lambda: (np.zeros((64, 2), "f4"), np.zeros((64, 1), "f4")),
        config=hvdtrain.TrainConfig(batch_per_rank=4, epochs=3, warmup_epochs=1.0))
"""


def cube_root(size):
    """A rule of a user."""
    return size ** (1 / 3)


def broken(size):
    return -float(size)


def test_the_table_the_file_and_the_plot(tmp_path, capsys):
    job = tmp_path / "job.py"
    job.write_text(JOB)
    lr_command(job=str(job), ranks=4, points=5, plot=tmp_path / "lr.png",
               to_csv=tmp_path / "lr.csv")
    shown = capsys.readouterr().out
    assert "warmup over 4 steps" in shown
    rows = list(csv.DictReader((tmp_path / "lr.csv").read_text().splitlines()))
    assert len(rows) == 12
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 20)
    for row in rows:
        step = int(row["step"])
        expected = float(schedule(step)) * (1 + 3 * min(1, step / 4))
        assert float(row["learning_rate"]) == pytest.approx(expected, rel=1e-6)
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"ends in \.png"):
        lr_command(job=str(job), plot=tmp_path / "lr.doc")


def test_options_replace_the_settings_of_the_job(tmp_path, capsys):
    job = tmp_path / "job.py"
    job.write_text(JOB)
    lr_command(job=str(job), ranks=2, batch_global=16, epochs=2, lr_scaling="none",
               warmup_epochs=0.0, to_csv=tmp_path / "lr.csv")
    rows = list(csv.DictReader((tmp_path / "lr.csv").read_text().splitlines()))
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 20)
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx(
        [float(schedule(step)) for step in range(2 * 64 // 16)], rel=1e-6)


def test_schedulers_are_called_and_training_uses_the_same_rates():
    def compiled():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(DistributedOptimizer(keras.optimizers.SGD(0.5)),
                      lambda y, p: keras.ops.mean(p))
        return model
    falling = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    config = TrainConfig(batch_per_rank=4, epochs=3, lr_scaling="none")
    x = np.ones((8, 1), "f4")
    curve = learning_rates(compiled(), ArraySource((x, x)), config, size=1, base="0.5",
                           callbacks=[falling])
    assert curve.rates == (0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625)
    assert curve.points(3) == [0, 2, 5]
    model, used, before = compiled(), [], []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            before.append(float(self.model.weights[0].numpy()[0, 0]))

        def on_train_batch_end(self, batch, logs=None):
            used.append(before[-1] - float(self.model.weights[0].numpy()[0, 0]))
    hvdtrain.fit(model, x, x, config=config, callbacks=[falling, Watch()])
    np.testing.assert_allclose(used, curve.rates, rtol=1e-5)


def test_a_rule_of_ones_own():
    assert scale_factor(8, f"{__name__}:cube_root") == pytest.approx(2.0)
    with pytest.raises(ConfigError, match=r"gave -8\.0 for 8 ranks"):
        scale_factor(8, f"{__name__}:broken")
    with pytest.raises(ConfigError, match="there is no such function"):
        scale_factor(8, f"{__name__}:nowhere")
    with pytest.raises(ConfigError, match="there is no such function"):
        scale_factor(8, "no_such_module:rule")

"""What `hvdtrain compare` takes and refuses, and the job files of a sweep."""

import tomllib
from pathlib import Path

import pytest

from hvdtrain.bench.options import CompareOptions, Sweep, bits_per_s
from hvdtrain.bench.plan import changed_job, swept_values
from hvdtrain.errors import ConfigError
from hvdtrain.job import read_job_file


@pytest.mark.parametrize(("values", "message"), [
    ({"engines": ("single", "mpi")}, "unknown 'mpi'. Expected some of: single, allreduce-gloo"),
    ({"engines": ()}, "unknown nothing"),
    ({"engines": ("single", "single")}, "names one twice"),
    ({"workers": 0}, "workers must be at least 1. Received: workers=0"),
    ({"epochs": 1}, "epochs must be at least 2. Received: epochs=1"),
    ({"rounds": 0}, "rounds must be at least 1"),
    ({"timeout_s": 0.5}, "timeout_s must be at least 1"),
    ({"servers_on": "moon"}, "servers_on must be one of 'workers', 'apart'"),
    ({"network": ("fast",)}, "cannot read the rate 'fast'"),
    ({"network": ("0mbit",)}, "cannot read the rate"),
    ({"hosts": (2,)}, "Give --network as well"),
    ({"hosts": (1,), "network": ("1gbit",)}, "--hosts is 1. Expected 2 or more"),
    ({"hosts": (2,), "network": ("1gbit",), "workers": 2}, "leave out --workers"),
    ({"target": "accuracy"}, "Expected FIGURE=VALUE"),
    ({"target": "accuracy=much"}, "Expected FIGURE=VALUE"),
    ({"target": "accuracy=1e"}, "Expected FIGURE=VALUE"),
    ({"predict": True}, "Give --network as well, or see hvdtrain plan"),
    ({"sweep": "speed"}, "Expected data, model, roles, or a key"),
])
def test_mistakes_are_told(values, message):
    with pytest.raises(ConfigError, match=message):
        CompareOptions(job="job.toml", **values)


@pytest.mark.parametrize(("text", "lines", "expected"), [
    ("val_accuracy=0.9", [0.8, 0.9, 0.95], 1),
    ("val_loss=0.3", [0.5, 0.31, 0.29], 2),
    ("top5 >= 0.5", [0.4, 0.6], 1),
    ("x<=1", [2.0, 1.0], 1),
])
def test_a_target_knows_which_way_is_better(text, lines, expected):
    target = CompareOptions(job="j.toml", target=text).wanted_target()
    name = text.partition("=")[0].strip(" <>")
    assert [target.reached({name: value}) for value in lines].index(True) == expected
    assert not target.reached({"another": 1.0})


def test_rates():
    assert (bits_per_s("100mbit"), bits_per_s("2.5gbit"), bits_per_s("64kbit")) == (
        1e8, 2.5e9, 64e3)


def test_a_key_and_its_values():
    assert CompareOptions(job="j.toml", sweep="model.hidden=64,0.5,relu").wanted_sweep() == Sweep(
        table="model", key="hidden", values=(64, 0.5, "relu"))


JOB = """
[model]
name = "net.py:make"
features = 64
hidden = 128
note = 'a "quoted" \\ text'

[data]
name = "synthetic"
samples = 1000
features = 64
seed = 3

[compile]
loss = "mse"
metrics = ["mae"]

[train]
epochs = 3
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def test_data_and_model_are_multiplied(job):
    assert swept_values(str(job), Sweep(table="data")) == ("data", "samples", (1000, 2000, 4000))
    assert swept_values(str(job), Sweep(table="model")) == ("model", "hidden", (128, 256, 512))


def test_a_job_that_cannot_be_swept_is_refused(job, tmp_path):
    job.write_text(JOB.replace("samples = 1000\n", ""))
    with pytest.raises(ConfigError, match=r"no whole number samples in \[data\]"):
        swept_values(str(job), Sweep(table="data"))
    with pytest.raises(ConfigError, match=r"job.py is Python. Give a .toml job"):
        swept_values(str(tmp_path / "job.py"), Sweep(table="data"))


def test_a_changed_job_differs_in_that_value_alone(job, tmp_path):
    text = changed_job(str(job), "data", "samples", 2000)
    before, after = tomllib.loads(JOB), tomllib.loads(text)
    before["data"]["samples"] = 2000
    before["model"]["name"] = f"{job.parent}/net.py:make"  # it may stand in another folder
    assert after == before
    (tmp_path / "other.toml").write_text(text)
    assert read_job_file(tmp_path / "other.toml").train.epochs == 3


def test_the_models_input_is_as_wide_as_the_data(job):
    after = tomllib.loads(changed_job(str(job), "data", "features", 256))
    assert after["data"]["features"] == after["model"]["features"] == 256


@pytest.mark.parametrize(("job", "name"), [
    ("examples/digits_mlp.toml", "digits_mlp"), ("train.py", "train"),
    ("my.package", "my.package")])
def test_the_folder_is_named_after_the_job(job, name):
    assert CompareOptions(job=job).folder == Path("runs") / f"compare-{name}"

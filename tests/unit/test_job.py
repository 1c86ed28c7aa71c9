import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.job import Job, read_job_file

GOOD = """
[model]
name = "digits_mlp"
hidden = 32
[data]
name = "digits"
[compile]
loss = "mse"
metrics = ["accuracy"]
[train]
epochs = 2
"""


def write(tmp_path, text):
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_a_job_file_is_read(tmp_path):
    job = read_job_file(write(tmp_path, GOOD))
    assert job.model.arguments == {"hidden": 32}
    assert job.optimizer.name == "Adam"
    assert job.compile.metrics == ("accuracy",)
    assert job.train.epochs == 2


@pytest.mark.parametrize(("text", "message"), [
    (GOOD + "\n[trian]\nepochs = 1", "unknown table or key 'trian'. Valid tables"),
    (GOOD.replace("epochs", "epoch"), r"\[train\]: unknown key 'epoch'. Valid keys"),
    (GOOD.replace("epochs = 2", 'epochs = "two"'), "epochs must be a whole number"),
    (GOOD.replace('loss = "mse"', "loss = 3"), "loss must be a string or None"),
    ("model = 3", r"model must be a table, written \[model\]"),
    ("[model]\nhidden = 3", r"\[model\] needs a name"),
    ('[model]\nname = "digits_mlp"', r"\[data\] needs a name. Received: no \[data\] table"),
    ("[model\n", "is not valid TOML"),
])
def test_a_wrong_job_file_is_told_apart(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_job_file(write(tmp_path, text))


def test_a_python_job_takes_a_train_config():
    with pytest.raises(ConfigError, match=r"hvdtrain.TrainConfig\(...\). Received: config={"):
        Job(name="digits", model=dict, data=dict, config={"epochs": 3})


def test_a_missing_job_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.toml does not exist"):
        read_job_file(tmp_path / "nowhere.toml")


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_job_file(path)

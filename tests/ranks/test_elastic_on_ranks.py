"""Elastic training: after a change of ranks the result is that of an undisturbed run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.commit_names import commit_name, commits_in
from tests import preload
from tests.elastic_runs import CASES, EPOCHS, ON_HOSTS_OF_THEIR_OWN
from tests.keras_file import weights_of

ROOT = Path(__file__).resolve().parents[2]
ALONE = "the_batch_of_each_rank"
ON_THREE = ("uneven_batches", "divided_state", "second_training_with_files", ALONE)


def launch(ranks, *words, cwd=ROOT, timeout=300):
    """`hvdtrain launch` in forks of a process with TensorFlow."""
    command = [sys.executable, "-m", "hvdtrain", "launch", "-np", ranks, *words]
    env = {**os.environ, **preload.environment()}
    done = subprocess.run([*map(str, command)], env=env, text=True, cwd=cwd, check=False,
                          capture_output=True, timeout=timeout)
    assert not preload.refusals(done.stderr), done.stderr
    return done


def stage(ranks, name, folder, cases=()):
    done = launch(ranks, "--", sys.executable, "-m", "tests.elastic_runs", name, folder, *cases)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of all cases: undisturbed on 3 ranks; cut there, and gone on with 2 and 3."""
    base = tmp_path_factory.mktemp("elastic")
    folders = {name: base / name for name in ("whole", "cut", "two", "three")}
    for name in ("whole", "cut"):
        folders[name].mkdir()
        stage(3, name, folders[name])
    texts = {}
    for ranks, name, cases in ((2, "two", ()), (3, "three", ON_THREE)):
        shutil.copytree(folders["cut"], folders[name])
        texts[name] = stage(ranks, "on", folders[name], cases)
    yield folders, texts
    shutil.rmtree(base)


def result(folder, case):
    with np.load(folder / f"{case}.npz") as found:
        return dict(found), json.loads((folder / f"{case}.json").read_text())


@pytest.mark.parametrize(("ranks", "case"), [
    *(("two", case) for case in CASES if case != ALONE),
    *(("three", case) for case in ON_THREE if case != ALONE)])
def test_other_ranks_end_as_an_undisturbed_run(case, ranks, runs):
    folders, _ = runs
    expected, told = result(folders["whole"], case)
    found, told_by_them = result(folders[ranks], case)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6)
    assert told_by_them["epoch"] == told["epoch"] == list(range(EPOCHS))
    assert told_by_them["history"].keys() == told["history"].keys()
    for figure, values in told["history"].items():
        np.testing.assert_allclose(told_by_them["history"][figure], values, rtol=1e-6, atol=1e-6)


def test_callbacks_have_seen_the_same(runs):
    (losses, *counted), (found, *counted_by_them) = (
        result(runs[0][name], "state_of_callbacks")[1]["notes"] for name in ("whole", "two"))
    assert counted == counted_by_them
    np.testing.assert_allclose(found, losses, rtol=1e-6)


def test_a_training_that_has_files_is_not_done_again(runs):
    folders, texts = runs
    name = "second_training_with_files"
    assert [result(folders[f], name)[1]["notes"] for f in ("whole", "two", "three")] == [2, 0, 0]
    assert "The commit is of training 2 of this script" in texts["two"]


@pytest.mark.parametrize("case", ON_HOSTS_OF_THEIR_OWN)
def test_all_hosts_have_the_same_commit(case, runs):
    folder = runs[0]["cut"] / case
    contents = {(folder / f"rank{rank}" / commit_name(8)).read_bytes() for rank in range(3)}
    assert len(contents) == 1


def test_with_the_batch_of_each_rank_no_sample_is_left_out(runs):
    """36 samples were trained on; steps of 2 ranks have 8 of them, so that 4 are repeated."""
    folders, texts = runs
    rate_times_share = {"whole": 3 / 12, "two": 2 / 8, "three": 3 / 12}
    for name, step in rate_times_share.items():
        [weights] = result(folders[name], ALONE)[0].values()
        seen = np.round(-weights.reshape(-1) / step, 9)
        assert set(seen) <= {EPOCHS, EPOCHS + 1.0}
        assert (seen == EPOCHS + 1).sum() == (4 if name == "two" else 0)
    assert "No step begins after 36 samples: 4 of them are trained on once more." in texts["two"]
    assert "world 2: 2 ranks, was 3; each rank keeps its batch" in texts["two"]
    assert "world 2: 2 ranks, was 3; global batch and learning rate are those of 3" in texts["two"]


JOB = """
import os, signal
import keras
import hvdtrain
from tests.elastic_runs import data, model_of


class Die(keras.callbacks.Callback):
    '''In the first world, kills rank 1 before a step.'''

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (os.environ.get("HVDTRAIN_WORLD"), hvdtrain.rank(), self.epoch, batch) == (
                "1", 1, 1, 3):
            os.kill(os.getpid(), signal.SIGKILL)


def model():
    keras.config.set_floatx("float64")
    return model_of(keras)


def job():
    return hvdtrain.Job(
        name="elastic", model=model, data=lambda: data(60), callbacks=lambda: [Die()],
        config=hvdtrain.TrainConfig(epochs=3, batch_per_rank=4, tensorboard=False,
                                    commit_every_steps=2))
"""


@pytest.fixture
def fit(tmp_path):
    """Starts the job as the launcher of an elastic job does."""
    (tmp_path / "job.py").write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n{JOB}")
    commits = tmp_path / "commits"
    commits.mkdir()

    def started(ranks, world, *words, output="run"):
        given = ("--env", f"HVDTRAIN_COMMITS={commits}", "--env", f"HVDTRAIN_WORLD={world}")
        return launch(ranks, *(given if world else ()), "fit", "job.py", "-o", output, *words,
                      cwd=tmp_path)
    return started


def weights_in(folder):
    """The weights of the model's file by name; this process loads no Keras."""
    found = {name: value for name, value in weights_of(folder / "model.keras").items()
             if name.startswith("layers/")}
    assert len(found) == 4
    return found


def test_a_job_whose_rank_was_killed(fit, tmp_path):
    assert fit(3, 0, output="whole").returncode == 0
    killed = fit(3, 1)
    assert killed.returncode == 128 + 9, killed.stdout + killed.stderr
    assert "world 1: 3 ranks; global batch" in killed.stdout
    commits = tmp_path / "commits"
    [newest] = commits_in(commits)
    assert newest == 8  # an epoch of 5 steps, and 3
    damaged = tmp_path / "damaged"
    shutil.copytree(commits, damaged)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    gone_on = fit(2, 2)
    said = gone_on.stdout + gone_on.stderr
    assert gone_on.returncode == 0, said
    assert "world 2: 2 ranks, was 3" in said
    assert "Going on after epoch 1 of 3 and 36 samples of the next" in said
    (damaged / commit_name(newest)).write_bytes(b"x" * 99)
    shutil.rmtree(commits)
    damaged.rename(commits)
    from_disk = fit(2, 2, output="other")
    said = from_disk.stdout + from_disk.stderr
    assert from_disk.returncode == 0, said
    assert "is damaged" in said
    assert "Going on after epoch 1 of 3 (step 5, written on 3 ranks)" in said
    assert "world 2: 2 ranks, was 3; global batch and learning rate are those of 3" in said
    for output in ("run", "other"):
        lines = (tmp_path / output / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]
        found = weights_in(tmp_path / output)
        for name, value in weights_in(tmp_path / "whole").items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6)

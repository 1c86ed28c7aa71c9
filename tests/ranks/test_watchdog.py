"""Real ranks that hang, stop, are slow, or go on after a stop: TensorFlow and Horovod throughout.

Each test starts `hvdtrain launch -np 2 fit` on one job, in which rank 1 does what FAULT says.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests import preload

STEPS = 40
JOB = f"""
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import hvdtrain

FAULT = os.environ["FAULT"]
RANK = hvdtrain.detect_world(os.environ).rank


def read_a_bad_disk():
    time.sleep(3600)


class SlowSource(hvdtrain.ArraySource):
    arrays = None  # read by `read`

    def read(self, rows):
        if FAULT == "ask" and RANK == 1:
            time.sleep(2.0)
        return super().read(rows)


class Fault(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if FAULT == "term":
            time.sleep(0.1)  # so that the ranks agree several times in an epoch
        if (RANK, self.epoch, batch) == (1, 1, 3):
            Path("fault").write_text(str(time.time()))
            if FAULT == "hang":
                read_a_bad_disk()
            if FAULT == "sys.exit":
                sys.exit()
            if FAULT == "os._exit":
                os._exit(0)
        if (RANK, self.epoch, batch) == (0, 1, 3) and "exit" in FAULT:
            time.sleep(60)

    def on_train_end(self, logs=None):
        print("steps", int(self.model.optimizer.iterations), file=sys.stderr, flush=True)


class Ask(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and RANK == 1:
            self.model.stop_training = True


def model():
    network = keras.Sequential([
        keras.Input((4,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dropout(0.3),
        keras.layers.Dense(1)])
    network.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return network


def data():
    x = np.random.default_rng(0).normal(size=({STEPS} * 16, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    return hvdtrain.DataSplits(train=hvdtrain.ArraySource((x, y)),
                               validation=SlowSource((x[:64], y[:64])))


def job():
    return hvdtrain.Job(
        name="job", model=model, data=data,
        callbacks=lambda: [Fault(), Ask()] if FAULT == "ask" else [Fault()],
        config=hvdtrain.TrainConfig(batch_per_rank=8, epochs=3, tensorboard=False))


if __name__ == "__main__":
    hvdtrain.init()
    network = model()
    hvdtrain.DistributedOptimizer(network.optimizer)
    hvdtrain.fit(network, data().train, config=job().config, callbacks=[Fault()])
"""


def start(folder, fault, *options, command=("fit", "job.py")):
    (folder / "job.py").write_text(JOB)
    (folder / "fault").unlink(missing_ok=True)
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("hvdtrain")), "launch", "-np", "2", *command,
         *map(str, options)],
        cwd=folder, env={**os.environ, **preload.environment(), "FAULT": fault}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    """Exit code, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the launch does not end:\n{out}\n{err}") from None
    assert not preload.refusals(err), err
    return process.returncode, out, err


def run(folder, fault, *options, **kwargs):
    return finish(start(folder, fault, *options, **kwargs))


@pytest.mark.slow
def test_a_callback_that_hangs_on_one_rank_ends_the_run_and_is_named(tmp_path):
    limit_s = 4.0
    code, _, err = run(tmp_path, "hang", "--hang-timeout", limit_s)
    seconds = time.time() - float((tmp_path / "fault").read_text())
    assert code == 124, err
    assert limit_s < seconds < limit_s + 5.0, err
    where = (rf"rank 1 on localhost has been at step {STEPS + 4} for \d+ s in read_a_bad_disk "
             rf"\(job\.py:\d+\); the others wait for it at step {STEPS + 4}\.")
    assert re.search(rf"^hvdtrain launch: rank 1 on localhost failed \d+\.\d s after the start: "
                     rf"exit code 124, Deadlock: {where}", err, re.MULTILINE), err
    for rank in (0, 1):
        assert re.search(rf"^\[{rank}\] hvdtrain: deadlock: {where}", err, re.MULTILINE), err
        assert f"[rank {rank}/2 localhost] the Python stacks of this rank:" in err
    # The rank that hangs does so in the callback, the other in a step of TensorFlow.
    hung = stack_of_main_thread(err, 1)
    assert re.search(r'job\.py", line \d+ in read_a_bad_disk\n', hung), hung
    assert "in on_train_batch_begin\n" in hung
    waiting = stack_of_main_thread(err, 0)
    assert "tensorflow" in waiting.splitlines()[0], waiting
    assert "read_a_bad_disk" not in waiting
    assert "in fit\n" in waiting
    # Nor is there what Horovod says when the other rank leaves.
    assert "Traceback" not in err
    assert "shut down" not in err


def stack_of_main_thread(err, rank):
    """The last of the stacks that a rank printed, innermost line first."""
    mine = "".join(line.removeprefix(f"[{rank}] ") for line in err.splitlines(keepends=True)
                   if line.startswith(f"[{rank}] "))
    found = re.findall(r"^(?:Thread|Current thread) .*\n((?:  .*\n)+)", mine, re.MULTILINE)
    assert found, err
    return found[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "command", "told"), [
    ("sys.exit", ("fit", "job.py"), "exit code 1, LeftEarlyError: This rank was about to leave"),
    ("sys.exit", ("--", sys.executable, "job.py"),
     "exit code 1, LeftEarlyError: This rank was about to leave"),
    ("os._exit", ("fit", "job.py"), "left early with code 0"),
], ids=["fit", "script", "unseen"])
def test_a_rank_that_leaves_early_with_0_ends_the_run_and_is_named(tmp_path, fault, command, told):
    """While the other is in code of its own, which no end of a connection interrupts."""
    code, _, err = run(tmp_path, fault, command=command)
    seconds = time.time() - float((tmp_path / "fault").read_text())
    assert code == 1, err
    assert seconds < 15.0, err
    assert re.search(r"^hvdtrain launch: rank 1 on localhost failed \d+\.\d s after the start: "
                     + re.escape(told), err, re.MULTILINE), err


@pytest.mark.slow
def test_a_stop_asked_by_one_rank_ends_all_after_the_same_step(tmp_path):
    """And the validation after it, on rank 1 longer than the limit, is no deadlock."""
    code, out, err = run(tmp_path, "ask", "--hang-timeout", "2")
    assert code == 0, err
    steps = dict(re.findall(r"^\[(\d)\] steps (\d+)$", err, re.MULTILINE))
    assert steps.keys() == {"0", "1"}, err
    assert steps["0"] == steps["1"]
    assert 4 < int(steps["0"]) < STEPS  # within the first epoch
    assert "Epoch 2/3" not in out
    told = re.search(r"rank 1 on localhost has been evaluating for (\d+) s.*; the others wait for "
                     r"it at ", err)
    assert told, err
    assert int(told[1]) >= 2
    assert "deadlock" not in err
    assert (tmp_path / "runs/job/model.keras").is_file()


def weights(path):
    with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as stream, \
            h5py.File(stream) as file:
        found = {}
        file.visititems(lambda name, item: found.__setitem__(name, np.asarray(item))
                        if isinstance(item, h5py.Dataset) else None)
        return found


def figures(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items()
             if name not in ("seconds", "samples", "samples_per_s", "time", "time_s")}
            for line in lines]


@pytest.mark.slow
def test_a_run_that_was_stopped_within_an_epoch_ends_like_one_that_was_not(tmp_path):
    code, _, err = run(tmp_path, "none", "-o", "whole")
    assert code == 0, err
    process = start(tmp_path, "term", "-o", "cut")
    deadline = time.monotonic() + 60.0
    while not (tmp_path / "fault").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 75, err
    assert err.splitlines()[-1] == "hvdtrain launch: all ranks stopped on request"
    (path,) = (tmp_path / "cut/checkpoints").glob("epoch-*-sample-*.keras")
    epoch, samples = map(int, re.findall(r"\d+", path.name))
    assert epoch == 1
    assert 0 < samples < STEPS * 16
    assert err.count(f"after step {samples // 16} of epoch 2, on all ranks alike. All of it is in "
                     f"cut/checkpoints/{path.name}; go on with --resume.") == 2
    code, _, err = run(tmp_path, "none", "-o", "cut", "--resume")
    assert code == 0, err
    assert f"Going on after epoch 1 of 3 and {samples} samples of the next" in err

    whole, cut = figures(tmp_path / "whole"), figures(tmp_path / "cut")
    assert [line["epoch"] for line in cut] == [1, 2, 3]
    for expected, found in zip(whole, cut, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-5, err_msg=name)
    expected, found = weights(tmp_path / "whole/model.keras"), weights(tmp_path / "cut/model.keras")
    assert found.keys() == expected.keys()
    assert len(expected) > 8
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)

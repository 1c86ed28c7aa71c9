"""Elastic trainings on this machine: a rank is killed, slots come and go, the result stays."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from tests import preload
from tests.keras_file import weights_of

pytestmark = pytest.mark.slow

JOB = """
    import os, signal, sys, time
    import keras
    import numpy as np
    import hvdtrain

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.05)
            print("step", os.environ.get("HVDTRAIN_WORLD"), os.environ["HOROVOD_SIZE"],
                  os.getpid(), file=sys.stderr, flush=True)

    def model():
        if os.environ.get("DIES") and int(os.environ["HVDTRAIN_WORLD"]) < 3 and (
                os.environ["HOROVOD_RANK"] == "2"):
            os.kill(os.getpid(), signal.SIGKILL)
        made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"),
                                 keras.layers.Dense(3)])
        made.compile(keras.optimizers.Adam(0.01), metrics=["accuracy"],
                     loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    def data():
        rng = np.random.default_rng(0)
        x = rng.normal(size=(200, 6)).astype("f4")
        return x, (np.abs(x[:, 0] * 3).astype("i4") % 3)

    def job():
        return hvdtrain.Job(name="job", model=model, data=data, callbacks=lambda: [Slow()],
                            config=hvdtrain.TrainConfig(
                                batch_per_rank=8, epochs=8, lr_scaling="none",
                                commit_every_steps=5, checkpoint_every_epochs=0))
"""
LOOP = """
    import os, sys, time
    import horovod.tensorflow as hvd
    import numpy as np
    import tensorflow as tf

    hvd.init()
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.Adam(0.01)
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
    state.register_reset_callbacks([lambda: print("reset", file=sys.stderr)])
    x = np.random.default_rng(0).normal(size=(96, 4)).astype("f4")

    @hvd.elastic.run
    def train(state):
        while state.batch < 60:
            begin = state.batch % 8 * 12
            part = x[begin:begin + 12][hvd.rank()::hvd.size()]
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(part) - part.sum(1, keepdims=True)) ** 2) / 12
            tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            state.batch += 1
            time.sleep(0.05)
            print("step", os.environ.get("HVDTRAIN_WORLD"), hvd.size(), os.getpid(),
                  file=sys.stderr, flush=True)
            if state.batch % 4 == 0:
                state.commit()

    train(state)
    if hvd.rank() == 0:
        np.savez("out.npz", *[np.asarray(w) for w in model.get_weights()])
"""


class Run:
    """An elastic launch in a folder, whose standard error is read as it comes."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hvdtrain", "launch", *words], cwd=folder, stdout=log,
                stderr=log, env={**os.environ, **preload.environment()})

    def steps(self) -> list[tuple[int, int, int]]:
        """World, ranks and process of each step so far."""
        lines = [line.partition("step ")[2].split() for line in self.log.read_text().splitlines()
                 if "] step " in line]
        return [(int(a), int(b), int(c)) for a, b, c in lines]

    def until(self, world: int, steps: int) -> None:
        limit = time.monotonic() + 120
        while sum(step[0] == world for step in self.steps()) < steps:
            assert time.monotonic() < limit, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def end(self) -> int:
        code = self.process.wait(120)
        assert not jobs_in_memory()
        return code


def jobs_in_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"hvdtrain-{os.geteuid()}-")}


def plain(folder: Path, script: str, *words: str) -> None:
    """The same on three ranks that nothing disturbs."""
    folder.mkdir()
    (folder / "job.py").write_text(textwrap.dedent(script))
    subprocess.run([sys.executable, "-m", "hvdtrain", "launch", "-np", "3", *words], cwd=folder,
                   check=True, capture_output=True, timeout=120,
                   env={**os.environ, **preload.environment()})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "plain"
    plain(folder, JOB, "fit", "job.py")
    return folder


def test_a_training_gives_the_same_with_other_ranks(tmp_path: Path, undisturbed: Path) -> None:
    """Three ranks, one of them killed, then two, then three again."""
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=3\n")
    run = Run(tmp_path, "--hostfile", "hosts", "--watch", "--min-np", "1", "fit", "job.py")
    run.until(1, 30)
    os.kill(run.steps()[-1][2], signal.SIGKILL)
    run.until(2, 18)
    hosts.write_text("localhost slots=2\n")
    run.until(3, 12)
    hosts.write_text("localhost slots=3\n")
    assert run.end() == 0, run.log.read_text()
    sizes = {world: size for world, size, _ in run.steps()}
    assert [sizes[world] for world in (1, 2, 3)] == [3, 3, 2]
    text = run.log.read_text()
    assert "failed: killed by SIGKILL" in text
    assert "world 3: 2 ranks" in text
    assert_same(tmp_path, undisturbed)


def test_a_slot_is_lost_before_the_first_commit(tmp_path: Path, undisturbed: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    run = Run(tmp_path, "-H", "localhost:3", "--min-np", "1", "-x", "DIES=1", "fit", "job.py")
    assert run.end() == 0, run.log.read_text()
    assert "world 3: 2 ranks" in run.log.read_text()
    assert "from step 0" in run.log.read_text()
    assert_same(tmp_path, undisturbed)


def assert_same(folder: Path, undisturbed: Path) -> None:
    weights, expected = (weights_of(each / "runs/job/model.keras")
                         for each in (folder, undisturbed))
    assert weights.keys() == expected.keys()
    for name, other in expected.items():
        np.testing.assert_allclose(weights[name], other, atol=1e-5)
    ours, theirs = ([json.loads(line) for line in (
        each / "runs/job/metrics.jsonl").read_text().splitlines()]
        for each in (folder, undisturbed))
    assert [line["epoch"] for line in ours] == list(range(1, 9))
    np.testing.assert_allclose([line["loss"] for line in ours], [line["loss"] for line in theirs],
                               rtol=1e-5)


def test_a_horovod_loop_goes_on(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(LOOP))
    run = Run(tmp_path, "-H", "localhost:3", "--min-np", "2", "run", "job.py")
    run.until(1, 30)
    os.kill(run.steps()[-1][2], signal.SIGKILL)
    assert run.end() == 0, run.log.read_text()
    assert run.log.read_text().count("] reset") == 3
    assert {world for world, _, _ in run.steps()} == {1, 2}
    plain(tmp_path / "plain", LOOP, "run", "job.py")
    with np.load(tmp_path / "out.npz") as ours, np.load(tmp_path / "plain/out.npz") as theirs:
        for name in theirs.files:
            np.testing.assert_allclose(ours[name], theirs[name], atol=1e-6)


@pytest.mark.parametrize(("words", "told"), [
    (["--min-np", "3", "--max-np", "2", "-H", "localhost:3"], "--min-np is 3 and --max-np 2"),
    (["--min-np", "1", "--starter", "mpirun", "-np", "2"], "not by mpirun"),
    (["--watch", "-np", "2"], "there is no"),
    (["--host-discovery-script", "./no.sh"], "no.sh failed"),
    (["--host-discovery-script", "./twice.sh"], "names a twice"),
    (["--host-discovery-script", "./bad.sh"], "Cannot read '@@'"),
    (["--min-np", "4", "-np", "2"], "at most 2 ranks"),
])
def test_what_cannot_be_is_told_in_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    for name, text in (("twice", "echo a:1; echo a:2"), ("bad", "echo @@")):
        (tmp_path / f"{name}.sh").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / f"{name}.sh").chmod(0o755)
    done = subprocess.run([sys.executable, "-m", "hvdtrain", "launch", *words, "--", "true"],
                          cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_world_that_is_never_reached_ends_with_a_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", "--min-np", "3", "-H", "localhost:2",
         "--elastic-timeout", "1", "--", sys.executable, "-c", "1 / 0"], cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=100,
        env={**os.environ, **preload.environment()})
    assert done.returncode == 76
    assert "fewer than --min-np 3 ranks for 1 s" in done.stderr


def test_a_mistake_of_the_job_ends_it(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB).replace('"f4")', '"f4") * np.nan'))
    run = Run(tmp_path, "-H", "localhost:2", "--min-np", "1", "fit", "job.py")
    assert run.end() == 5, run.log.read_text()
    assert "world 2" not in run.log.read_text()


RANK = """
import os, signal, sys, time
from pathlib import Path
folder, world = Path(os.environ["HVDTRAIN_COMMITS"]), int(os.environ["HVDTRAIN_WORLD"])
assert os.environ["HVDTRAIN_FIRST_RANKS"] == "2"
is_last = os.environ["HOROVOD_RANK"] == str(int(os.environ["HOROVOD_SIZE"]) - 1)

def commit():
    (folder / "spare").write_text("")
    (folder / "spare").rename(folder / f"commit-{world:012}")
"""
DIES = """
if world == 3:  # of one rank, since the slot of the other is left out
    commit()
if world < 4 and is_last:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(30 if world < 4 else 0)
"""
CODE_3 = """
if world == 1 and is_last:
    sys.exit(3)
time.sleep(30 if world == 1 else 0)
"""


@pytest.mark.parametrize(("body", "worlds"), [(DIES, 4), (CODE_3, 2)])
def test_failures_after_which_a_job_goes_on(body: str, worlds: int, tmp_path: Path) -> None:
    """Two alike, and one after a commit; a code that is the script's own."""
    (tmp_path / "rank.py").write_text(RANK + body)
    run = Run(tmp_path, "--min-np", "1", "-H", "localhost:2", "--", sys.executable, "rank.py")
    assert run.end() == 0, run.log.read_text()
    assert run.log.read_text().count("launch: world ") == worlds


@pytest.mark.parametrize("left", ["localhost slots=1\n", ""])
def test_slots_that_are_taken_end_the_ranks_and_the_state_is_saved(left: str, tmp_path: Path,
                                                                   ) -> None:
    (tmp_path / "rank.py").write_text(RANK + """
Path(f"up-{world}").touch()
while "HVDTRAIN_ENDING" not in os.environ and not (folder / "change").exists():
    time.sleep(0.05)
if "HVDTRAIN_ENDING" in os.environ:
    Path("saved").touch()
commit()
sys.exit(75)
""")
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    run = Run(tmp_path, "--min-np", "2", "--elastic-timeout", "1", "--hostfile", "hosts", "--watch",
              "--", sys.executable, "rank.py")
    while not (tmp_path / "up-1").exists():
        assert run.process.poll() is None, run.log.read_text()
        time.sleep(0.05)
    hosts.write_text(left)
    assert run.end() == 76, run.log.read_text()
    assert (tmp_path / "saved").exists(), run.log.read_text()


def test_a_signal_while_ranks_are_prepared_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    before = jobs_in_memory()
    process = subprocess.Popen(  # without the preloaded process of the tests
        [sys.executable, "-m", "hvdtrain", "launch", "--min-np", "1", "-np", "2", "fit", "job.py"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not jobs_in_memory() - before:
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    limit = time.monotonic() + 10
    while left := jobs_in_memory() - before:
        assert time.monotonic() < limit, left
        time.sleep(0.1)

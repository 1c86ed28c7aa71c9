"""What `hvdtrain slurm --submit` writes, on a real Slurm of two nodes: start, stop, go on."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.submit.slurm import directive
from tests import preload
from tests.cluster.slurm import PrivateSlurm

SLURM = (sys.executable, "-m", "hvdtrain", "slurm")
ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples" / "digits_mlp.toml"
READY = ROOT / "scripts" / "slurm"

# Writes what this rank is, and was given, to seen/JOB.RESTARTS.RANK.
SEEN = """
import json, os, sys
from dataclasses import asdict
from pathlib import Path
from hvdtrain.world import detect_world
os.makedirs("seen", exist_ok=True)
def tell(**more):
    world = asdict(detect_world(os.environ))
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    Path(f"seen/{restarts}.{world['rank']}").write_text(json.dumps(
        {"world": world, "argv": sys.argv[1:], "env": dict(os.environ), **more}))
"""
TELL = f"{SEEN}\ntell()\n"
# Stops when told to; once it was restarted it has nothing left to do. The ranks do not leave at
# the same moment.
STOPS = f"""{SEEN}
import signal, time
told = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: told.append(number))
tell(signals=[])
if "SLURM_RESTART_COUNT" not in os.environ:
    while not told:
        time.sleep(0.05)
    time.sleep(0.4 * int(os.environ["SLURM_PROCID"]))
    tell(signals=told)
    sys.exit(75)
"""
FAILS = """
import os, sys, time
if os.environ["SLURM_PROCID"] == "1":
    sys.exit(3)
time.sleep(600)
"""


def submit(slurm: PrivateSlurm, folder: Path, *words: str) -> int:
    done = slurm.run([*SLURM, "--submit", *words], cwd=folder)
    assert done.returncode == 0, done.stdout
    return int(done.stdout.splitlines()[-1])


def program(folder: Path, text: str) -> tuple[str, ...]:
    (folder / "program.py").write_text(text)
    return ("--", sys.executable, "program.py")


def seen(folder: Path, restarts: int) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in (folder / "seen").glob(f"{restarts}.*")]
    return sorted(found, key=lambda one: one["world"]["rank"])


def await_ranks(slurm: PrivateSlurm, job: int, folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list((folder / "seen").glob("0.*"))) < count:
        assert time.monotonic() < deadline, f"{slurm.state(job)}\n{log(folder, job)}"
        time.sleep(0.1)
    time.sleep(0.5)  # a file that is there is written a moment later


def log(folder: Path, job: int) -> str:
    path = folder / f"slurm-{job}.out"
    return path.read_text() if path.exists() else "no log"


def test_every_rank_knows_the_world(slurm: PrivateSlurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--nodes", "2", "--ntasks-per-node", "2", "--cpus-per-task", "2",
                 *program(tmp_path, TELL))
    assert slurm.wait(job)["JobState"] == "COMPLETED", log(tmp_path, job)
    ranks = seen(tmp_path, 0)
    worlds = [one["world"] for one in ranks]
    assert [(w["rank"], w["size"], w["local_rank"], w["local_size"], w["host"], w["starter"])
            for w in worlds] == [(0, 4, 0, 2, "hosta", "slurm"), (1, 4, 1, 2, "hosta", "slurm"),
                                 (2, 4, 0, 2, "hostb", "slurm"), (3, 4, 1, 2, "hostb", "slurm")]
    assert {one["env"]["OMP_NUM_THREADS"] for one in ranks} == {"2"}
    assert {one["env"]["SLURM_CPUS_PER_TASK"] for one in ranks} == {"2"}


ODD = ("two words", "it's", 'say "so"', "a;b|c&d", "$HOME `id` $(touch pwned)", "*", "#no",
       "back\\slash\\", "line\nbreak", "", "ünï", "--resume", "#SBATCH --nodes=9")


def test_odd_names_and_values_arrive_unchanged(slurm: PrivateSlurm, tmp_path: Path) -> None:
    folder = tmp_path / "it's; $HOME \"two\" words"
    folder.mkdir()
    (folder / "my train; er's.py").write_text(TELL)
    variables = [word for number, value in enumerate(ODD)
                 for word in ("--env", f"ODD_{number}={value}")]
    name = "job's; \"name\" $(touch pwned) \\ #1"
    job = submit(slurm, folder, "--nodes", "1", "--ntasks", "1", "--job-name", name,
                 "--output", "log \\ of it's; $HOME.txt", "--script", "my script; it's.sh",
                 *variables, "--", sys.executable, "my train; er's.py", *ODD)
    assert slurm.wait(job)["JobState"] == "COMPLETED", list(folder.iterdir())
    one, = seen(folder, 0)
    assert one["argv"] == list(ODD)
    assert [one["env"][f"ODD_{number}"] for number in range(len(ODD))] == list(ODD)
    assert one["env"]["SLURM_JOB_NAME"] == name
    # In the name of the log a backslash means: no %j and the like.
    assert {path.name for path in folder.iterdir()} == {
        "my train; er's.py", "my script; it's.sh", "seen", "log  of it's; $HOME.txt"}


@pytest.mark.parametrize("name", ["trailing\\", "\\", "a\\'b\\\"c", "''", "  lead", "[a]{b}",
                                  "x" * 300, "a=b", "--x"])
def test_a_directive_says_to_slurm_what_was_typed(slurm: PrivateSlurm, tmp_path: Path,
                                                  name: str) -> None:
    script = tmp_path / "script"
    script.write_text(f"#!/bin/bash\n{directive('job-name', name)}\n#SBATCH --ntasks=1 --hold\n")
    job = slurm.submit(script, cwd=tmp_path)
    assert slurm.run(["squeue", "-h", "-j", str(job), "-o", "%j"]).stdout == f"{name}\n"
    slurm.run(["scancel", str(job)])


def test_a_rank_that_fails_ends_the_job(slurm: PrivateSlurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--ntasks-per-node", "2", "--nodes", "2",
                 *program(tmp_path, FAILS))
    state = slurm.wait(job, "FAILED", timeout=50)
    assert (state["ExitCode"], state["Restarts"]) == ("143:0", "0")
    assert "task 1: Exited with exit code 3" in log(tmp_path, job)


def check_stopped_and_gone_on(slurm: PrivateSlurm, job: int, folder: Path, signal: int) -> None:
    assert [one["signals"] for one in seen(folder, 0)] == [[signal]] * 4
    slurm.start_now(job)
    state = slurm.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), log(folder, job)
    assert [one["world"]["size"] for one in seen(folder, 1)] == [4] * 4


@pytest.mark.slow
def test_at_the_time_limit_the_ranks_stop_and_the_job_goes_on(slurm: PrivateSlurm,
                                                              tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--nodes", "2", "--ntasks-per-node", "2", "--wait", "10",
                 "--time", "2", "--signal-before", "59", *program(tmp_path, STOPS))
    await_ranks(slurm, job, tmp_path, 4)
    # Slurm looks for such jobs every 30 s only. So this one is due the next time it looks.
    done = slurm.run(["scontrol", "update", f"job={job}", "endtime=now+85"])
    assert done.returncode == 0, done.stdout
    slurm.wait(job, "COMPLETING", "PENDING", timeout=100)
    check_stopped_and_gone_on(slurm, job, tmp_path, 10)


def test_a_preempted_job_goes_on(slurm: PrivateSlurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--nodes", "2", "--ntasks-per-node", "2", "--wait", "10",
                 *program(tmp_path, STOPS))
    await_ranks(slurm, job, tmp_path, 4)
    other = tmp_path / "other"
    other.write_text("#!/bin/bash\nsrun true\n")
    first = slurm.submit(other, "--partition=high", "--nodes=2", "--ntasks=8", cwd=tmp_path)
    assert slurm.wait(first)["JobState"] == "COMPLETED"
    check_stopped_and_gone_on(slurm, job, tmp_path, 15)


def test_a_cancelled_job_does_not_come_back(slurm: PrivateSlurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--nodes", "2", "--ntasks-per-node", "2", "--wait", "10",
                 *program(tmp_path, STOPS))
    await_ranks(slurm, job, tmp_path, 4)
    slurm.run(["scancel", str(job)])
    state = slurm.wait(job)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0")
    assert [one["signals"] for one in seen(tmp_path, 0)] == [[15]] * 4  # they left with 75
    assert "it is not requeued" in log(tmp_path, job)


def test_requeueing_has_a_limit(slurm: PrivateSlurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--ntasks", "2", "--wait", "10", "--max-requeues", "0",
                 *program(tmp_path, STOPS))
    await_ranks(slurm, job, tmp_path, 2)
    slurm.run(["scancel", "--signal=USR1", str(job)])
    state = slurm.wait(job)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "75:0", "0")
    assert "requeued 0 times: no more" in log(tmp_path, job)


def history(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_a_stopped_fit_ends_as_one_that_was_not(slurm: PrivateSlurm, tmp_path: Path) -> None:
    """Four starts of TensorFlow in Slurm; the other one needs none."""
    fit = ("fit", str(JOB), "--epochs", "60", "--output", "run")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        folder.mkdir()
    done = subprocess.run([sys.executable, "-m", "hvdtrain", "launch", "-np", "2", *fit],
                          cwd=whole, env={**os.environ, **preload.environment()}, text=True,
                          stderr=subprocess.PIPE, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    job = submit(slurm, stopped, "--nodes", "2", "--ntasks-per-node", "1", "--cpus-per-task", "1",
                 "--", *fit)
    deadline = time.monotonic() + 120
    while len(history(stopped)) < 3:
        assert time.monotonic() < deadline, log(stopped, job)
        time.sleep(0.05)
    slurm.run(["scancel", "--signal=USR1", str(job)])
    slurm.start_now(job)
    assert len(history(stopped)) < 60, "the run was over before it was stopped"
    state = slurm.wait(job, timeout=200)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), log(stopped, job)
    assert re.search(r"Going on after epoch \d+ of 60 and \d+ samples of the next",
                     log(stopped, job))
    losses = {line["epoch"]: line["loss"] for line in history(stopped)}
    expected = {line["epoch"]: line["loss"] for line in history(whole)}
    assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["cpu_2_nodes", "preemptible"])
def test_slurm_takes_a_ready_script(slurm: PrivateSlurm, name: str) -> None:
    done = slurm.run(["sbatch", "--test-only", str(READY / f"{name}.sbatch")])
    assert done.returncode == 0, done.stdout
    assert "to start at" in done.stdout


@pytest.mark.slow
def test_a_ready_script_trains_from_a_checkout(slurm: PrivateSlurm, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(JOB.parent)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = slurm.run(["sbatch", "--parsable", str(READY / "cpu_2_nodes.sbatch")], cwd=tmp_path,
                     env={"PATH": path})
    job = int(done.stdout)
    assert slurm.wait(job, timeout=200)["JobState"] == "COMPLETED", log(tmp_path, job)
    lines = (tmp_path / "runs/digits_mlp/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 15
    assert json.loads(lines[-1])["val_accuracy"] > 0.9
    assert "4: 0-1 on hosta" in log(tmp_path, job)

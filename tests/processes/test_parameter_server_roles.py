"""Engine ps with real processes: roles, their end, and what happens when one of them is lost."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import preload

ROOT = Path(__file__).parents[2]
JOB = str(ROOT / "examples/digits_mlp.toml")
FIT = [sys.executable, "-m", "hvdtrain", "fit", JOB, "--engine", "ps", "--no-tensorboard"]
VARIABLE = b"HVDTRAIN_PS_ASSIGNMENT="


def environment(*, forked=True, **more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(preload.STARTERS)}
    bin_ = str(Path(sys.executable).parent)
    return (kept | {"PATH": f"{bin_}:{kept['PATH']}", "TF_CPP_MIN_LOG_LEVEL": "3"} | more
            | (preload.environment() if forked else {}))


def roles(mark):
    """The processes of the roles of a run whose command line holds `mark`: name -> pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if mark.encode() not in (entry / "cmdline").read_bytes():
                continue
            for variable in (entry / "environ").read_bytes().split(b"\0"):
                if variable.startswith(VARIABLE):
                    role = json.loads(variable[len(VARIABLE):])["role"]
                    found[f"{role['kind']} {role['index']}"] = int(entry.name)
    return found


class Run:
    """A launch whose output can be waited for; of new processes where these are what is tested."""

    def __init__(self, folder, *options, np=4, before=(), job=JOB, forked=True):
        self.folder = folder
        fit = [job if word == JOB else word for word in FIT]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [*(before or [sys.executable, "-m", "hvdtrain", "launch", "-v", "-np", str(np),
                          "--timeout", "150"]), *(fit[3:] if not before else fit),
             "--output", str(folder / "run"), *options],
            cwd=ROOT, env=environment(forked=forked), stdout=self.log, stderr=subprocess.STDOUT)

    def text(self):
        return (self.folder / "log").read_text()

    def wait_for(self, pattern, limit_s=60.0):
        deadline = time.monotonic() + limit_s
        while not re.search(pattern, self.text()):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def kill(self, role, number):
        os.kill(roles(str(self.folder))[role], number)

    def end(self, limit_s=150.0):
        code = self.process.wait(limit_s)
        self.log.close()
        deadline = time.monotonic() + 3.0
        while roles(str(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not roles(str(self.folder)), self.text()
        return code

    def figures(self, name="metrics.jsonl"):
        return [json.loads(line) for line in
                (self.folder / "run" / name).read_text().splitlines()]


@pytest.fixture
def run(tmp_path):
    made = []

    def start(*options, **keywords):
        made.append(Run(tmp_path, *options, **keywords))
        return made[-1]
    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
            one.log.close()


def test_every_role_may_be_lost_once(run):
    """A worker is killed, a server is frozen, the chief is killed: the run ends as it should."""
    one = run("--epochs", "25", "--hang-timeout", "8", "--evaluator", "--keep-checkpoints", "99")
    one.wait_for("Epoch 3/25")
    one.kill("worker 0", signal.SIGKILL)
    one.wait_for(r"worker 0 \(rank 1 on localhost\) was killed by SIGKILL; started again \(1 of 3")
    one.wait_for("Epoch 6/25")
    one.kill("ps 0", signal.SIGSTOP)
    one.wait_for(r"server 0 \(rank 2 on localhost\) has not answered for 4 s; killed")
    one.wait_for(r"the chief .* lost its connection to a server")
    one.wait_for(r"Going on after epoch \d+ of 25")
    one.wait_for("Epoch 10/25")
    one.kill("chief 0", signal.SIGKILL)
    one.wait_for(r"the chief \(rank 0 on localhost\) was killed by SIGKILL; started again")
    assert one.end() == 0, one.text()
    lines = one.figures()
    assert [line["epoch"] for line in lines] == list(range(1, 26))
    assert lines[-1]["val_accuracy"] > 0.95
    evaluated = one.figures("evaluation.jsonl")
    assert [line["epoch"] for line in evaluated] == list(range(1, 26))
    # The same weights on the same data; the chief may have trained an epoch again.
    assert evaluated[-1]["accuracy"] == pytest.approx(lines[-1]["val_accuracy"], abs=1e-6)


def memory_of_supervisors(mark):
    """Megabytes of each process of a run that is a rank, and not the process of a role."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"fit" in words and b"launch" not in words and any(
                    mark.encode() in word for word in words) and (
                    VARIABLE not in (entry / "environ").read_bytes()):
                status = (entry / "status").read_text()
                found.append(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024)
    return found


def test_a_budget_that_is_spent_ends_the_run_with_a_name(run):
    """With a Python job, which loads TensorFlow: supervisors must not keep it."""
    one = run("--epochs", "200", "--max-restarts", "0", np=3, job=JOB.replace(".toml", ".py"),
              forked=False)
    one.wait_for("Epoch 2/")
    used = memory_of_supervisors(str(one.folder))
    assert len(used) == 3
    assert max(used) < 150
    one.kill("worker 0", signal.SIGKILL)
    assert one.end(30) == 1
    assert re.search(r"worker 0 \(rank 1 on localhost\) was killed by SIGKILL, for the 1. time, "
                     r"and is started again at most 0 times", one.text())
    assert "hvdtrain launch: rank 1 on localhost failed" in one.text()


def test_a_stop_saves_and_goes_on(run):
    one = run("--epochs", "200", "--ps-mode", "sync", np=3)
    one.wait_for("Epoch 3/")
    one.process.send_signal(signal.SIGTERM)
    assert one.end(60) == 75, one.text()
    assert "go on with --resume" in one.text()
    again = run("--epochs", "4", "--resume", "--ps-mode", "sync", np=3)
    assert again.end(60) in (0,), again.text()
    assert "Going on after epoch" in again.text() or "nothing left" in again.text()


def test_a_stop_while_the_chief_starts_is_heeded(run):
    """Its process has no handler for the signal yet; and a former run is not taken for this one."""
    one = run("--epochs", "200", np=3)
    deadline = time.monotonic() + 30.0
    while "chief 0" not in roles(str(one.folder)) and time.monotonic() < deadline:
        time.sleep(0.01)
    one.process.send_signal(signal.SIGTERM)
    assert one.end(30) == 75, one.text()
    assert "started again" not in one.text()
    assert "Epoch 2/" not in one.text()


def test_too_few_ranks(run):
    one = run(np=2)
    assert one.end(60) == 2
    assert "needs a chief, at least one worker and 1 server: 3 ranks. Received: 2" in one.text()


def ports(count):
    made = [socket.socket() for _ in range(count)]
    for one in made:
        one.bind(("127.0.0.1", 0))
    numbers = [one.getsockname()[1] for one in made]
    for one in made:
        one.close()
    return numbers


def tf_config(cluster, kind):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})


def test_tf_config_names_the_roles(tmp_path):
    """As Kubeflow's TFJob starts them: each process by itself, the evaluator not in the cluster."""
    cluster = {kind: [f"127.0.0.1:{port}"] for kind, port in
               zip(("chief", "worker", "ps"), ports(3), strict=True)}
    started = {kind: subprocess.Popen(
        [*preload.forked(*FIT), "--epochs", "2", "--output", str(tmp_path / "run"),
         "--evaluator"], cwd=ROOT,
        env=environment(TF_CONFIG=tf_config(cluster, kind)), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True) for kind in (*cluster, "evaluator")}
    try:
        texts = {kind: process.communicate(timeout=90)[0] for kind, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
    assert {kind: p.returncode for kind, p in started.items()} == dict.fromkeys(started, 0), texts
    assert "0 on 127.0.0.1 (the chief)" in texts["chief"]
    lines = (tmp_path / "run/evaluation.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]


def test_a_missing_peer_is_named(tmp_path):
    cluster = {kind: [f"127.0.0.1:{port}"] for kind, port in
               zip(("chief", "worker", "ps"), ports(3), strict=True)}
    done = subprocess.run(
        [*preload.forked(*FIT), "--output", str(tmp_path / "run"), "--ps-start-timeout", "3"],
        cwd=ROOT,
        env=environment(TF_CONFIG=tf_config(cluster, "chief")), capture_output=True, text=True,
        timeout=60, check=False)
    assert done.returncode == 2
    assert "Missing: rank 1 (worker 0), rank 2 (server 0)" in done.stderr


@pytest.mark.parametrize("starter", [
    ["mpirun", "-n", "3", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none"],
    ["horovodrun", "--gloo", "-np", "3"]], ids=["mpirun", "horovodrun"])
def test_other_starters(run, starter):
    one = run("--epochs", "2", before=[str(Path(sys.executable).parent / starter[0]),
                                       *starter[1:]])
    assert one.end(90) == 0, one.text()
    assert len(one.figures()) == 2

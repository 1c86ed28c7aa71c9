"""A small comparison for real; and how runs end that do not end well."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.bench.compare import run_once
from hvdtrain.process import SignalInbox
from tests import preload

ROOT = Path(__file__).resolve().parents[2]
COMPARE = (sys.executable, "-m", "hvdtrain", "compare")
JOB = """
[model]
name = "net.py:make"
features = 16
hidden = 64

[data]
name = "synthetic"
samples = 2048
features = 16

[compile]
loss = "sparse_categorical_crossentropy"
metrics = ["accuracy"]

[train]
batch_per_rank = 32
epochs = 4
"""
NET = """
import os
from hvdtrain.zoo.models import mlp

def make(**sizes):
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        raise RuntimeError("not under mpirun")
    return mlp(**sizes)
"""
PARAMETERS = 16 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(JOB)
    (tmp_path / "net.py").write_text(NET)
    return path


def test_engines_are_compared_and_one_that_fails_does_not_end_the_others(job, tmp_path):
    done = subprocess.run([*COMPARE, str(job), "--engines", "allreduce-mpi,single,allreduce-gloo",
                           "--rounds", "1", "--target", "accuracy=0.0", "-o", "out"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    facts = report["jobs"][str(job)]
    assert (facts["parameters"], facts["parameter_bytes"]) == (PARAMETERS, 4 * PARAMETERS)
    assert facts["samples"] == 2048
    engines = report["points"][0]["engines"]
    check_figures(engines)
    logs = [path.read_text() for path in (tmp_path / "out/runs").rglob("output.log")]
    assert (len(logs), preload.refusals("\n".join(logs))) == (3, [])
    failed = engines["allreduce-mpi"]["runs"][0]
    assert failed["status"] == "failed"
    assert any("not under mpirun" in line for line in failed["last_lines"])
    for text in (done.stdout, (tmp_path / "out/report.html").read_text()):
        assert "allreduce-gloo" in text
        assert "not under mpirun" in text
    # A second one does not write over it.
    again = subprocess.run([*COMPARE, str(job), "-o", "out"], cwd=tmp_path, capture_output=True,
                           text=True, timeout=60, check=False)
    assert again.returncode == 2
    assert "holds a former comparison" in again.stderr


def check_figures(engines):
    """Those that do not depend on the speed of the machine."""
    for engine, steps, processes in (("single", 3 * 64 / 2, 1), ("allreduce-gloo", 3 * 32, 2)):
        figures = engines[engine]["runs"][0]["figures"]
        assert figures["steps"] == steps
        assert figures["samples_per_s"] > 0
        assert figures["target_epoch"] == 1
        assert figures["usage"]["rank"]["processes"] == processes
        assert figures["usage"]["rank"]["peak_mb"] > 50
    # So short a time has no sharp ends; and small gradients have company.
    sent = engines["allreduce-gloo"]["summary"]["roles"]["rank"]["bytes_sent"]["median"]
    assert 0.5 * 4 * PARAMETERS < sent < 3 * 4 * PARAMETERS


def test_ctrl_c_ends_the_run_and_leaves_a_report(job, tmp_path):
    process = subprocess.Popen(
        [*COMPARE, str(job), "--engines", "single,allreduce-gloo", "--rounds", "1", "--epochs",
         "100000", "-o", "out"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, **preload.environment()})
    metrics = tmp_path / "out/runs/workers-2/single/round-1/train/metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.is_file() and len(metrics.read_text().splitlines()) > 2:
            break
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    engines = json.loads((tmp_path / "out/report.json").read_text())["points"][0]["engines"]
    assert list(engines) == ["single"]
    assert engines["single"]["runs"][0]["status"] == "interrupted"
    assert len(engines["single"]["runs"][0]["epochs"]) > 2
    assert "Interrupted after 1 of 2 runs" in out
    assert (tmp_path / "out/report.html").is_file()


def test_a_job_that_cannot_be_built_ends_it_before_any_run(job, tmp_path):
    job.write_text(JOB.replace("hidden = 64", "hiden = 64"))
    done = subprocess.run([*COMPARE, str(job), "-o", "out"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=120, check=False,
                          env={**os.environ, **preload.environment()})
    assert done.returncode == 2
    assert "cannot be built" in done.stderr
    assert "hiden" in done.stderr
    assert not list((tmp_path / "out").rglob("round-*"))


def run(command, folder, timeout_s=30.0):
    with SignalInbox() as inbox:
        return run_once(command, folder=folder, env=os.environ, timeout_s=timeout_s, inbox=inbox)


def test_a_run_is_timed_and_its_last_lines_are_kept(tmp_path):
    outcome = run(["bash", "-c", "seq 100; printf 'bar\\rdone'; exit 3"], tmp_path)
    assert (outcome.status, outcome.exit_code) == ("failed", 3)
    assert outcome.lines[-3:] == ("99", "100", "done")
    assert run(["true"], tmp_path).status == "ok"


def test_a_run_that_takes_too_long_is_stopped(tmp_path):
    script = "trap 'echo asked; exit 9' TERM; for i in {1..600}; do sleep 0.1; done"
    outcome = run(["bash", "-c", script], tmp_path, timeout_s=0.5)
    assert (outcome.status, outcome.exit_code, outcome.lines) == ("timeout", 9, ("asked",))

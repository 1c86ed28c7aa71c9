"""`hvdtrain plan` measures a job in the processes of a user, and predicts from its file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).resolve().parents[2] / "examples/digits_mlp.toml"


def plan(*words, cwd):
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain", "plan", *map(str, words)], cwd=cwd, timeout=300,
        capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_job_is_measured_once_and_predicted_for_any_cluster(tmp_path):
    measured = plan(JOB, "--seconds", "0.3", "--profile", "digits.json", "--json",
                    "--on", "1x2", "--on", "2x1@1gbit", cwd=tmp_path)
    assert measured.returncode == 0, measured.stderr
    told = json.loads(measured.stdout)
    found = told["profile"]
    assert found["samples"] == 1438
    assert set(found["exchange"]) == {"horovod-gloo", "shared-memory"}
    assert all(cost["fixed_s"] > 0 for cost in found["exchange"].values())
    assert sum(one["size"] for one in found["transfers"]) == found["parameter_bytes"] == 4 * 26122
    # A worker also pulls and pushes; its processor time is some of the step's.
    assert found["servers"]["worker_cpu_s"] > 0
    assert found["servers"]["server_cpu_s"] > 0
    assert found["servers"]["step_s"] > 0
    assert [(one["cluster"], one["engine"]) for one in told["predictions"]] == [
        (cluster, engine) for cluster in ("1x2", "2x1@1gbit")
        for engine in ("allreduce", "ps-sync", "ps-async")]
    assert [path.name for path in tmp_path.iterdir()] == ["digits.json"], "nothing else is left"

    again = plan(JOB, "--profile", "digits.json", "--on", "16x4@10gbit", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "measuring" not in again.stderr
    assert "16x4@10gbit" in again.stdout


@pytest.mark.slow
def test_a_job_that_engine_ps_refuses_is_predicted_for_allreduce(tmp_path):
    (tmp_path / "packed.toml").write_text(JOB.read_text() + '\ncompression = "bf16"\n')
    done = plan("packed.toml", "--seconds", "0.2", "--on", "2x1@1gbit", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [one["engine"] for one in json.loads(done.stdout)["predictions"]] == ["allreduce"]
    assert "compression='bf16' belongs to engine 'allreduce'" in done.stderr
    refused = plan("packed.toml", "--on", "2x1@1gbit", "--engines", "ps-sync", "--seconds", "0.2",
                   cwd=tmp_path)
    assert refused.returncode == 2
    assert "compression='bf16' belongs to engine 'allreduce'" in refused.stderr

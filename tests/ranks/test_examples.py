"""The examples run as their first lines say, and learn."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import preload

ROOT = Path(__file__).resolve().parents[2]
HVDTRAIN = str(Path(sys.executable).parent / "hvdtrain")

pytestmark = pytest.mark.slow


def run(*command):
    done = subprocess.run([str(c) for c in command], cwd=ROOT, text=True, capture_output=True,
                          timeout=300, check=False, env={**os.environ, **preload.environment()})
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not preload.refusals(done.stderr), done.stderr
    return done.stdout


@pytest.mark.parametrize(("job", "ranks"), [
    ("digits_mlp.toml", 4), ("digits_mlp.py", 1), ("digits_cnn.toml", 2)])
def test_digits_reach_096_on_the_held_out_fifth(job, ranks, tmp_path):
    run(HVDTRAIN, "launch", "-np", ranks, "fit", f"examples/{job}", "-o", tmp_path)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val_accuracy"] >= 0.96


@pytest.mark.parametrize("job", ["autoencoder.py", "text_transformer.toml"])
def test_the_other_jobs_learn_on_two_ranks(job, tmp_path):
    run(HVDTRAIN, "launch", "-np", 2, "fit", f"examples/{job}", "-o", tmp_path, "--epochs", 2)
    losses = [json.loads(line)["val_loss"]
              for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("script", ["python_api.py", "custom_loop.py"])
def test_the_scripts_run_on_two_ranks(script):
    out = run(HVDTRAIN, "launch", "-np", 2, "--", sys.executable, f"examples/{script}")
    accuracy = [float(a) for a in re.findall(r"accuracy.*?([01]\.\d{2,})", out)]
    assert accuracy[-1] > 0.95
    assert script != "custom_loop.py" or "all ranks hold the same weights: True" in out

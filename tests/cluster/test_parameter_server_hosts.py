"""Engine ps across real hosts: over ssh, under mpirun, and as a step of a real Slurm."""

import json
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import VirtualHosts
from tests.cluster.slurm import PrivateSlurm

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1",
       "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
FIT = ["fit", str(ROOT / "examples/digits_mlp.toml"), "--engine", "ps", "--no-tensorboard",
       "--epochs", "2"]


def epochs(folder: Path) -> list[int]:
    return [json.loads(line)["epoch"]
            for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("starter", ["native", "mpirun"])
def test_roles_on_three_hosts(hosts: VirtualHosts, tmp_path: Path, starter: str) -> None:
    done = hosts.run("hosta", [
        sys.executable, "-m", "hvdtrain", "launch", "--starter", starter, "-H",
        "hosta:2,hostb:1,hostc:1", *FIT, "--ps", "1", "--output", str(tmp_path / "run")],
        cwd=ROOT, env=ENV, timeout=120)
    assert done.returncode == 0, done.stdout
    assert epochs(tmp_path / "run") == [1, 2]
    for place in ("0 on hosta (the chief)", "1 on hosta (worker 0)", "2 on hostb (worker 1)",
                  "3 on hostc (server 0)"):
        assert place in done.stdout


def test_a_step_of_slurm(slurm: PrivateSlurm, tmp_path: Path) -> None:
    done = slurm.run([
        "srun", "--mpi=none", "-n", "3", "-N", "2", sys.executable, "-m", "hvdtrain", *FIT,
        "--output", str(tmp_path / "run")], cwd=ROOT, env=ENV, timeout=120)
    assert done.returncode == 0, done.stdout
    assert epochs(tmp_path / "run") == [1, 2]

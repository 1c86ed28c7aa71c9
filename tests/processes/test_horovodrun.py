"""`horovodrun` as typed: of the Horovod that `build-horovod` makes, with the MPI that is here.

The ranks initialise Horovod without TensorFlow (`tests/cluster/light_rank.py`); a training under
each is in `tests/ranks/test_cli.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.horovod_check import check_horovod

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
RANK = ROOT / "tests" / "cluster" / "light_rank.py"

pytestmark = pytest.mark.skipif(not check_horovod().installed, reason="Horovod is not installed")


def horovodrun(*options: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMPI_MCA_mpi_yield_when_idle": "1",
           "PATH": f"{BIN}:{os.environ['PATH']}" if path is None else path}
    return subprocess.run([str(BIN / "horovodrun"), *options, sys.executable, str(RANK)], env=env,
                          text=True, capture_output=True, timeout=120, check=False)


def test_horovodrun_starts_ranks_with_every_option_and_none(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# this host\n\nlocalhost slots=2 max_slots=4  # two\n", encoding="utf-8")
    ways = {"": ("-np", "2"), "mpi": ("-np", "2", "--mpi", "-H", "localhost:2"),
            "gloo": ("-np", "2", "--gloo", "--hostfile", str(hostfile))}
    for name, options in ways.items():
        done = horovodrun(*options)
        assert done.returncode == 0, f"{name}: {done.stdout}\n{done.stderr}"
        ranks = [json.loads(text) for text in re.findall(r"\{\"place\".*?\}", done.stdout)]
        assert sorted(rank["place"][:2] for rank in ranks) == [[0, 2], [1, 2]], name
        assert {rank["mpi"] for rank in ranks} == {name != "gloo"}


def test_horovodrun_takes_the_mpirun_beside_its_python() -> None:
    """As `.venv/bin/horovodrun` in a shell where that environment is not active."""
    done = horovodrun("-np", "2", path="/usr/bin:/bin")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count('"place"') == 2


READ_HOSTFILE = ("import sys; from horovod.runner.common.util.hosts import parse_host_files; "
                 "print(parse_host_files(sys.argv[1]))")


@pytest.mark.parametrize(("text", "read"), [
    ("a slots=2 max_slots=4\nb slots = 3\n", "a:2,b:3"),
    ("# hosts\n\na:4\nb\nb # twice\n", "a:4,b:2"),
    ("a slots=0\n", "cannot read 'a slots=0'. Expected HOST slots=N or HOST:N."),
    ("# none\n", "names no host"),
])
def test_horovodrun_reads_hostfiles_of_every_dialect(tmp_path: Path, text: str, read: str) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", READ_HOSTFILE, str(hostfile)], text=True,
                          capture_output=True, check=False)
    assert read in done.stdout + done.stderr

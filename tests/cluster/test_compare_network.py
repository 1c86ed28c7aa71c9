"""A comparison on virtual hosts with slow links: bytes and time are those of the arithmetic."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: 256 KiB (`VirtualHosts`) at 100 Mbit/s.
BURST_S = 256 * 1024 * 8 / 100e6
JOB = """
[model]
name = "mlp"
features = 32
hidden = 512

[data]
name = "synthetic"
samples = 2048
features = 32

[optimizer]
name = "SGD"
learning_rate = 0.01

[compile]
loss = "sparse_categorical_crossentropy"

[train]
batch_per_rank = 64
epochs = 4
"""


@pytest.mark.usefixtures("hosts")  # skips where there can be none
def test_two_hosts_with_a_slow_network(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "compare", "job.toml", "--network", "100mbit",
         "--hosts", "2", "--engines", "allreduce-gloo,ps-sync", "--rounds", "1", "-o", "out",
         "--predict"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        check=False)
    assert done.returncode == 0, done.stdout
    point = json.loads((tmp_path / "out/report.json").read_text())["points"][0]
    ring, servers = point["engines"]["allreduce-gloo"], point["engines"]["ps-sync"]
    assert "-H hosta:2,hostb:1,hosta-ps:1" in servers["runs"][0]["command"]
    for told, role in ((ring, "rank"), (servers, "worker"), (servers, "server")):
        sent = told["summary"]["roles"][role]["bytes_sent"]["median"]
        # Counters are read five times a second: the ends of a few seconds are not sharp.
        assert 0.8 <= sent / told["computed"]["roles"][role] <= 1.25, done.stdout
    # The prediction has the time of the network, and what one rank computes.
    assert ring["computed"]["predicted_seconds"] > ring["computed"]["seconds"]
    assert servers["computed"]["predicted_seconds"] is None, "its server stands beside a worker"
    # Never faster than the network; the burst of the limiter is the tolerance. Workers of servers
    # pull, then push: the burst of one direction fills up while the other one is in use.
    for told, tolerance_s in ((ring, 0.1 * ring["computed"]["seconds"]), (servers, 2 * BURST_S)):
        step_s = told["summary"]["step_ms"]["median"] / 1000
        assert step_s >= told["computed"]["seconds"] - tolerance_s, done.stdout

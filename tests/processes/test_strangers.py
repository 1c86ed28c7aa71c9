"""A real job of two ranks, and a stranger on another address and under another user beside it.

Nothing that the stranger tries may come to anything, and the job goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.stranger import WAYS

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0
MOST_MEMORY_KB = 40_000
AS_ANOTHER_USER = ("read the secret in an environment", "signal the processes",
                   "write to the agent")


@dataclass
class Job:
    """The launched job and the stranger."""

    launch: subprocess.Popen[str]
    stranger: subprocess.Popen[str]
    folder: Path
    rendezvous_pid: int

    def step(self) -> int:
        """How far the ranks have come."""
        file = self.folder / "step"
        return int(file.read_text()) if file.exists() else 0

    def goes_on(self) -> bool:
        """Whether the ranks make three more steps."""
        wanted, deadline = self.step() + 3, time.monotonic() + LIMIT_S
        while self.step() < wanted:
            if self.launch.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def attempt(self, way: str) -> str:
        """What the stranger achieves."""
        assert self.stranger.stdin is not None
        assert self.stranger.stdout is not None
        self.stranger.stdin.write(f"{way}\n")
        self.stranger.stdin.flush()
        return str(json.loads(self.stranger.stdout.readline()))


def descendants(pid: int) -> list[int]:
    found, left = [], [pid]
    while left:
        with suppress(OSError):  # it has ended
            for task in Path(f"/proc/{left.pop()}/task").iterdir():
                children = [int(word) for word in (task / "children").read_text().split()]
                found += children
                left += children
    return found


def listening_ports(pid: int) -> list[int]:
    """The TCP ports at which a process listens."""
    inodes, rows = set(), []
    with suppress(OSError):  # it has ended, or closes one meanwhile
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    with suppress(FileNotFoundError, ProcessLookupError):
        for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
            with suppress(FileNotFoundError):
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    return sorted(int(row[1].rpartition(":")[2], 16) for row in rows
                  if row[3] == "0A" and row[9] in inodes)


def variables(pid: int) -> dict[str, str]:
    """The environment of a process; nothing of one that has ended."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_text()
        return dict(item.partition("=")[::2] for item in text.split("\0") if item)
    return {}


def target_of(launch: subprocess.Popen[str]) -> tuple[dict[str, object], int]:
    """What the stranger is told, and the process of the rendezvous."""
    pids = descendants(launch.pid)
    ranks = {variables(pid).get("HOROVOD_RANK", ""): pid for pid in pids}
    environ = variables(ranks["0"])
    rendezvous = next(pid for pid in pids if int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
                      in listening_ports(pid))
    watchdog, = listening_ports(ranks["0"])
    needles = [environ["HVDTRAIN_SECRET"],
               environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")[2]]
    assert all(needles)
    return {"address": "127.0.0.1", "sources": ["127.0.0.2", "127.0.0.1"], "needles": needles,
            "rendezvous": int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]), "watchdog": watchdog,
            "pids": [launch.pid, *pids]}, rendezvous


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two ranks that go from step to step, and the stranger."""
    folder = tmp_path_factory.mktemp("job")
    launch = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain", "launch", "-np", "2", "-v", "--timeout", "240", "--",
         sys.executable, "-m", "tests.steady_rank", str(folder)], cwd=ROOT, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    stranger = subprocess.Popen(
        [sys.executable, "-I", "-S", str(ROOT / "tests/stranger.py")], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert stranger.stdin is not None
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (folder / "step").exists():
            assert launch.poll() is None, launch.communicate()[0]
            assert time.monotonic() < deadline, "the ranks do not begin"
            time.sleep(0.05)
        target, rendezvous = target_of(launch)
        stranger.stdin.write(json.dumps(target) + "\n")
        stranger.stdin.flush()
        yield Job(launch, stranger, folder, rendezvous)
    finally:
        stranger.communicate()
        if launch.poll() is None:
            launch.terminate()
            launch.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize("way", WAYS)
def test_a_stranger_achieves_nothing_and_the_job_goes_on(job: Job, way: str) -> None:
    if way in AS_ANOTHER_USER and os.geteuid() != 0:
        pytest.skip("the stranger would be of the same user")
    achieved = job.attempt(way)
    goes_on = job.goes_on()
    assert achieved == ""
    assert goes_on, f"the job stands still at step {job.step()}"


def test_the_rendezvous_has_not_grown(job: Job) -> None:
    status = Path(f"/proc/{job.rendezvous_pid}/status").read_text()
    memory = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    assert int(memory) < MOST_MEMORY_KB, f"{memory} kB"


def test_the_job_meets_again_and_ends_well(job: Job) -> None:
    assert len(WAYS) >= 20
    (job.folder / "stop").touch()
    out, _ = job.launch.communicate(timeout=LIMIT_S)
    assert job.launch.returncode == 0, out
    assert out.count("connections from 127.0.0.2 are refused") == 1, out
    assert out.count("done, 0 of 2") == out.count("done, 1 of 2") == 1, out

"""Elastic jobs on real ssh hosts: lost, cut, added and removed; and that nothing is left.

The ranks count without TensorFlow (`elastic_rank.py`); trainings are in tests/processes.
"""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.hosts import VirtualHosts
from tests.cluster.slurm import PrivateSlurm
from tests.cluster.test_launch_hosts import assert_gone
from tests.cluster.test_mpijob import PREPARE

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = (sys.executable, "-m", "hvdtrain", "launch")
RANK = Path(__file__).with_name("elastic_rank.py")
UP = re.compile(r"up rank (\d) of (\d) on (\S+) world (\d+) from (\d+) pid (\d+)")


started: list["Job"] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """What a test that has failed leaves is killed."""
    yield
    while started:
        job = started.pop()
        for pid in job.hosts.processes("hosta", job.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.process.kill()
        job.process.communicate()
        forget(job.mark)


def forget(mark: str) -> None:
    """Remove the files in which rank 0 has told its number."""
    for path in Path("/tmp").glob(f"{mark}-*"):  # noqa: S108 - as in `elastic_rank.py`
        path.unlink()


class Job:
    """A launcher on hosta whose output is read as it comes."""

    def __init__(self, hosts: VirtualHosts, *words: str, end: int = 200,
                 env: Mapping[str, str] | None = None) -> None:
        self.hosts, self.mark, self.env = hosts, f"mark{uuid.uuid4().hex}", env
        self.command = [*LAUNCH, *words, "--", sys.executable, str(RANK), self.mark, str(end)]
        self.lines: list[str] = []
        self.before = set(self._folders())
        self.process = self.start()
        started.append(self)

    def start(self) -> subprocess.Popen[str]:
        self.process = self.hosts.start("hosta", self.command, cwd=ROOT, env=self.env)
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        return self.process

    def read(self) -> None:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self.lines.append(line.rstrip())

    def until(self, done: Callable[[], object], limit_s: float) -> float:
        begin = time.monotonic()
        while not done():
            assert time.monotonic() - begin < limit_s, "\n".join(self.lines[-12:])
            self.read()
            time.sleep(0.02)
        return time.monotonic() - begin

    def ranks(self) -> list[tuple[int, int, str, int, int, int]]:
        """rank, size, host, world, first step, pid; of all that have begun."""
        return [(int(a), int(b), host, int(w), int(s), int(p)) for a, b, host, w, s, p in
                UP.findall("\n".join(self.lines))]

    def world_is_up(self, size: int, after: int = 0) -> Callable[[], bool]:
        """Whether a world later than number `after` has all of its ranks."""
        def up() -> bool:
            worlds = [one[3] for one in self.ranks() if one[1] == size and one[3] > after]
            return any(worlds.count(world) == size for world in worlds)
        return up

    @property
    def world(self) -> int:
        return max(one[3] for one in self.ranks())

    def end(self, limit_s: float = 90.0) -> int:
        self.until(lambda: self.process.poll() is not None, limit_s)
        self.read()
        assert_gone(self.hosts, self.mark)
        forget(self.mark)
        deadline = time.monotonic() + 10.0
        while left := self.folders():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        return int(self.process.returncode)

    def folders(self) -> set[tuple[str, str]]:
        """New folders of commits, on the hosts, whose memory is their own."""
        return set(self._folders()) - self.before

    def _folders(self) -> Iterator[tuple[str, str]]:
        for host in self.hosts.names:
            yield from ((host, name) for name in self.hosts.jobs_in_memory(host))


def test_hosts_that_a_file_adds_and_takes_away(hosts: VirtualHosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("hosta slots=1\nhostb slots=1\n")
    job = Job(hosts, "--hostfile", str(hostfile), "--watch", "--min-np", "1", end=700)
    job.until(job.world_is_up(2), 90)
    hostfile.write_text("hosta slots=1\nhostb slots=1\nhostc slots=1\n")
    job.until(job.world_is_up(3), 90)
    first = job.world
    steps = [one[4] for one in job.ranks() if one[3] == first and one[2] != "hostc"]
    assert min(steps) > 0
    hostfile.write_text("hostb slots=1\nhostc slots=2\n")  # hosta, with rank 0, leaves
    job.until(job.world_is_up(3, after=first), 20)
    assert {one[2] for one in job.ranks() if one[3] == job.world} == {"hostb", "hostc"}
    assert max(one[4] for one in job.ranks() if one[3] == job.world) >= min(steps)
    assert any("hosta leaves" in line for line in job.lines)
    assert job.end() == 0


def test_a_host_whose_cable_is_cut_is_left_out_and_comes_back(fragile_hosts: VirtualHosts) -> None:
    job = Job(fragile_hosts, "-H", "hosta:1,hostb:1,hostc:1", "--min-np", "2", end=1500)
    job.until(job.world_is_up(3), 90)
    time.sleep(1.0)
    fragile_hosts.cut("hostb")
    took_s = job.until(job.world_is_up(2), 25)
    assert took_s < 16
    fragile_hosts.join("hostb")
    job.until(job.world_is_up(3, after=job.world), 60)
    assert max(one[4] for one in job.ranks()) > 0
    os.kill(pid_of(job, "launcher"), signal.SIGTERM)
    job.end()


def test_ranks_that_cannot_be_reached_have_ended_before_others_begin(
        fragile_hosts: VirtualHosts) -> None:
    """Else two trainings would write the same files: alone on its host, a rank waits for none."""
    job = Job(fragile_hosts, "-H", "hostb:1,hostc:1", "--max-np", "1", end=2500)
    job.until(job.world_is_up(1), 90)
    fragile_hosts.cut("hostb")
    job.until(job.world_is_up(1, after=1), 60)
    assert job.ranks()[-1][2] == "hostc"
    assert not [c for c in fragile_hosts.processes("hostb", job.mark).values() if str(RANK) in c]
    assert any("no host of this world can be reached" in line for line in job.lines)
    # When it comes back, its newer commit is of a training that did not go on.
    commits = ["sh", "-c", "ls /dev/shm/hvdtrain-*"]
    assert "commit-" in fragile_hosts.run("hostb", commits).stdout
    fragile_hosts.join("hostb")
    job.until(lambda: "commit-" not in fragile_hosts.run("hostb", commits).stdout, 60)
    [rank] = [pid for pid, command in fragile_hosts.processes("hostc", job.mark).items()
              if str(RANK) in command]
    os.kill(rank, signal.SIGKILL)
    job.until(job.world_is_up(1, after=2), 60)
    assert job.ranks()[-1][2] == "hostc"
    assert job.ranks()[-1][4] > 0
    os.kill(pid_of(job, "launcher"), signal.SIGTERM)
    job.end()


def test_too_few_ranks_wait_and_then_end_with_a_code(fragile_hosts: VirtualHosts) -> None:
    job = Job(fragile_hosts, "-H", "hosta:1,hostb:1", "--min-np", "2", "--elastic-timeout", "3",
              end=1500)
    job.until(job.world_is_up(2), 90)
    fragile_hosts.cut("hostb")
    assert job.end() == 76
    assert any("fewer than --min-np 2 ranks for 3 s" in line for line in job.lines)
    # The rank that was left has been started to save the state.
    assert job.ranks()[-1][:3] == (0, 1, "hosta")


@pytest.mark.parametrize("victim", ["rank", "agent", "preloaded", "launcher"])
def test_what_is_killed_is_replaced(victim: str, hosts: VirtualHosts) -> None:
    job = Job(hosts, "-H", "hosta:1,hostb:1,hostc:1", "--min-np", "3", end=250)
    job.until(job.world_is_up(3), 90)
    time.sleep(1.0)
    if victim == "rank":  # a slot that fails again and again is used where --min-np needs it
        for _ in range(2):
            os.kill(pid_of(job, victim), signal.SIGKILL)
            job.until(job.world_is_up(3, after=job.world), 9)
            time.sleep(1.0)
    first = job.world
    os.kill(pid_of(job, victim), signal.SIGKILL)
    if victim == "launcher":
        job.process.wait()
        if job.process.stdout is not None:
            job.process.stdout.close()
        assert job.folders()
        job.lines.clear()
        job.start()
        first = 0
    job.until(job.world_is_up(3, after=first), 120)
    assert min(one[4] for one in job.ranks() if one[3] > first) > 0
    assert job.end() == 0


def test_the_workers_of_an_mpijob_change(fragile_hosts: VirtualHosts) -> None:
    """The operator's hostfile is of a ConfigMap, whose folder is swapped as a whole."""
    hosts = fragile_hosts
    workers = {host: f"job-worker-{number}.job-worker.ns.svc"
               for number, host in enumerate(("hostb", "hostc"))}

    def shell(script: str) -> None:
        done = hosts.run("hosta", ["bash", "-ec", script])
        assert done.returncode == 0, done.stdout

    def rewrite(version: int, *named: str) -> None:
        lines = "".join(f"{workers[host]} slots=1\\n" for host in named)
        shell(f"cd /etc/mpi; mkdir ..{version}; printf '{lines}' > ..{version}/hostfile; "
              f"ln -s ..{version} ..new; mv -T ..new ..data")
    shell(PREPARE + "rm /etc/mpi/hostfile; ln -s ..data/hostfile /etc/mpi/hostfile")
    rewrite(1, "hostb")
    shell(f"echo {hosts.address('hostb')} {workers['hostb']} >> /etc/hosts")
    job = Job(hosts, "--hostfile", "/etc/mpi/hostfile", "--watch", "--min-np", "1", end=900,
              env={"K_MPI_JOB_ROLE": "launcher"})
    job.until(job.world_is_up(1), 90)
    rewrite(2, "hostb", "hostc")  # before the worker's name is known
    job.until(lambda: any(f"{workers['hostc']} cannot be used: " in line for line in job.lines), 30)
    shell(f"echo {hosts.address('hostc')} {workers['hostc']} >> /etc/hosts")
    job.until(job.world_is_up(2), 60)
    first = job.world
    rewrite(3, "hostc")
    job.until(job.world_is_up(1, after=first), 30)
    assert job.ranks()[-1][2] == workers["hostc"]
    assert job.ranks()[-1][4] > 0
    assert job.end() == 0


def test_nodes_of_a_slurm_job(slurm: PrivateSlurm, hosts: VirtualHosts, tmp_path: Path) -> None:
    """A rank is killed; then a node is cut off, and comes back before Slurm gives it up."""
    mark = f"mark{uuid.uuid4().hex}"
    done = slurm.run([sys.executable, "-m", "hvdtrain", "slurm", "--submit", "--nodes", "2",
                      "--ntasks-per-node", "1", "--elastic", "--min-np", "1", "--",
                      sys.executable, str(RANK), mark, "1000"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    number = int(done.stdout.splitlines()[-1])
    log = tmp_path / f"slurm-{number}.out"

    def until(size: int, world: int, limit_s: float) -> None:
        limit = time.monotonic() + limit_s
        while not log.exists() or [(up[1], up[3]) for up in UP.findall(log.read_text())].count(
                (str(size), str(world))) < size:
            assert time.monotonic() < limit, (
                log.read_text() if log.exists() else slurm.state(number))
            time.sleep(0.1)
    until(2, 1, 90)
    time.sleep(1.0)
    victims = [pid for pid, command in hosts.processes("hostb", mark).items()
               if str(RANK) in command and "srun" not in command]
    os.kill(max(victims), signal.SIGKILL)
    until(2, 2, 20)
    hosts.cut("hostb")
    try:
        until(1, 3, 20)  # Slurm itself needs SlurmdTimeout
    finally:
        hosts.join("hostb")
    until(2, 4, 60)
    assert slurm.wait(number)["JobState"] == "COMPLETED", log.read_text()
    assert_gone(hosts, mark)
    forget(mark)


def pid_of(job: Job, what: str) -> int:
    """The process, as seen from here."""
    if what == "agent":
        return job.hosts.agent("hostb")
    host, mark, part = {
        "rank": ("hostb", job.mark, str(RANK)),
        "preloaded": ("hostb", "hvdtrain.preload.server", ""),
        "launcher": ("hosta", job.mark, " launch ")}[what]
    on_host = job.hosts.processes(host)
    found = [pid for pid, command in on_host.items() if mark in command and part in command]
    assert len(found) == 1, on_host
    return found[0]

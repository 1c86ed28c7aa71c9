"""What is killed or cut in an elastic training on virtual hosts, again and again; how it goes on.

    sudo python benchmarks/elastic_kills.py --times 10

Needs what tests/cluster needs (network namespaces, sshd). The launcher runs on hosta, a training
with three ranks (`elastic_job.py`) on hostb, hostc and hostd. Each victim is killed `--times` times
while the job goes on: rank 0, the agent and the preloaded process of a host, the launcher, which is
then started again with the same command; the cable of rank 0's host is cut; a host leaves the
hostfile, and comes back to it. Measured is the time until the next training step, of the last two
the pause from step to step, and the steps that were done again (a commit every 20 steps).
At the end the launcher is told to end; then no process and no memory may be left.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.elastic import steps, wait, write_hosts  # noqa: E402
from tests.cluster.hosts import VirtualHosts  # noqa: E402

WORLD = re.compile(r"world (\d+): (\d+) ranks? on (\S+)")
VICTIMS = ("rank 0", "host of rank 0", "agent", "preloaded", "launcher", "leaves", "comes")
COMMAND = [sys.executable, "-m", "hvdtrain", "launch", "--hostfile", "hosts", "--watch",
           "--min-np", "1", "fit", "elastic_job.py", "--overwrite"]


class Training:
    """The job, and its launcher of now."""

    def __init__(self, hosts: VirtualHosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.log = folder / "log"
        write_hosts(folder, hosts.names[1:])
        self.start()

    def start(self) -> None:
        self.process = self.hosts.start(
            "hosta", ["bash", "-c", 'exec "$@" >> log 2>&1', "launcher", *COMMAND],
            cwd=self.folder, env={"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"})

    def worlds(self) -> list[tuple[str, ...]]:
        """Number, ranks and hosts of each world until now."""
        return WORLD.findall(self.log.read_text()) if self.log.exists() else []

    def hosts_of_now(self) -> list[str]:
        return [part.partition(":")[0] for part in self.worlds()[-1][2].split(",")]

    def settle(self, ranks: int) -> None:
        """Wait for a world of at least so many ranks that has made steps for three seconds."""
        def is_steady() -> bool:
            worlds, done = self.worlds(), steps(self.folder)
            return bool(done) and int(worlds[-1][1]) >= ranks and (
                self.process.poll() is None) and time.time() - done[-1][2] < 1.0 and (
                sum(1 for one in done[-120:] if f"{one[0]:g}" == worlds[-1][0]) > 60)
        wait(is_steady, 300.0)

    def pid(self, host: str, part: str) -> int:
        """The one process of a host with this in its command."""
        found = self.hosts.processes(host)
        pids = [pid for pid, command in found.items() if part in command and "bash" not in command]
        if len(pids) != 1:
            raise SystemExit(f"{host}: found {pids} among {found}")
        return pids[0]

    def hit(self, victim: str) -> Callable[[], None]:
        """Kill or cut; returns what mends it."""
        now = self.hosts_of_now()
        if victim == "host of rank 0":
            self.hosts.cut(now[0])
            return lambda: self.hosts.join(now[0])
        if victim in ("leaves", "comes"):
            gone = random.choice(now) if victim == "leaves" else ""
            write_hosts(self.folder, [name for name in self.hosts.names[1:] if name != gone])
            return lambda: None
        if victim == "rank 0":
            pid = self.pid(now[0], "hvdtrain fit")
        elif victim == "preloaded":
            pid = self.pid(random.choice(now), "hvdtrain.preload.server")
        elif victim == "agent":
            pid = self.hosts.agent(random.choice(now))
        else:
            pid = self.pid("hosta", " launch ")
        os.kill(pid, signal.SIGKILL)
        if victim == "launcher":
            self.process.wait()
            self.start()
        return lambda: None


def measured(job: Training, victim: str) -> tuple[float, float]:
    """Seconds to the next step of a later world, and steps that were done again."""
    job.settle(3 if victim in ("host of rank 0", "leaves") else 2)
    time.sleep(random.uniform(0.0, 1.5))  # between two commits
    known, begin = len(job.worlds()), time.time()
    mend = job.hit(victim)
    wait(lambda: len(job.worlds()) > known)
    done = steps(job.folder)
    wait(lambda: len(steps(job.folder)) > len(done), 180.0)
    after = steps(job.folder)
    # The ranks of a launcher that was killed go on for a moment.
    first = next(at for at in range(1, len(after)) if after[at][2] > begin and (
        after[at][3] != after[at - 1][3] + 1 or after[at][0] != after[at - 1][0]))
    mend()
    if victim in ("leaves", "comes"):
        begin = after[first - 1][2]
    return after[first][2] - begin, after[first - 1][3] + 1 - after[first][3]


def run(hosts: VirtualHosts, folder: Path, options: argparse.Namespace) -> None:
    shutil.copy(ROOT / "benchmarks" / "elastic_job.py", folder)
    job = Training(hosts, folder)
    found: dict[str, list[tuple[float, float]]] = {victim: [] for victim in options.victims}
    try:
        for number in range(options.times):
            for victim, values in found.items():
                values.append(measured(job, victim))
                print(f"{number}: {victim}: {values[-1][0]:.2f} s, {values[-1][1]:g} steps again",
                      flush=True)
        os.kill(job.pid("hosta", " launch "), signal.SIGTERM)
        job.process.wait(60)
    except BaseException:
        print(job.log.read_text()[-3000:])
        raise
    for victim, values in found.items():
        seconds, again = zip(*values, strict=True)
        print(f"{victim}: {statistics.median(seconds):.1f} s ({min(seconds):.1f} to "
              f"{max(seconds):.1f}, {len(values)} times); at most {max(again):g} steps again")
    time.sleep(15.0)
    left = {name: [c for c in hosts.processes(name).values()
                   if "hvdtrain" in c and "sshd:" not in c] for name in hosts.names}
    memory = {name: hosts.jobs_in_memory(name) for name in hosts.names}
    print("processes left:", {k: v for k, v in left.items() if v},
          "memory left:", {k: v for k, v in memory.items() if v})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    options = parser.parse_args()
    hosts = VirtualHosts(4)
    hosts.up()
    try:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-kills-") as name:
            run(hosts, Path(name), options)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        raise SystemExit(str(error)) from error
    finally:
        hosts.down()


if __name__ == "__main__":
    main()

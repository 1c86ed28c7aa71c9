"""From a change to the next training step of an elastic job, and of Horovod's own elastic mode.

    python benchmarks/elastic.py --times 10

Three ranks on this machine. `killed`: a rank gets SIGKILL. `added`, `removed`: a slot is added to
or taken from the hostfile; the pause of the others is from the last step before it to the first one
after it. Horovod's elastic mode (`horovodrun`, a model that is smaller) is measured in between.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent


@contextmanager
def running(folder: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log,
                                   start_new_session=True,
                                   env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def steps(folder: Path) -> list[list[float]]:
    path = folder / "steps.txt"
    return [list(map(float, line.split())) for line in path.read_text().splitlines()
            ] if path.exists() else []


def wait(what: Callable[[], object], limit_s: float = 120.0) -> None:
    until = time.monotonic() + limit_s
    while not what():
        if time.monotonic() > until:
            raise TimeoutError(f"nothing happened in {limit_s:g} s; see the log")
        time.sleep(0.01)


def write_hosts(folder: Path, names: Iterable[str]) -> None:
    """Write the hostfile `hosts`, one slot each; a launcher that watches it sees it whole."""
    (folder / "hosts.new").write_text("".join(f"{name} slots=1\n" for name in names))
    (folder / "hosts.new").rename(folder / "hosts")


def ranks_of(folder: Path, mark: str) -> list[int]:
    """Processes with this command that run in the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if mark in command and "launch" not in command and (
                    os.readlink(entry / "cwd") == str(folder)):
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


def hvdtrain_job(times: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of each kind of change."""
    shutil.copy(HERE / "elastic_job.py", folder)
    hosts = folder / "hosts"
    hosts.write_text("localhost slots=3\n")
    found: dict[str, list[float]] = {"killed": [], "added": [], "removed": []}
    command = [sys.executable, "-m", "hvdtrain", "launch", "--hostfile", "hosts", "--watch",
               "--min-np", "2", "fit", "elastic_job.py", "--overwrite"]
    with running(folder, command):
        wait(lambda: steps(folder))
        for number in range(times):
            for kind, slots in (("killed", 0), ("removed", 2), ("added", 3)):
                wait(lambda size=2 if slots == 3 else 3:  # type: ignore[misc]
                     steps(folder)[-1][1] == size)  # a slot that was left out is back
                time.sleep(1.0)
                world, begin = steps(folder)[-1][0], time.time()
                if slots:
                    hosts.write_text(f"localhost slots={slots}\n")
                else:
                    os.kill(random.choice(ranks_of(folder, "hvdtrain fit")), signal.SIGKILL)
                wait(lambda world=world: steps(folder)[-1][0] > world)  # type: ignore[misc]
                done = steps(folder)
                first = next(step for step in done if step[0] > world)
                if slots:
                    begin = max(step[2] for step in done if step[0] == world)
                found[kind].append(first[2] - begin)
            print(number, {kind: round(values[-1], 2) for kind, values in found.items()},
                  flush=True)
    return found


def horovod_job(times: int, folder: Path) -> list[float]:
    """Seconds from SIGKILL of a rank to the next step, each in a job of its own."""
    shutil.copy(HERE / "elastic_horovod.py", folder)
    found = []
    for _ in range(times):
        (folder / "steps.txt").unlink(missing_ok=True)
        # Horovod bars the whole host of a rank that has failed, so that there are two.
        (folder / "disc.sh").write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:1\n")
        (folder / "disc.sh").chmod(0o755)
        command = [str(BIN / "horovodrun"), "--gloo", "--network-interfaces", "lo", "-np", "3",
                   "--min-np", "2", "--host-discovery-script", "./disc.sh", sys.executable,
                   "elastic_horovod.py"]
        with running(folder, command):
            wait(lambda: len(steps(folder)) >= 3)
            time.sleep(2.0)
            before = steps(folder)
            victim = next(int(one[4]) for one in before if one[0] == 2)
            begin = time.time()
            os.kill(victim, signal.SIGKILL)
            try:
                wait(lambda before=before: len(steps(folder)) > len(before))  # type: ignore[misc]
                found.append(steps(folder)[len(before)][2] - begin)
            except TimeoutError:
                found.append(float("inf"))  # it hangs
        print("horovodrun", round(found[-1], 2), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--horovod", type=int, default=3, help="times for horovodrun")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hvdtrain-elastic-") as name:
        ours, theirs = Path(name, "ours"), Path(name, "theirs")
        ours.mkdir()
        theirs.mkdir()
        found = hvdtrain_job(options.times, ours)
        if options.horovod:
            found["killed, horovodrun"] = horovod_job(options.horovod, theirs)
    for kind, values in found.items():
        print(f"{kind}: {statistics.median(values):.2f} s ({min(values):.2f} to "
              f"{max(values):.2f}, {len(values)} times)")


if __name__ == "__main__":
    main()

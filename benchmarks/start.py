"""From launch to the end of `hvd.init()` on all ranks: hvdtrain launch, mpirun, horovodrun.

    python benchmarks/start.py [--rounds 7] [--np 2]          # one host
    python benchmarks/start.py --hosts 3                      # three virtual hosts (root only)

The same program on each rank loads Horovod's library without importing TensorFlow's Python
(`tests/cluster/light_rank.py`). The starters run in turn, `--rounds` times. Prints the median of
each, and the median and range of the ratios within the rounds. `--bare` below means the program
without hvdtrain's meeting of the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(sysconfig.get_path("scripts"))
RANK = [sys.executable, str(ROOT / "tests" / "cluster" / "light_rank.py")]


def commands(np, hosts):
    """Name -> command line."""
    names = [f"{name}:1" for name in hosts.names] if hosts else [f"localhost:{np}"]
    places, nic = ",".join(names), ["--network-interfaces", "eth0"] if hosts else []
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    ssh = ["--prtemca", "plm_ssh_args", "-o StrictHostKeyChecking=accept-new"] if hosts else []
    return {
        "hvdtrain launch": [sys.executable, "-m", "hvdtrain", "launch", "-v", "-H", places, "--",
                            *RANK],
        "mpirun": [str(SCRIPTS / "mpirun"), *root, "-np", str(np), "--host", places, *ssh,
                   "--bind-to", "none", *RANK, "--bare"],
        "mpirun, tuned": [str(SCRIPTS / "mpirun"), *root, "-np", str(np), "--host", places, *ssh,
                          "--bind-to", "none", "--mca", "btl", "self,sm,tcp", *RANK, "--bare"],
        "horovodrun": [str(SCRIPTS / "horovodrun"), "--gloo", "-np", str(np), "-H", places, *nic,
                       *RANK, "--bare"],
    }


def seconds_of(command, np, hosts):
    """Run it once; the time at which the last rank had initialised."""
    env = {"PYTHONPATH": str(ROOT), "T_LAUNCH": repr(time.time())}
    if hosts:
        done = hosts.run("hosta", command, cwd=ROOT, env=env, timeout=120)
    else:
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    found = [json.loads(text) for text in re.findall(r"\{\"place\".*?\}", done.stdout)]
    # mpirun passes no variables on to other hosts: its ranks there do not know the start.
    times = [rank["seconds"] for rank in found if rank["seconds"] == rank["seconds"]]
    if done.returncode or len(found) != np or {rank["place"][1] for rank in found} != {np}:
        raise SystemExit(f"{command} failed:\n{done.stdout}")
    return max(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=0)
    asked = parser.parse_args()
    np = asked.hosts or asked.np
    with contextlib.ExitStack() as stack:
        hosts = None
        if asked.hosts:
            sys.path.insert(0, str(ROOT))
            from tests.cluster.hosts import VirtualHosts
            hosts = stack.enter_context(VirtualHosts(asked.hosts))
        sides = commands(np, hosts)
        times = {name: [] for name in sides}
        for number in range(asked.rounds):
            for name, command in sides.items():
                times[name].append(seconds_of(command, np, hosts))
            print(f"round {number + 1}: " + ", ".join(
                f"{name} {values[-1]:.2f} s" for name, values in times.items()), flush=True)
    own = times["hvdtrain launch"]
    for name, values in times.items():
        ratios = [a / b for a, b in zip(own, values, strict=True)]
        print(f"{name}: median {statistics.median(values):.2f} s; hvdtrain launch / {name}: "
              f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()

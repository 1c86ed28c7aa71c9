"""From launch to the end of `hvd.init()` on all ranks: hvdtrain launch, mpirun, horovodrun.

    python benchmarks/start.py [--rounds 7] [--np 2]          # one host
    python benchmarks/start.py --hosts 3                      # three virtual hosts (root only)
    python benchmarks/start.py --against FOLDER               # and another state of this repository
    python benchmarks/start.py --answers [--against FOLDER]   # --help, launch --dry-run

The same program on each rank loads Horovod's library without importing TensorFlow's Python
(`tests/cluster/light_rank.py`). The starters run in turn, `--rounds` times. Prints the median of
each, and the median and range of the ratios within the rounds. `--bare` below means the program
without hvdtrain's meeting of the ranks. Modules are compiled before, as in an installed package.
"""

from __future__ import annotations

import argparse
import compileall
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
OWN, OTHER = "hvdtrain launch", "hvdtrain launch of the other folder"
HVDTRAIN = [sys.executable, "-m", "hvdtrain"]
ANSWERS = {"--help": ["--help"], "launch --dry-run": [
    "launch", "-np", "2", "--dry-run", "--", "python", "train.py"], "launch --dry-run fit": [
    "launch", "-np", "2", "--dry-run", "fit", str(ROOT / "examples" / "digits_mlp.toml")]}


def rank_of(folder):
    """The program of each rank."""
    return [sys.executable, str(folder / "tests" / "cluster" / "light_rank.py")]


RANK = rank_of(ROOT)


def commands(np, hosts, against):
    """Name -> command line."""
    names = [f"{name}:1" for name in hosts.names] if hosts else [f"localhost:{np}"]
    places, nic = ",".join(names), ["--network-interfaces", "eth0"] if hosts else []
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    ssh = ["--prtemca", "plm_ssh_args", "-o StrictHostKeyChecking=accept-new"] if hosts else []
    other = {OTHER: [*HVDTRAIN, "launch", "-v", "-H", places, "--", *rank_of(against)]}
    return {
        OWN: [*HVDTRAIN, "launch", "-v", "-H", places, "--", *RANK],
        "hvdtrain launch --starter mpirun": [*HVDTRAIN, "launch", "-v", "--starter", "mpirun",
                                             "-H", places, "--", *RANK, "--bare"],
        **(other if against else {}),
        "mpirun": [str(SCRIPTS / "mpirun"), *root, "-np", str(np), "--host", places, *ssh,
                   "--bind-to", "none", *RANK, "--bare"],
        "mpirun, tuned": [str(SCRIPTS / "mpirun"), *root, "-np", str(np), "--host", places, *ssh,
                          "--bind-to", "none", "--mca", "btl", "self,sm,tcp", *RANK, "--bare"],
        "horovodrun": [str(SCRIPTS / "horovodrun"), "--gloo", "-np", str(np), "-H", places, *nic,
                       *RANK, "--bare"],
    }


def seconds_of(command, folder, np, hosts):
    """Run it once, in its folder; the time at which the last rank had initialised."""
    env = {"PYTHONPATH": str(folder), "T_LAUNCH": repr(time.time())}
    if hosts:
        done = hosts.run("hosta", command, cwd=folder, env=env, timeout=120)
    else:
        done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    found = [json.loads(text) for text in re.findall(r"\{\"place\".*?\}", done.stdout)]
    # mpirun passes no variables on to other hosts: its ranks there do not know the start.
    times = [rank["seconds"] for rank in found if rank["seconds"] == rank["seconds"]]
    if done.returncode or len(found) != np or {rank["place"][1] for rank in found} != {np}:
        raise SystemExit(f"{command} failed:\n{done.stdout}")
    return max(times)


def answer_seconds(command, folder):
    """How long a command takes that starts nothing."""
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)},
                   stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def show(times, own):
    """Medians, and the ratios of the first side to the others within the rounds."""
    for name, values in times.items():
        ratios = [a / b for a, b in zip(times[own], values, strict=True)]
        print(f"{name}: median {statistics.median(values):.3f} s ({min(values):.3f} to "
              f"{max(values):.3f}); {own} / {name}: {statistics.median(ratios):.2f} "
              f"({min(ratios):.2f} to {max(ratios):.2f})")


def measure_answers(rounds, against):
    """`--help` and dry runs, of this folder and of the other."""
    folders = {"": ROOT, **({" of the other folder": against} if against else {})}
    times = {name + of: [] for name in ANSWERS for of in folders}
    for _ in range(rounds):
        for name, words in ANSWERS.items():
            for of, folder in folders.items():
                times[name + of].append(answer_seconds([*HVDTRAIN, *words], folder))
    for name in ANSWERS:
        show({name + of: times[name + of] for of in folders}, name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--np", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--answers", action="store_true")
    parser.add_argument("--without", nargs="*", default=[], help="Sides to leave out, by name.")
    asked = parser.parse_args()
    np, against = asked.hosts or asked.np, asked.against and asked.against.resolve()
    for folder in filter(None, (ROOT, against)):
        compileall.compile_dir(folder / "hvdtrain", quiet=1)
    if asked.answers:
        measure_answers(asked.rounds, against)
        return
    with contextlib.ExitStack() as stack:
        hosts = None
        if asked.hosts:
            sys.path.insert(0, str(ROOT))
            from tests.cluster.hosts import VirtualHosts
            hosts = stack.enter_context(VirtualHosts(asked.hosts))
        sides = commands(np, hosts, against)
        sides = {name: sides[name] for name in sides if name not in asked.without}
        times = {name: [] for name in sides}
        for number in range(asked.rounds):
            for name, command in sides.items():
                times[name].append(seconds_of(
                    command, against if name == OTHER else ROOT, np, hosts))
            print(f"round {number + 1}: " + ", ".join(
                f"{name} {values[-1]:.2f} s" for name, values in times.items()), flush=True)
    show(times, OWN)


if __name__ == "__main__":
    main()

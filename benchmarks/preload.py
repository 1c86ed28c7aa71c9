"""Ranks forked from a preloaded process: what they cost, what they leave, and what they compute.

    python benchmarks/preload.py --forks 500          # leaks; is the last as fast as the first?
    python benchmarks/preload.py --equal              # weights against those of ordinary processes
    python benchmarks/preload.py --start --rounds 5   # whole commands, in turn

`--forks`: of ten programs seven end, one crashes, one is killed, one hangs and is let go of.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np

from hvdtrain.preload.client import SOCKET_VARIABLE, ForkedProgram, Preloader
from hvdtrain.preload.server import server_command

ROOT = Path(__file__).resolve().parents[1]
JOB = str(ROOT / "examples" / "digits_mlp.toml")
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
CODES = {"ends": "pass", "crashes": "import ctypes; ctypes.string_at(0)",
         "is killed": "import os; os.kill(os.getpid(), 9)", "hangs": "import time; time.sleep(600)"}
ENGINES = {
    "allreduce, 1 rank": ("-np", "1", "fit", JOB), "allreduce, 2 ranks": ("-np", "2", "fit", JOB),
    "allreduce, 3 ranks": ("-np", "3", "fit", JOB),
    "ps sync, 2 workers, 1 server": ("-np", "4", "fit", JOB, "--engine", "ps", "--ps-mode", "sync"),
    "tf, 2 ranks": ("-np", "2", "fit", JOB, "--engine", "tf"),
}


def fork(preloader, code):
    """Seconds until the program runs, and until its end is known."""
    began = time.perf_counter()
    program = ForkedProgram(preloader.path, [sys.executable, "-c", code], env=ENV, stdin=-3)
    program.begin()
    runs = time.perf_counter() - began
    if code == CODES["hangs"]:
        program.abandon()
    else:
        program.wait()
    return runs, time.perf_counter() - began


def state(pid):
    """Resident memory in MB, open files, children of a process; files in shared memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)
    return {"memory_mb": round(resident / 1024, 1), "files": len(os.listdir(f"/proc/{pid}/fd")),
            "children": len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()),
            "shared memory": len(os.listdir("/dev/shm"))}


def forks(count):
    """Fork many times from one process with TensorFlow."""
    with closing(Preloader(server_command(), ENV)) as preloader:
        began = time.perf_counter()
        fork(preloader, "pass")
        print(f"imports: {time.perf_counter() - began:.1f} s")
        ways = [*["ends"] * 7, "crashes", "is killed", "hangs"]
        time.sleep(0.5)
        before = state(preloader.pid)
        times = [(way, *fork(preloader, CODES[way]))
                 for way in (ways[number % 10] for number in range(count))]
        time.sleep(0.5)
        print("before:", before)
        print("after: ", state(preloader.pid))
    for name, some in (("first", times[:50]), ("last", times[-50:])):
        ended = [t for t in some if t[0] == "ends"]
        print(f"the {name} 50: runs after {statistics.median(t[1] for t in some) * 1000:.1f} ms, "
              f"`pass` has ended after {statistics.median(t[2] for t in ended) * 1000:.0f} ms")


def launch(words, *, preload, folder, env=ENV):
    """Seconds of one `hvdtrain launch`."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", *(["--preload"] if preload else []), *words,
         "--output", str(folder), "--no-tensorboard"], env=env, capture_output=True, text=True,
        check=False)
    seconds = time.perf_counter() - began
    if done.returncode or "as new processes" in done.stderr:
        raise SystemExit(done.stdout + done.stderr)
    return seconds


def weights(path):
    """Name -> array, of all that a model file holds."""
    with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as stream, \
            h5py.File(stream) as file:
        found = {}
        file.visititems(lambda name, item: found.__setitem__(name, np.asarray(item))
                        if isinstance(item, h5py.Dataset) else None)
        return found


def equal(epochs):
    """Train with ordinary and with forked ranks."""
    for name, words in ENGINES.items():
        with tempfile.TemporaryDirectory() as folder:
            found = []
            for preload in (False, True):
                out = Path(folder, str(preload))
                launch([*words, "--epochs", str(epochs)], preload=preload, folder=out)
                found.append(weights(out / "model.keras"))
            same = found[0].keys() == found[1].keys() and all(
                array.tobytes() == found[1][key].tobytes() for key, array in found[0].items())
            print(f"{name}: {len(found[0])} arrays, {'bit for bit equal' if same else 'DIFFERENT'}",
                  flush=True)


def start(rounds):
    """Whole commands in turn: ordinary; preloaded for each; preloaded once for all of them."""
    words = ("-np", "2", "fit", JOB, "--epochs", "1")
    seconds = {"ordinary": [], "--preload": [], "preloaded before": []}
    with closing(Preloader(server_command(), ENV)) as preloader:
        fork(preloader, "pass")
        for _ in range(rounds):
            for name, some in seconds.items():
                env = ENV | ({SOCKET_VARIABLE: preloader.path} if "before" in name else {})
                with tempfile.TemporaryDirectory() as folder:
                    some.append(launch(words, preload=name == "--preload", folder=folder, env=env))
    for name, some in seconds.items():
        ratios = [b / a for a, b in zip(seconds["ordinary"], some, strict=True)]
        print(f"{name}: {statistics.median(some):.2f} s, {statistics.median(ratios):.2f} "
              f"({min(ratios):.2f} to {max(ratios):.2f}) of ordinary, {rounds} rounds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forks", type=int, metavar="N")
    parser.add_argument("--equal", action="store_true")
    parser.add_argument("--epochs", type=int, default=3, help="of --equal")
    parser.add_argument("--start", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.forks:
        forks(options.forks)
    if options.equal:
        equal(options.epochs)
    if options.start:
        start(options.rounds)

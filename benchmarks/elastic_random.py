"""Random joins, losses, cuts and returns on three virtual hosts, against an undisturbed training.

    sudo python benchmarks/elastic_random.py --events 100 --seed 0

Needs what tests/cluster needs (network namespaces, sshd). An event is one of: a rank or an agent is
killed, a host's cable is cut and joined again, a host leaves the hostfile or comes back to it. The
training ends by itself. Then: weights and figures against those of three ranks that nothing
disturbed, the samples that each epoch has counted, and what is left of processes and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.elastic import write_hosts  # noqa: E402
from tests.cluster.hosts import VirtualHosts  # noqa: E402
from tests.keras_file import weights_of  # noqa: E402

JOB = """
import time
import keras
import numpy as np
import hvdtrain

class Counted(keras.metrics.Metric):
    '''The samples of an epoch.'''
    def __init__(self):
        super().__init__(name="seen")
        self.total = self.add_variable((), "zeros", dtype="int32", name="total")
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.shape(y_true)[0])
    def result(self):
        return self.total.value

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(PAUSE)

def model():
    made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="tanh"),
                             keras.layers.Dense(3)])
    made.compile(keras.optimizers.SGD(0.02, momentum=0.9), metrics=["accuracy", Counted()],
                 loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made

def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 6)).astype("f4")
    return x, (np.abs(x[:, 0] * 3).astype("i4") % 3)

def job():
    return hvdtrain.Job(name="job", model=model, data=data, callbacks=lambda: [Slow()],
                        config=hvdtrain.TrainConfig(
                            batch_per_rank=8, epochs=EPOCHS, lr_scaling="none",
                            commit_every_steps=5, checkpoint_every_epochs=0))
"""
WORLD = re.compile(r"world (\d+): (\d+) ranks? on")
FROM = re.compile(r"launch: world .*; from step (\d+)$", re.MULTILINE)


class Disturbed:
    """The job, and what happens to it."""

    def __init__(self, hosts: VirtualHosts, folder: Path, seed: int) -> None:
        self.hosts, self.folder, self.random = hosts, folder, random.Random(seed)
        self.mark, self.cut, self.listed = f"mark{uuid.uuid4().hex}", set[str](), set(hosts.names)
        write_hosts(self.folder, sorted(self.listed))
        self.begun = 1, time.monotonic()
        self.log = folder / "log"
        command = [sys.executable, "-m", "hvdtrain", "launch", "--hostfile", "hosts", "--watch",
                   "--min-np", "1", "-x", f"MARK={self.mark}", "fit", "job.py"]
        self.process = hosts.start("hosta", ["bash", "-c", 'exec "$@" > log 2>&1', self.mark,
                                             *command], cwd=folder,
                                   env={"PYTHONPATH": str(ROOT)})

    def disturb(self) -> str:
        """Let one thing happen; returns what."""
        able = ["kill rank", "kill rank", "kill agent"] if self.may_kill() else ["wait"]
        others = self.listed - {"hosta"} - self.cut
        able += ["cut"] * (len(self.cut) == 0 and bool(others)) + ["join"] * 2 * bool(self.cut)
        able += ["leave"] * (len(self.listed) > 2) + ["come"] * 2 * (len(self.listed) < 3)
        what = self.random.choice(able)
        if what in ("kill rank", "kill agent"):
            part = "hvdtrain fit" if what == "kill rank" else "hvdtrain-agent"
            found = [(name, pid) for name in sorted(self.listed - self.cut)
                     for pid, command in self.hosts.processes(name).items() if part in command
                     and "launch" not in command]
            if found:
                name, pid = self.random.choice(found)
                os.kill(pid, signal.SIGKILL)
                return f"{what} on {name}"
            return "nothing"
        if what == "cut":
            name = self.random.choice(sorted(others))
            self.hosts.cut(name)
            self.cut.add(name)
        elif what == "wait":
            return "nothing"
        elif what == "join":
            name = self.cut.pop()
            self.hosts.join(name)
        elif what == "leave":
            name = self.random.choice(sorted(self.listed - {"hosta"}))
            self.listed.discard(name)
            write_hosts(self.folder, sorted(self.listed))
        else:
            name = self.random.choice(sorted(set(self.hosts.names) - self.listed))
            self.listed.add(name)
            write_hosts(self.folder, sorted(self.listed))
        return f"{what} {name}"

    def may_kill(self) -> bool:
        """Three failures alike without a commit in between would end the job, as they should."""
        begins = [0, *map(int, FROM.findall(self.log.read_text()))]
        if len(begins) != self.begun[0]:
            self.begun = len(begins), time.monotonic()
        return begins[-1] not in begins[:-1] or time.monotonic() - self.begun[1] > 15.0

    def worlds(self) -> int:
        return len(WORLD.findall(self.log.read_text())) if self.log.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="copy the job's folder to this one")
    options = parser.parse_args()
    if options.keep is not None and options.keep.exists():
        parser.error(f"--keep: {options.keep} exists already")
    hosts = VirtualHosts(3)
    hosts.up()
    try:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-random-") as name:
            run(hosts, Path(name), options)
    finally:
        hosts.down()


def run(hosts: VirtualHosts, folder: Path, options: argparse.Namespace) -> None:
    for part, pause in (("disturbed", 0.1), ("plain", 0.0)):
        (folder / part).mkdir()
        (folder / part / "job.py").write_text(
            JOB.replace("PAUSE", str(pause)).replace("EPOCHS", str(options.epochs)))
    job = Disturbed(hosts, folder / "disturbed", options.seed)
    happened = []
    while job.process.poll() is None:
        time.sleep(job.random.uniform(3.0, 9.0))
        if job.worlds() and len(happened) < options.events and job.process.poll() is None and (
                event := job.disturb()) != "nothing":
            happened.append(event)
            print(f"{len(happened)}: {event}", flush=True)
    code, text = job.process.returncode, job.log.read_text()
    for name in list(job.cut):
        hosts.join(name)
    time.sleep(15.0)  # a host that was cut ends its ranks by itself
    left = {name: [c for c in hosts.processes(name, job.mark).values()] for name in hosts.names}
    memory = {name: hosts.jobs_in_memory(name) for name in hosts.names}
    subprocess.run([sys.executable, "-m", "hvdtrain", "launch", "-np", "3", "fit", "job.py"],
                   cwd=folder / "plain", check=True, capture_output=True,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})
    if options.keep is not None:
        shutil.copytree(folder, options.keep)
    print(f"{len(happened)} events, {len(WORLD.findall(text))} worlds, exit code {code}")
    if code:
        raise SystemExit(text[-6000:])
    ours, theirs = (weights_of(folder / part / "runs/job/model.keras")
                    for part in ("disturbed", "plain"))
    print("largest difference of weights, as a share of an array's largest above 1:", max(
        float(np.abs(ours[key] - theirs[key]).max() / max(1.0, np.abs(theirs[key]).max()))
        for key in theirs))
    lines, expected = ([json.loads(line) for line in (
        folder / part / "runs/job/metrics.jsonl").read_text().splitlines()]
        for part in ("disturbed", "plain"))
    print("epochs:", len(lines), "samples of each:", sorted({line["seen"] for line in lines}))
    epochs = [[line["epoch"] for line in each] for each in (lines, expected)]
    if epochs[0] != epochs[1]:
        raise SystemExit(f"other epochs: {sorted(set(epochs[0]) ^ set(epochs[1]))}")
    print("largest difference of the loss:", max(
        abs(a["loss"] - b["loss"]) for a, b in zip(lines, expected, strict=True)))
    print("processes left:", {k: v for k, v in left.items() if v},
          "memory left:", {k: v for k, v in memory.items() if v})


if __name__ == "__main__":
    main()

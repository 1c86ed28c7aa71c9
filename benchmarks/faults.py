"""How jobs end: every fault under every starter, on real ssh hosts. Root only.

    python benchmarks/faults.py [--starters native,mpirun] [--faults kill,cut] [--markdown FILE]
    python benchmarks/faults.py --random 100

The first form trains `benchmarks/fault_job.py` with `hvdtrain fit` on two virtual hosts, one rank
on each; rank 1, on hostb, breaks, or its host does, or the launcher gets a signal. For each it
tells: the seconds from the fault to the end of the launcher, its exit code, whether rank 1 was
named, how many processes of the job were left on the hosts at that moment and after how long the
last of them had gone, and whether the newest checkpoint is whole. A run that has not ended after
`--limit` seconds is ended by hand.

The second form starts light ranks (no TensorFlow) on three hosts with the native starter, and lets
random faults strike; each run must end in time and leave nothing on any host.
"""

from __future__ import annotations

import argparse
import contextlib
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hvdtrain.errors import CheckpointError  # noqa: E402
from hvdtrain.train.checkpoint import CheckpointStore, read_state  # noqa: E402
from tests.cluster.hosts import VirtualHosts  # noqa: E402
from tests.cluster.slurm import PrivateSlurm  # noqa: E402

HANG_TIMEOUT_S = 8
GONE_LIMIT_S = 40
FAULTS = {
    "raise": "an error is raised", "exit7": "`sys.exit(7)`", "exit0": "leaves early with 0",
    "kill": "SIGKILL", "segv": "SIGSEGV", "child": "an error; a child holds its output",
    "hang": f"hangs in Python (`--hang-timeout {HANG_TIMEOUT_S}`)",
    "stop": f"SIGSTOP (`--hang-timeout {HANG_TIMEOUT_S}`)",
    "sigint": "SIGINT to the launcher", "sigterm": "SIGTERM to the launcher",
    "sigkill": "SIGKILL to the launcher", "crash": "its host dies",
    "cut": "its host's cable is cut",
}
STARTERS = ("native", "srun", "mpirun", "horovodrun")
FROM_OUTSIDE = ("sigint", "sigterm", "sigkill", "crash", "cut")


@dataclass
class Outcome:
    seconds: float | None
    code: int
    named: bool
    left: int
    gone_s: float | None
    whole: bool
    text: str

    def cells(self):
        ended = "not ended" if self.seconds is None else f"{self.seconds:.1f} s"
        gone = "" if not self.left else (
            f", gone after {self.gone_s:.1f} s" if self.gone_s is not None else ", stay")
        return (ended, str(self.code), "yes" if self.named else "no", f"{self.left}{gone}",
                "yes" if self.whole else "NO")


class Run:
    """One job on hosts of its own, with one fault."""

    def __init__(self, starter, fault, limit_s):
        self.starter, self.fault, self.limit_s = starter, fault, limit_s
        self.mark = f"faultmark{uuid.uuid4().hex[:12]}"
        self.folder = Path(tempfile.mkdtemp(prefix="hvdtrain-faults-")) / self.mark

    def do(self):
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder.parent, ignore_errors=True)
            hosts = stack.enter_context(VirtualHosts(2))
            slurm = stack.enter_context(PrivateSlurm(hosts)) if self.starter == "srun" else None
            process = self.start(hosts, slurm)
            log = self.folder.parent / "log"
            # Read through a file: a pipe stays open for as long as any rank holds it.
            began = self.await_fault(process, log)
            self.strike(hosts)
            ended = self.await_end(process, hosts, began)
            left = self.left(hosts)
            gone = self.await_gone(hosts, began) if left else None
            text = log.read_text(errors="replace")
            return Outcome(None if ended is None else ended - began, process.returncode,
                           "rank 1 on hostb" in text, len(left), gone, self.whole(), text)

    def start(self, hosts, slurm):
        kind = "" if self.fault in FROM_OUTSIDE else self.fault
        by_mpi = self.starter in ("mpirun", "horovodrun")
        options = ["--network-interface", "eth0"] if by_mpi else []
        places = [] if slurm else ["-H", "hosta:1,hostb:1"]
        command = [sys.executable, "-m", "hvdtrain", "launch", "--starter", self.starter, *options,
                   *places, "-x", f"FAULT={kind}:1", "fit", str(ROOT / "benchmarks/fault_job.py"),
                   "--output", str(self.folder), "--hang-timeout", str(HANG_TIMEOUT_S)]
        self.folder.parent.mkdir(exist_ok=True)
        environ = {"PYTHONPATH": str(ROOT)}
        if slurm is not None:
            command = ["salloc", "-Q", "-N2", "--ntasks-per-node=1", *command]
            environ["SLURM_CONF"] = slurm.conf
        with (self.folder.parent / "log").open("w") as log:
            return subprocess.Popen(
                hosts.enter("hosta", command, cwd=ROOT), env={**os.environ, **environ},
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True)

    def await_fault(self, process, log):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            found = re.search(r"FAULT (\d+\.\d+)", log.read_text(errors="replace"))
            if found:
                return float(found[1]) if self.fault not in FROM_OUTSIDE else time.time()
            if process.poll() is not None:
                break
            time.sleep(0.05)
        raise SystemExit(f"{self.starter} {self.fault}: no fault came:\n{log.read_text()}")

    def strike(self, hosts):
        if self.fault in ("sigint", "sigterm", "sigkill"):
            number = getattr(signal, self.fault.upper())
            found = hosts.processes("hosta", self.mark)
            launcher = [pid for pid, words in found.items()
                        if "hvdtrain launch" in words and not words.startswith("salloc")]
            os.kill(min(launcher), number)
        elif self.fault == "crash":
            hosts.crash("hostb")
        elif self.fault == "cut":
            hosts.cut("hostb")

    def await_end(self, process, hosts, began):
        while time.time() < began + self.limit_s:
            if process.poll() is not None:
                return time.time()
            time.sleep(0.02)
        for name in hosts.names:
            hosts.signal(name, self.mark, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None

    def left(self, hosts):
        return [words for name in hosts.names for words in hosts.processes(name, self.mark).values()
                if "ssh " not in words[:5]]

    def await_gone(self, hosts, began):
        deadline = time.monotonic() + GONE_LIMIT_S
        while time.monotonic() < deadline:
            if not self.left(hosts):
                return time.time() - began
            time.sleep(0.05)
        return None

    def whole(self):
        paths = CheckpointStore(self.folder / "checkpoints", keep=1).paths()
        try:
            return bool(paths) and read_state(paths[-1]).epoch >= 1
        except CheckpointError:
            return False


def table(starters, faults, limit_s, repeats):
    lines = ["| fault on rank 1 | starter | ended after | exit code | rank named | left at the end "
             "| checkpoint whole |", "|---|---|---|---|---|---|---|"]
    for fault in faults:
        for starter in starters:
            outcomes = [Run(starter, fault, limit_s).do() for _ in range(repeats)]
            worst = max(outcomes, key=lambda o: (o.left, o.seconds or float("inf")))
            line = f"| {FAULTS[fault]} | {starter} | " + " | ".join(worst.cells()) + " |"
            lines.append(line)
            print(line, flush=True)
            if os.environ.get("SHOW_OUTPUT"):
                print(worst.text)
    return "\n".join(lines) + "\n"


LIGHT = """
import os, signal, subprocess, sys, time
from hvdtrain.runtime import guard
from hvdtrain.world import detect_world
world = detect_world(os.environ)
with guard.install(world, os.environ) as guarded:
    print("up", file=sys.stderr, flush=True)
    kind, _, rank = os.environ["FAULT"].partition(":")
    if rank == str(world.rank):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]])
        time.sleep(float(os.environ["DELAY"]))
        if kind == "raise": raise ValueError("bad sample")
        if kind == "exit7": sys.exit(7)
        if kind == "segv": os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
    while not guarded.stop.requested:
        time.sleep(0.01)
    sys.exit(75)
"""
LIGHT_CODES = {"raise": {1}, "exit7": {7}, "segv": {139}, "kill": {137}, "sigint": {75, 130},
               "sigterm": {75}, "sigkill": {137, -9}, "agent": {255, 137}}


def random_faults(count, seed):
    """Native starter, three hosts, one random fault per run, at a random time."""
    dice = random.Random(seed)
    leaks, wrong, slowest = 0, 0, 0.0
    with VirtualHosts(3) as hosts:
        for number in range(count):
            kind, rank = dice.choice(sorted(LIGHT_CODES)), dice.randrange(3)
            delay, mark = dice.uniform(0.0, 0.5), f"faultmark{uuid.uuid4().hex[:12]}"
            process = hosts.start("hosta", [
                sys.executable, "-m", "hvdtrain", "launch", "-H", "hosta:1,hostb:1,hostc:1", "-x",
                f"FAULT={kind}:{rank}", "-x", f"DELAY={delay}", "--", sys.executable, "-c", LIGHT,
                mark], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
            ups, lines = 0, []
            while ups < 3:
                lines.append(process.stdout.readline())
                ups += lines[-1].endswith("up\n")
                if not lines[-1]:
                    break
            began = time.time() + (delay if kind in ("raise", "exit7", "segv", "kill") else 0.0)
            if kind.startswith("sig"):
                time.sleep(delay)
                began = time.time()
                launcher = [pid for pid, words in hosts.processes("hosta", mark).items()
                            if "hvdtrain launch" in words]
                os.kill(min(launcher), getattr(signal, kind.upper()))
            elif kind == "agent":
                agents = hosts.processes(hosts.names[rank], "hvdtrain-agent").items()
                os.kill(min(pid for pid, words in agents if not words.startswith("ssh")),
                        signal.SIGKILL)
            lines.append(process.communicate(timeout=60)[0])
            seconds = time.time() - began
            deadline = time.monotonic() + 2.0
            while (left := {n: f for n in hosts.names if (f := hosts.processes(n, mark))}) and (
                    time.monotonic() < deadline):
                time.sleep(0.02)
            good = process.returncode in LIGHT_CODES[kind]
            leaks, wrong, slowest = leaks + bool(left), wrong + (not good), max(slowest, seconds)
            print(f"{number + 1}: {kind} on rank {rank}: {seconds:.2f} s, exit code "
                  f"{process.returncode}{'' if good else ' WRONG'}"
                  f"{f', LEFT {left}' if left else ''}", flush=True)
            if left or not good:
                print("".join(lines))
                for name in left:
                    hosts.signal(name, mark, signal.SIGKILL)
    print(f"{count} runs: {leaks} leaks, {wrong} wrong exit codes, slowest end {slowest:.2f} s")
    return 1 if leaks or wrong else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starters", default=",".join(STARTERS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("--repeats", type=int, default=1, help="the worst of so many is shown")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.random:
        return random_faults(asked.random, asked.seed)
    text = table(asked.starters.split(","), asked.faults.split(","), asked.limit, asked.repeats)
    if asked.markdown:
        asked.markdown.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

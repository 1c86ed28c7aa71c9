"""Parameter-server training whose processes are killed at random moments.

    python benchmarks/ps_faults.py [--roles chief,worker,server] [--kills 20] [--per-run 2]

Each run is `hvdtrain launch -np 5 fit JOB --engine ps --ps 2` on this machine. Processes of one
role are killed with SIGKILL, `--per-run` times in a run, at moments drawn from the whole run, the
start included. What must hold: the run ends with exit code 0 and the accuracy of a run without
faults, or with a code and an error that names the role; and nothing of it is left. One line of
JSON per run, and a summary.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = b"HVDTRAIN_PS_ASSIGNMENT="
KINDS = {"chief": "chief", "worker": "worker", "server": "ps", "evaluator": "evaluator"}


def processes(mark):
    """The processes of roles that belong to a run: pid and assignment."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes().split(b"\0")
            if mark.encode() not in (entry / "cmdline").read_bytes():
                continue
        except OSError:
            continue
        own = [v[len(VARIABLE):] for v in environ if v.startswith(VARIABLE)]
        found[int(entry.name)] = json.loads(own[0]) if own else None
    return found


def one_run(role, times, options, random_):
    with tempfile.TemporaryDirectory(prefix="hvdtrain-ps-faults-") as folder:
        command = [
            sys.executable, "-m", "hvdtrain", "launch", "-np", "5", "--timeout", "240", "fit",
            str(ROOT / "examples/digits_mlp.toml"), "--engine", "ps", "--ps", "2", "--ps-mode",
            options.mode, "--epochs", str(options.epochs), "--max-restarts", "10", "--output",
            folder + "/run", "--no-tensorboard"]
        if options.mode == "sync":
            command += ["--lr-scaling", "none"]
        log = open(folder + "/log", "w+")  # noqa: SIM115
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        killed = []
        for moment in times:
            while time.monotonic() - began < moment and process.poll() is None:
                time.sleep(0.02)
            targets = [(pid, a) for pid, a in processes(folder).items()
                       if a and a["role"]["kind"] == KINDS[role]]
            if process.poll() is None and targets:
                pid, assignment = random_.choice(targets)
                try:
                    os.kill(pid, signal.SIGKILL)
                    killed.append([round(moment, 2), assignment["role"]["index"]])
                except ProcessLookupError:
                    pass
        try:
            code = process.wait(280)
        except subprocess.TimeoutExpired:
            code = "hung"
            os.killpg(process.pid, signal.SIGKILL)
        wall = time.monotonic() - began
        time.sleep(1.0)
        left = processes(folder)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        file = Path(folder + "/run/metrics.jsonl")
        lines = file.read_text().splitlines() if file.exists() else []
        log.seek(0)
        text = log.read()
        log.close()
        found = {"role": role, "mode": options.mode, "killed": killed, "code": code,
                 "epochs": len(lines), "left": len(left), "wall_s": round(wall, 1),
                 "val_accuracy": json.loads(lines[-1])["val_accuracy"] if lines else None}
        if code != 0 or left or options.verbose:
            found["end"] = [line for line in text.splitlines() if line.strip()][-options.tail:]
        return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--roles", default="chief,worker,server")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--per-run", type=int, default=2)
    parser.add_argument("--mode", default="async")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--span", type=float, default=25.0, help="seconds of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tail", type=int, default=6)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    random_ = random.Random(options.seed)
    runs = []
    for role in options.roles.split(","):
        while sum(len(r["killed"]) for r in runs if r["role"] == role) < options.kills:
            times = sorted(random_.uniform(0, options.span) for _ in range(options.per_run))
            runs.append(one_run(role, times, options, random_))
            print(json.dumps(runs[-1]), flush=True)
    for role in options.roles.split(","):
        own = [r for r in runs if r["role"] == role]
        right = [r for r in own if r["code"] == 0]
        print(json.dumps({
            "role": role, "runs": len(own), "kills": sum(len(r["killed"]) for r in own),
            "ended well": len(right), "codes": sorted({str(r["code"]) for r in own}),
            "lowest val_accuracy": min([r["val_accuracy"] for r in right], default=None),
            "left": sum(r["left"] for r in own)}))


if __name__ == "__main__":
    main()

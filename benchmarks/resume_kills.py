"""Kill a rank at a random step, go on, again and again: is the joined curve the uninterrupted one?

    python benchmarks/resume_kills.py [--kills 20] [--ranks 2] [--seed 0] [--compression none]

Trains `benchmarks/resume_job.py` once without a fault. Then trains it while a random rank is
killed (SIGKILL) after a random number of steps, and goes on with `--resume`, until so many were
killed and a run has come to its end; as many trainings as that takes. Every step of every start
must leave bit for bit the weight that the uninterrupted run had after that step, on every rank;
the figures of all epochs must be the same to 1e-6.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "benchmarks/resume_job.py"
EPOCHS, STEPS_AT_MOST = 8, 60
TOLERANCE = 1e-6


def start(ranks, output, curve, *, compression, kill=None, resume=False):
    """One start of the job; returns its exit code and its output."""
    curve.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, "CURVE": str(curve)}
    options = ["-x", "CURVE"]
    if kill is not None:
        environ["KILL"] = f"{kill[0]}:{kill[1]}"
        options += ["-x", "KILL"]
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", "-np", str(ranks), *options, "fit", str(JOB),
         "--output", str(output), "--compression", compression, *(["--resume"] if resume else [])],
        env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, timeout=300, check=False)
    return done.returncode, done.stdout


def curve_of(folder):
    """For each rank the noted steps, in order."""
    return {path.name: [tuple(line.split()) for line in path.read_text().splitlines()]
            for path in sorted(folder.iterdir())}


def figures_of(output):
    """For each epoch its figures, without times."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    skipped = {"samples", "seconds", "samples_per_s", "time_s"}
    return {line["epoch"]: {k: v for k, v in line.items() if k not in skipped} for line in lines}


def compare(expected, found, figures, found_figures):
    """What differs, in words; and how many steps were done twice."""
    wrong = []
    again = 0
    for rank, steps in expected.items():
        weights = {(epoch, step): weight for epoch, step, weight in steps}
        seen = [(epoch, step) for epoch, step, _ in found[rank]]
        again = len(seen) - len(set(seen))
        if set(seen) != set(weights):
            wrong.append(f"{rank}: steps {sorted(set(weights) ^ set(seen))[:3]} are not in both")
        bad = [key for key, (*_, weight) in zip(seen, found[rank], strict=True)
               if weights.get(key) != weight]
        if bad:
            wrong.append(f"{rank}: other weights after {len(bad)} steps, first {bad[0]}")
    if figures.keys() != found_figures.keys():
        wrong.append(f"epochs {sorted(figures)} against {sorted(found_figures)}")
    largest = max((abs(value - found_figures[epoch][name]) / max(1.0, abs(value))
                   for epoch in figures.keys() & found_figures.keys()
                   for name, value in figures[epoch].items()), default=0.0)
    if largest > TOLERANCE:
        wrong.append(f"figures differ by {largest:.1e}")
    return wrong, again, largest


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compression", default="none")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, text = start(options.ranks, folder / "whole", folder / "whole-curve",
                           compression=options.compression)
        if code:
            raise SystemExit(text)
        expected, figures = curve_of(folder / "whole-curve"), figures_of(folder / "whole")
        steps = len(expected["rank0"])
        print(f"uninterrupted: {options.ranks} ranks, compression {options.compression}, "
              f"{steps} steps, {len(figures)} epochs, "
              f"learning rate {figures[1]['learning_rate']:.4g} to "
              f"{figures[max(figures)]['learning_rate']:.4g}", flush=True)
        killed = trainings = failed = 0
        while killed < options.kills:
            trainings += 1
            output, curve = folder / f"run{trainings}", folder / f"curve{trainings}"
            starts, code = 0, 1
            while code:
                strike = None
                if killed < options.kills:
                    strike = (rng.randrange(options.ranks), rng.randint(1, STEPS_AT_MOST))
                code, text = start(options.ranks, output, curve, kill=strike,
                                   compression=options.compression, resume=starts > 0)
                if not code:
                    break
                if strike is None or "signal 9" not in text and "SIGKILL" not in text:
                    raise SystemExit(f"a start ended with {code}:\n{text}")
                starts += 1
                killed += 1
                print(f"  killed {killed}: rank {strike[0]} after {strike[1]} steps", flush=True)
            wrong, again, largest = compare(expected, curve_of(curve), figures, figures_of(output))
            failed += bool(wrong)
            print(f"training {trainings}: {starts} kills, {again} steps done twice, figures within "
                  f"{largest:.1e}: {'; '.join(wrong) or 'the same curve'}", flush=True)
        print(f"{killed} kills, {trainings} trainings, {failed} with another curve")
        raise SystemExit(failed)


if __name__ == "__main__":
    main()

"""What `fit` costs against that of another version: steps per second, in turn.

    git clone . /elsewhere/before && git -C /elsewhere/before checkout VERSION
    python benchmarks/door_cost.py --before /elsewhere/before          # one rank
    python benchmarks/door_cost.py --before /elsewhere/before -np 2

Each round runs `benchmarks/overhead.py` of both checkouts, one after the other, which trains the
same model on the same arrays by `hvdtrain.fit`. Prints the ratio of their steps per second, as
median and range over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def steps_per_s(checkout: Path, ranks: int, job: str, steps: int) -> float:
    command = [sys.executable, "benchmarks/overhead.py", "--rounds", "1", "--job", job,
               "--steps", str(steps)]
    if ranks > 1:
        command = [sys.executable, "-m", "hvdtrain", "launch", "-np", str(ranks), "--", *command]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(checkout)})
    line = next(line for line in done.stdout.splitlines() if "hvdtrain steps/s" in line)
    return json.loads(line[line.index("{"):])["hvdtrain steps/s"]["median"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="checkout of the other version")
    parser.add_argument("-np", type=int, default=1)
    parser.add_argument("--job", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ratios = []
    for number in range(options.rounds):
        found = {}
        order = [HERE, options.before.resolve()]
        for checkout in order if number % 2 else reversed(order):
            found[checkout] = steps_per_s(checkout, options.np, options.job, options.steps)
        ratios.append(found[HERE] / found[options.before.resolve()])
        print(f"{found[HERE]:8.1f} steps/s, before {found[options.before.resolve()]:8.1f}",
              flush=True)
    print(f"{options.job}, {options.np} ranks: {statistics.median(ratios):.3f} times as fast "
          f"({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()

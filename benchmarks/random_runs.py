"""Random small trainings on 1 to 3 ranks against plain Keras in one process.

    python benchmarks/random_runs.py --cases 200 --seed 1

starts itself on 1, 2 and 3 ranks (`hvdtrain launch`), a third of the cases each, and prints every
case with a difference above 1e-5, with what is needed to draw it again:

    python benchmarks/random_runs.py --only 17 --ranks 2
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

LIMIT = 1e-5
VARIABLE = "HVDTRAIN_RANDOM_RUNS"


def on_rank(order: dict) -> None:
    """Run the cases of one launch; the chief writes a line for each."""
    import keras

    import hvdtrain
    from hvdtrain.errors import HvdtrainError
    from hvdtrain.train import coordinator
    from tests import random_runs
    session = hvdtrain.init()
    keras.config.set_floatx("float64")
    coordinator.AGREE_EVERY_S = 0.0
    out = Path(order["folder"])
    for seed in order["seeds"]:
        case = random_runs.draw(seed, session.world.size)
        quiet = io.StringIO()
        try:
            with contextlib.redirect_stdout(quiet):
                largest, where = random_runs.difference(case, keras, session, out / "run")
        except (HvdtrainError, ValueError) as error:
            largest, where = float("inf"), f"{type(error).__name__}: {error}"
        keras.backend.clear_session(free_memory=False)
        if session.world.is_chief:
            with (out / f"{session.world.size}.jsonl").open("a") as stream:
                stream.write(json.dumps({"seed": seed, "ranks": session.world.size,
                                         "difference": largest, "where": where,
                                         "case": random_runs.text(case)}) + "\n")


def launch(ranks: int, seeds: list[int], folder: Path) -> list[dict]:
    order = {"seeds": seeds, "folder": str(folder)}
    environ = {**os.environ, VARIABLE: json.dumps(order), "TF_CPP_MIN_LOG_LEVEL": "3",
               "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    ended = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "launch", "-np", str(ranks), "-H", f"localhost:{ranks}",
         "--", sys.executable, __file__], env=environ, check=False, capture_output=True, text=True)
    lines = folder / f"{ranks}.jsonl"
    found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    if ended.returncode:
        print(ended.stdout[-3000:], ended.stderr[-3000:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="the first of the cases' seeds")
    parser.add_argument("--only", type=int, help="the seed of one case")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    print(f"seeds from {given.seed}, limit {LIMIT:g}")
    total, bad, began = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number, ranks in enumerate(given.ranks):
            seeds = ([given.only] if given.only is not None else
                     list(range(given.seed, given.seed + given.cases))[number::len(given.ranks)])
            found = launch(ranks, seeds, Path(folder))
            worst = max((f["difference"] for f in found if f["difference"] <= LIMIT), default=0.0)
            total += len(found)
            for line in found:
                if not line["difference"] <= LIMIT:
                    bad += 1
                    print(f"--only {line['seed']} --ranks {ranks}: {line['difference']:g}, "
                          f"{line['where']}\n    {line['case']}")
            print(f"{ranks} rank(s): {len(found)} of {len(seeds)} cases ran, the largest "
                  f"difference within the limit is {worst:.1e}", flush=True)
    print(f"{total} cases, {bad} with a difference above {LIMIT:g}, "
          f"{time.monotonic() - began:.0f} s")
    sys.exit(bool(bad) or (given.only is None and total != given.cases))


if __name__ == "__main__":
    if VARIABLE in os.environ:
        on_rank(json.loads(os.environ[VARIABLE]))
    else:
        main()

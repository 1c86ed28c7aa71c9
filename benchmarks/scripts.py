"""Ten ordinary Keras scripts on 1, 2 and 3 ranks against plain Keras: a table.

    python benchmarks/scripts.py --write docs/scripts-table.md

Runs the scripts of `tests/scripts` one after another, by Python in one process as they are, and
with their lines for N ranks by `hvdtrain launch -np N`. Then again without what other numbers of
ranks cannot give alike, in float32 and in float64.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import script_runs  # noqa: E402

RANKS = (1, 2, 3)
REMARKS = {
    "fine_tuning": "",
    "gan": "noise is drawn on each rank; exact: it is made of the data",
    "image_folder": "dropout and augmentation by layers are drawn on each rank; exact: without "
                    "them. Augmentation by `dataset.map` is that of one process",
    "mixed_precision": "float16 rounds sums over samples; exact: without the policy",
    "model_search": "",
    "own_loop": "the batches divide by the ranks; `shard` leaves out the samples of a remainder",
    "several_inputs": "rows of an embedding that a batch uses twice are added before the "
                      "optimizer sees them, and in plain Keras by RMSprop and Adam one by one; "
                      "exact: `merge=\"none\"`",
    "text": "as above",
    "time_series": "",
    "vae": "noise is drawn on each rank; exact: it is made of the data",
}
"""Why a script is not equal as it is, and what is done to compare it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run the scripts."""

    exact: bool = False
    floatx: str = "float32"

    @property
    def environment(self) -> dict[str, str]:
        exact = {script_runs.EXACT_VARIABLE: "1"} if self.exact else {}
        return {**os.environ, **exact, script_runs.FLOAT_VARIABLE: self.floatx,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def made_by(setting: Setting, ranks: int, names: list[str], folder: Path) -> Path:
    """Run scripts on so many ranks, or (0) by plain Keras; returns where the results are."""
    out, work = folder / "out", folder / "work"
    out.mkdir(parents=True)
    shutil.copytree(folder.parent / "data", work)
    program = [sys.executable, script_runs.__file__, "added" if ranks else "plain", str(out),
               *names]
    launch = [sys.executable, "-m", "hvdtrain", "launch", "-np", str(ranks), "--"]
    done = subprocess.run([*(launch if ranks else []), *program], cwd=work, text=True, check=False,
                          env=setting.environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(program)} on {ranks} ranks:\n{done.stdout[-4000:]}")
    return out


def compared(setting: Setting, names: list[str], folder: Path) -> dict[str, list[str]]:
    """For each script a cell for each number of ranks: weights / figures and predictions."""
    plain = made_by(setting, 0, names, folder / f"{setting}-0")
    cells: dict[str, list[str]] = {name: [] for name in names}
    for ranks in RANKS:
        out = made_by(setting, ranks, names, folder / f"{setting}-{ranks}")
        for name in names:
            found = [script_runs.differences(plain / f"{name}-0.npz", out / f"{name}-{rank}.npz")
                     for rank in range(ranks)]
            weights, figures = (
                max(script_runs.largest(each, *kinds) for each in found)
                for kinds in (("weights",), ("figures", "predictions")))
            cells[name].append(f"{weights:.1e} / " + (
                f"{figures:.1e}" if np.isfinite(figures) else "another number of epochs"))
        print(f"{setting}: {ranks} ranks done", flush=True)
    return cells


def table(names: list[str], folder: Path) -> str:
    as_it_is = compared(Setting(), names, folder)
    with_exact = [name for name in names if script_runs.has_exact(name)]
    exact = compared(Setting(exact=True), with_exact, folder) if with_exact else {}
    double = compared(Setting(exact=True, floatx="float64"), names, folder)
    rows = ["| script | lines | 1 rank | 2 ranks | 3 ranks | remark |", "|---|---|---|---|---|---|"]
    for name in names:
        link = f"[{name}](../tests/scripts/{name}.py)"
        lines = len(script_runs.added_lines(name))
        rows.append(f"| {link} | {lines} | {' | '.join(as_it_is[name])} | {REMARKS[name]} |")
        if name in exact:
            rows.append(f"| exact | | {' | '.join(exact[name])} | |")
        rows.append(f"| {'exact, ' if name in exact else ''}float64 | | "
                    f"{' | '.join(double[name])} | |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="replace the table of this page")
    parser.add_argument("--names", default=",".join(script_runs.NAMES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hvdtrain-scripts-") as name:
        folder = Path(name)
        (folder / "data").mkdir()
        subprocess.run([sys.executable, script_runs.__file__, "data"], cwd=folder / "data",
                       check=True, env=Setting().environment)
        text = table(options.names.split(","), folder)
    print(text)
    if options.write is not None:
        head = options.write.read_text().split("| script |")[0]
        versions = f"TensorFlow {version('tensorflow-cpu')}, Keras {version('keras')}"
        head = "\n".join(line for line in head.splitlines() if not line.startswith("TensorFlow "))
        options.write.write_text(f"{head.rstrip()}\n\n{versions}.\n\n{text}\n")


if __name__ == "__main__":
    main()

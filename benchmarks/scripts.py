"""Keras scripts on 1, 2 and 3 ranks against one process: two tables.

    python benchmarks/scripts.py --write docs/scripts-table.md

Runs the scripts of `tests/scripts` one after another, by Python in one process as they are, and
with their lines for N ranks by `hvdtrain launch -np N`. Then again without what other numbers of
ranks cannot give alike, in float32 and in float64. The second table is of the same and more
scripts and of Horovod's examples, unchanged, by `hvdtrain run`.
"""

from __future__ import annotations

import argparse
import os
import re
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
    "gan": "noise is drawn on each rank; exact: it is made of the data",
    "image_folder": "dropout and augmentation by layers are drawn on each rank; exact: without "
                    "them. Augmentation by `dataset.map` is that of one process",
    "mixed_precision": "float16 rounds sums over samples; exact: without the policy",
    "own_loop": "the batches divide by the ranks; `shard` leaves out the samples of a remainder",
    "several_inputs": "rows of an embedding that a batch uses twice are added before the "
                      "optimizer sees them, and in plain Keras by RMSprop and Adam one by one; "
                      "exact: `merge=\"none\"`",
    "text": "as above",
    "vae": "noise is drawn on each rank; exact: it is made of the data",
}
"""Why a script is not equal as it is, and what is done to compare it."""
RUN_REMARKS = {
    "imagenet_resumed": "goes on from the checkpoints of the row above, for six epochs",
    "mnist_advanced": "rounding of float32, which grows through rectifiers and max pooling; on "
                      "another processor at most 9.5e-7",
    "own_loop": "the loss that a step returns is that of each rank's part",
    "synthetic_fp16": "gradients are sent in 16 bits",
    "word2vec_dense": "`sparse_as_dense`, by the optimizer",
}
"""The same of unchanged scripts."""


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


def made_by(setting: Setting, what: str, ranks: int, names: list[str], folder: Path) -> Path:
    """Run scripts on so many ranks, or (0) in one process; returns where the results are.

    `what` is the way of `tests/script_runs.py`.
    """
    out, work = folder / "out", folder / "work"
    out.mkdir(parents=True)
    shutil.copytree(folder.parents[2] / "data", work)
    program = [sys.executable, script_runs.__file__, what, str(out), *names]
    launch = [sys.executable, "-m", "hvdtrain", "launch", "-np", str(ranks), "--"]
    done = subprocess.run([*(launch if ranks else []), *program], cwd=work, text=True, check=False,
                          env=setting.environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(program)} on {ranks} ranks:\n{done.stdout[-4000:]}")
    return out


def compared(setting: Setting, what: str, names: list[str], folder: Path,
             reference: str = "plain") -> dict[str, list[str]]:
    """For each script a cell for each number of ranks: weights / figures and predictions.

    `reference` is the way to run it on one process; `as-{}` another one for each number of ranks.
    """
    references: dict[str, Path] = {}
    cells: dict[str, list[str]] = {name: [] for name in names}
    for ranks in RANKS:
        way = reference.format(ranks)
        place = folder / f"{what}-{setting}-{len(list(folder.iterdir()))}"
        if way not in references:
            references[way] = made_by(setting, way, 0, names, place / way)
        out = made_by(setting, what, ranks, names, place / str(ranks))
        for name in names:
            found = [script_runs.differences(
                references[way] / f"{name}-0.npz", out / f"{name}-{rank}.npz")
                for rank in range(ranks)]
            cells[name].append(_cell(found))
        print(f"{what}, {setting}: {ranks} ranks done", flush=True)
    return cells


def _cell(found: list[dict[str, float]]) -> str:
    """The largest difference over the ranks."""
    weights, figures = (
        max(script_runs.largest(each, *kinds) for each in found)
        for kinds in (("weights",), ("figures", "predictions")))
    return f"{weights:.1e} / " + (
        f"{figures:.1e}" if np.isfinite(figures) else "another number of epochs")


def table(names: list[str], folder: Path) -> str:
    """The scripts with their lines for N ranks."""
    as_it_is = compared(Setting(), "added", names, folder)
    with_exact = [name for name in names if script_runs.has_exact(name)]
    exact = compared(Setting(exact=True), "added", with_exact, folder) if with_exact else {}
    double = compared(Setting(exact=True, floatx="float64"), "added", names, folder)
    rows = ["| script | lines | 1 rank | 2 ranks | 3 ranks | remark |", "|---|---|---|---|---|---|"]
    for name in names:
        link = f"[{name}](../tests/scripts/{name}.py)"
        lines = len(script_runs.added_lines(name))
        rows.append(f"| {link} | {lines} | {' | '.join(as_it_is[name])} | "
                    f"{REMARKS.get(name, '')} |")
        if name in exact:
            rows.append(f"| exact | | {' | '.join(exact[name])} | |")
        rows.append(f"| {'exact, ' if name in exact else ''}float64 | | "
                    f"{' | '.join(double[name])} | |")
    return "\n".join(rows)


def unchanged_table(names: list[str], horovod: list[str], folder: Path) -> str:
    """The scripts by `hvdtrain run`."""
    as_it_is = compared(Setting(), "run", names, folder) if names else {}
    with_exact = [name for name in names if script_runs.has_exact(name)]
    exact = compared(Setting(exact=True), "run", with_exact, folder) if with_exact else {}
    of_horovod = compared(Setting(), "run", horovod, folder, "as-{}") if horovod else {}
    rows = [f"{_UNCHANGED} 1 rank | 2 ranks | 3 ranks | remark |", "|---|---|---|---|---|"]
    for name in names:
        remark = RUN_REMARKS.get(name, REMARKS.get(name, ""))
        rows.append(f"| [{name}](../tests/scripts/{name}.py) | {' | '.join(as_it_is[name])} | "
                    f"{remark} |")
        if name in exact:
            rows.append(f"| exact | {' | '.join(exact[name])} | |")
    for name in horovod:
        script = script_runs.HOROVOD_RUNS[name].script
        rows.append(f"| [{name}](../tests/horovod_scripts/{script}.py) | "
                    f"{' | '.join(of_horovod[name])} | {RUN_REMARKS.get(name, '')} |")
    return "\n".join(rows)


_UNCHANGED = "| unchanged script |"


def replaced(page: str, table: str) -> str:
    """A page with another table in place of the one that begins alike, or at its end."""
    start = table[:table.index("|", 1) + 1]
    lines = page.rstrip().splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith(start)), len(lines))
    end = begin
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    gap = [""] if begin == len(lines) else []
    return "\n".join([*lines[:begin], *gap, *table.splitlines(), *lines[end:]]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="replace the tables of this page")
    parser.add_argument("--names", default=",".join(script_runs.MARKED),
                        help="scripts with lines for N ranks; may be empty")
    parser.add_argument("--unchanged", default=",".join(script_runs.NAMES))
    parser.add_argument("--horovod", default=",".join(script_runs.HOROVOD_RUNS))
    options = parser.parse_args()
    names, unchanged, horovod = (
        [name for name in given.split(",") if name]
        for given in (options.names, options.unchanged, options.horovod))
    if not set(names) <= set(script_runs.MARKED):
        parser.error(f"--names: expected some of {', '.join(script_runs.MARKED)}")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-scripts-") as name:
        data, folder = Path(name) / "data", Path(name) / "runs"
        data.mkdir()
        folder.mkdir()
        subprocess.run([sys.executable, script_runs.__file__, "data"], cwd=data, check=True,
                       env=Setting().environment)
        tables = [table(names, folder)] if names else []
        if unchanged or horovod:
            tables.append(unchanged_table(unchanged, horovod, folder))
    print("\n\n".join(tables))
    if options.write is not None:
        page = options.write.read_text()
        for each in tables:
            page = replaced(page, each)
        versions = f"TensorFlow {version('tensorflow-cpu')}, Keras {version('keras')}."
        options.write.write_text(re.sub(r"TensorFlow [\d.]+\d, Keras [\d.]+\d\.", versions, page))


if __name__ == "__main__":
    main()

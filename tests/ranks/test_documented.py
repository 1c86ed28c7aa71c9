"""docs/from-keras.md and docs/migrating.md do what they say; the script of the former trains as
plain Keras does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import documented, preload
from tests.keras_file import weights_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/from-keras.md"
HVDTRAIN = str(Path(sys.executable).parent / "hvdtrain")

pytestmark = pytest.mark.slow


def run(folder, *command):
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [str(c) for c in command], cwd=folder, text=True, capture_output=True, timeout=400,
        check=False, env={**os.environ, **preload.environment()})
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not preload.refusals(done.stderr), done.stderr
    return done.stdout


def test_the_page_runs_on_two_ranks_and_its_mistakes_are_told(tmp_path):
    out = run(tmp_path, HVDTRAIN, "launch", "-np", 2, "--",
              sys.executable, documented.__file__, PAGE)
    assert f"{len(list(documented.mistakes(PAGE.read_text())))} mistakes" in out


@pytest.mark.parametrize("ranks", [1, 2])
def test_both_sides_of_each_row_run(ranks, tmp_path):
    page = ROOT / "docs/migrating.md"
    out = run(tmp_path, HVDTRAIN, "launch", "-np", ranks, "--",
              sys.executable, documented.__file__, "--rows", page)
    told = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert len(told) == len(documented.rows(page.read_text()))
    assert f"{len(told)} rows" in out


def test_the_three_lines_of_its_script_change_nothing(tmp_path):
    _, script = next(documented.blocks(PAGE.read_text()))
    lines = script.splitlines()
    plain = [line for line in lines if not line.endswith("# new")]
    assert len(plain) == len(lines) - 3
    assert not any("hvdtrain" in line for line in plain)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "plain.py").write_text("\n".join(plain))
    run(tmp_path / "two", HVDTRAIN, "launch", "-np", 2, "--", sys.executable, tmp_path / "train.py")
    run(tmp_path / "one", sys.executable, tmp_path / "plain.py")
    ours, theirs = (weights_of(tmp_path / name / "digits.keras") for name in ("two", "one"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert abs(ours[name] - value).max() < 1e-5, name

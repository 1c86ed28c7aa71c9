"""Ordinary Keras scripts give on several ranks what they give in plain Keras."""

import os
import shutil
import subprocess
import sys
from functools import cache

import pytest

from tests import preload, script_runs

pytestmark = pytest.mark.slow

RUN = script_runs.__file__
#: Batches that do not divide by three, of each kind of data, and a loop of one's own.
ON_THREE = ("gan", "image_folder", "own_loop", "text")


def run(folder, *command):
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, text=True, capture_output=True, timeout=300,
        check=False, env={**os.environ, **preload.environment(), script_runs.EXACT_VARIABLE: "1"})
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not preload.refusals(done.stderr), done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """From a number of ranks (0: plain Keras) to the folder of what the scripts have made."""
    top = tmp_path_factory.mktemp("scripts")
    (top / "data").mkdir()
    run(top / "data", *preload.forked(sys.executable, RUN, "data"))

    @cache
    def made(ranks):
        folder, out = top / f"work{ranks}", top / f"made{ranks}"
        shutil.copytree(top / "data", folder)
        out.mkdir()
        if not ranks:
            run(folder, *preload.forked(sys.executable, RUN, "plain", out, *script_runs.MARKED))
        else:
            run(folder, sys.executable, "-m", "hvdtrain", "launch", "-np", ranks, "--",
                sys.executable, RUN, "added", out,
                *(script_runs.MARKED if ranks == 2 else ON_THREE))
        return out
    return made


@pytest.mark.parametrize(("ranks", "name"), [
    *((2, name) for name in script_runs.MARKED), *((3, name) for name in ON_THREE)])
def test_a_script_gives_what_plain_keras_gives(ranks, name, outputs):
    for rank in range(ranks):
        found = script_runs.differences(
            outputs(0) / f"{name}-0.npz", outputs(ranks) / f"{name}-{rank}.npz")
        assert {key.split()[0] for key in found} == {"weights", "figures", "predictions"}
        assert {key: value for key, value in found.items() if value > script_runs.LIMIT} == {}


@pytest.mark.parametrize("name", script_runs.MARKED)
def test_two_lines_are_added_and_six_to_a_loop_of_ones_own(name):
    lines = script_runs.added_lines(name)
    assert lines[0] == "hvdtrain.init()"
    if name == "own_loop":
        assert len(lines) <= 6
    else:
        assert len(lines) == 2
        assert lines[1].startswith("hvdtrain.distribute(")


def test_the_table_of_the_documentation_has_each_script_with_its_lines():
    page = (script_runs.SCRIPTS.parents[1] / "docs/scripts-table.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| [")]
    assert [row.split(" | ")[:2] for row in rows] == [
        [f"| [{name}](../tests/scripts/{name}.py)", str(len(script_runs.added_lines(name)))]
        for name in script_runs.MARKED]

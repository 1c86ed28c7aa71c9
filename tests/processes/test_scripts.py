"""Ordinary Keras scripts give on several ranks what they give in plain Keras."""

import pytest

from tests import script_runs

pytestmark = pytest.mark.slow

#: Batches that do not divide by three, of each kind of data, and a loop of one's own.
ON_THREE = ("gan", "image_folder", "own_loop", "text")


@pytest.mark.parametrize(("ranks", "name"), [
    *((2, name) for name in script_runs.MARKED), *((3, name) for name in ON_THREE)])
def test_a_script_gives_what_plain_keras_gives(ranks, name, scripts_run):
    plain, _ = scripts_run("plain", 0, script_runs.NAMES)
    made, _ = scripts_run("added", ranks, script_runs.MARKED if ranks == 2 else ON_THREE)
    for rank in range(ranks):
        found = script_runs.differences(plain / f"{name}-0.npz", made / f"{name}-{rank}.npz")
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
    page = page.split("\n## Unchanged")[0]
    rows = [line for line in page.splitlines() if line.startswith("| [")]
    assert [row.split(" | ")[:2] for row in rows] == [
        [f"| [{name}](../tests/scripts/{name}.py)", str(len(script_runs.added_lines(name)))]
        for name in script_runs.MARKED]

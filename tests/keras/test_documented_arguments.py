"""docs/from-keras.md has each argument of Keras' methods and each public function of a loop."""

import inspect
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs/from-keras.md").read_text()


def told(heading):
    """The names in the first column of the first table below a heading."""
    below = PAGE.split(f"\n{heading}\n")[1]
    section = re.split(r"^##", below, maxsplit=1, flags=re.MULTILINE)[0]
    cells = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(?:hvdtrain\.)?(\w+)", cell)}


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_each_argument_has_a_row(method):
    import keras
    theirs = inspect.signature(getattr(keras.Model, method)).parameters
    assert told(f"### `{method}`") == set(theirs) - {"self", "kwargs"}


def test_each_public_function_of_own_loops_has_a_row():
    import hvdtrain
    own = {name for name in hvdtrain.__all__ if getattr(
        getattr(hvdtrain, name), "__module__", "") == "hvdtrain.train.own_loop"}
    assert "allreduce" in own
    assert own <= told("## A loop of your own")

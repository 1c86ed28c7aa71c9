"""Runs the Python blocks of a page in order, as one script, and tries its table of mistakes.

    hvdtrain launch -np 2 -- python tests/documented.py docs/from-keras.md

The folder in which it is started is the one that the blocks write to.
"""

import re
import sys
from pathlib import Path

import pytest


def blocks(text):
    """The Python blocks of a page, each with the number of its first line."""
    for found in re.finditer(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield text[:found.start(1)].count("\n"), found.group(1)


def mistakes(text):
    """Expressions that end with an error, and the parts of its message that are told."""
    table = text.split("\n## Common mistakes\n")[1]
    for code, told in re.findall(r"^\| `(.*?)` \| (.*) \|$", table, flags=re.MULTILINE):
        yield code, [part.strip() for part in told.split("…")]


def run(page):
    """Run it all. Every rank."""
    text, names = Path(page).read_text(), {"__name__": "documented"}
    for line, code in blocks(text):
        exec(compile("\n" * line + code, page, "exec"), names)  # noqa: S102
    return text, names


def try_mistakes(text, names):
    """Each is told in the words of the page, on every rank."""
    import keras

    import hvdtrain

    def make_model(**compiled):
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
        if compiled:
            model.compile(**compiled)
        return model
    compiled = {"optimizer": "sgd", "loss": keras.losses.SparseCategoricalCrossentropy(True)}
    names |= {"make_model": make_model, "plain": make_model(**compiled),
              "uncompiled": hvdtrain.distribute(make_model()),
              "trained": hvdtrain.distribute(make_model(**compiled))}
    found = list(mistakes(text))
    for code, told in found:
        with pytest.raises(hvdtrain.HvdtrainError) as raised:
            eval(code, names)
        missing = [part for part in told if part not in str(raised.value)]
        assert not missing, f"{code}\nsays    {raised.value}\nand not {missing}"
    hvdtrain.print_on_chief(f"{len(found)} mistakes")


if __name__ == "__main__":
    try_mistakes(*run(sys.argv[1]))

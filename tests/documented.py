"""Runs the Python blocks of a page in order, as one script, and tries its table of mistakes.

    hvdtrain launch -np 2 -- python tests/documented.py docs/from-keras.md

Or runs both sides of each row of the tables of a page, and compares them on one rank.

    hvdtrain launch -np 2 -- python tests/documented.py --rows docs/migrating.md

The folder in which it is started is the one that the blocks write to.
"""

import os
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


def rows(text):
    """The two sides of each row of a page's tables, without their backticks."""
    return re.findall(r"^\| `(.*?)` \| `(.*?)` \|$", text, flags=re.MULTILINE)


def try_rows(page):
    """Both sides of each row; equal on one rank, if they are values. Every rank."""
    import numpy as np

    import hvdtrain
    from hvdtrain.script import horovod_names, keras2
    keras2.install()
    horovod_names.install()
    found = rows(Path(page).read_text())
    import horovod.tensorflow.keras as hvd
    hvd.init()
    own = Path(f"rank{hvd.rank()}")  # each rank writes the files of the left side
    own.mkdir()
    os.chdir(own)
    for old, new in found:
        names = _prepared()
        with hvdtrain.alone():
            if old.endswith("# refused"):
                with pytest.raises(hvdtrain.HvdtrainError):
                    eval(old, names)
                eval(new, names)
                continue
            values = [eval(side, names) for side in (old, new)]
            if hvdtrain.size() == 1 and all(map(_is_value, values)):
                np.testing.assert_allclose(*values, rtol=1e-6, err_msg=old)
    hvdtrain.print_on_chief(f"{len(found)} rows")


def _is_value(side):
    import numpy as np
    return isinstance(side, (int, float, list, np.ndarray)) or hasattr(side, "numpy")


def _prepared():
    """What the rows refer to."""
    import horovod.tensorflow as hvd_tf
    import horovod.tensorflow.keras as hvd
    import keras
    import numpy as np
    import tensorflow as tf
    from tensorflow.keras import backend as K  # noqa: N812

    import hvdtrain

    class Rows(tf.keras.utils.Sequence):
        def __len__(self):
            return 4

        def __getitem__(self, number):
            return x[:4], y[:4]
    x, y = np.ones((16, 3), "f4"), np.ones((16, 1), "f4")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, "mse")
    model.save_weights("model.weights.h5")
    model.save_weights("weights.h5")
    return {"np": np, "keras": keras, "tf": tf, "K": K, "hvd": hvd, "hvd_tf": hvd_tf,
            "hvdtrain": hvdtrain, "model": model, "optimizer": optimizer, "x": x, "y": y,
            "sequence": Rows(),
            "data": tf.data.Dataset.from_tensor_slices((x, y)).batch(4),
            "strategy": tf.distribute.get_strategy()}


if __name__ == "__main__":
    if sys.argv[1] == "--rows":
        try_rows(sys.argv[2])
    else:
        try_mistakes(*run(sys.argv[1]))

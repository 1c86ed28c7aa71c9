"""What the scan of a script finds."""

import textwrap

import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.script.scan import Scan


def scan_of(tmp_path, text, others=()):
    for name, other in dict(others).items():
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(textwrap.dedent(other))
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text))
    return Scan.of(path, tmp_path)


def lines(scan):
    return sorted(line for _, line in scan.training_lines)


TAPE = """
    def step(x):
        with tf.GradientTape() as tape:
            loss = f(x)
        opt.apply_gradients(zip(tape.gradient(loss, v), v))
"""


@pytest.mark.parametrize(("loop", "expected"), [
    ("for x in data:\n    step(x)", [6]),
    ("for i, x in enumerate(data.take(3)):\n    out = step(x)", [6]),
    ("for epoch in range(3):\n    for x in data:\n        step(x)\n    for x in val:\n        f(x)",
     [6, 7]),
    ("losses = [step(x) for x in data]", [6]),
    ("for x in val:\n    f(x)", []),
    ("def epoch():\n    return step(1)\nfor x in tqdm(\n        data):\n    epoch()", [8, 9]),
    ("it = iter(data)\nfor i in range(9):\n    step(next(it))", [6, 7]),
    ("while True:\n    for x in data:\n        step(x)", [7]),
    ("fast = tf.function(step)\nfor x in data:\n    fast(x)", [7]),
    ("class T:\n    def run(self):\n        step(1)\nfor x in data:\n    T().run()", [9]),
])
def test_the_data_of_training_loops_are_found(tmp_path, loop, expected):
    text = textwrap.dedent(TAPE) + loop
    assert lines(scan_of(tmp_path, text)) == expected


@pytest.mark.parametrize(("bar", "expected"), [
    ("bar = tqdm(val)", []),
    ("bar = keras.utils.Progbar(9)", []),
    ("with tqdm.tqdm(val) as bar: pass", []),
    ("bar = Trainer()", [8]),
    ("bar = make()", [8]),
    ("bar = tqdm(val)\nbar = Trainer()", [9]),
    ("def use(bar): pass", [8]),
    ("bar = own.tqdm(val)", [8]),
])
def test_a_method_of_another_package_is_no_step(tmp_path, bar, expected):
    text = ("import keras, own, tqdm\nfrom tqdm import tqdm\nclass Trainer:\n"
            "  def update(self):\n    with tf.GradientTape() as tape: pass\nmake = Trainer\n"
            f"{bar}\nfor x in val:\n    bar.update()")
    assert lines(scan_of(tmp_path, text, {"own.py": ""})) == expected


def test_a_step_in_another_file_is_followed(tmp_path):
    scan = scan_of(tmp_path, "from lib.steps import step\nfor x in data:\n    step(x)\n",
                   {"lib/steps.py": TAPE, "lib/__init__.py": "from . import more",
                    "lib/more.py": "x = 1", "unused.py": "import horovod.tensorflow"})
    assert lines(scan) == [2]
    assert {path.rpartition("/")[2] for path in scan.trees} == {
        "train.py", "steps.py", "__init__.py", "more.py"}
    assert scan.kind == "plain"


@pytest.mark.parametrize(("text", "kind"), [
    ("import keras", "plain"),
    ("import horovod.tensorflow.keras as hvd", "horovod"),
    ("from horovod.tensorflow.keras import callbacks", "horovod"),
    ("import hvdtrain.keras as hvd", "horovod"),
    ("import hvdtrain\nhvdtrain.init()", "hvdtrain"),
    ("import hvdtrain\nif hvdtrain.is_chief():\n    pass", "plain"),
    ("import hvdtrain as hvd\nhvd.init()", "hvdtrain"),
    ("from lib import hvd", "horovod"),
    ("try:\n    from ...common import x\nexcept ImportError:\n    pass", "plain"),
])
def test_who_distributes(tmp_path, text, kind):
    assert scan_of(tmp_path, text, {"lib.py": "import horovod.keras as hvd"}).kind == kind


def test_each_line_is_told(tmp_path):
    scan = scan_of(tmp_path, """
        print("a")
        print("b")
        model.fit(x, y)
        np.save("x.npy", x)
        model.save("m.keras")
        open("log.txt", "w")
        open("in.txt")
        plt.savefig("p.png")
        layer.adapt(x)
        tf.distribute.MirroredStrategy()
        """)
    assert [(one.line, one.code) for one in scan.remarks()] == [
        (2, "print(...)"), (4, "model.fit(...)"), (5, "np.save(...)"), (6, "model.save(...)"),
        (7, "open(...)"), (9, "plt.savefig(...)"), (10, "layer.adapt(...)"),
        (11, "tf.distribute.MirroredStrategy(...)")]
    texts = {one.line: one.text for one in scan.remarks()}
    assert "divided over the ranks" in texts[4]
    assert "is_chief" in texts[5]
    assert "rank 0" in texts[6]
    assert "refused" in texts[11]


def test_a_script_that_python_cannot_read(tmp_path):
    with pytest.raises(ConfigError, match=r"train.py cannot be run: line 1: "):
        scan_of(tmp_path, "for x in")


def test_variables_that_the_script_sets(tmp_path):
    scan = scan_of(tmp_path, """
        import os
        os.environ["KERAS_BACKEND"] = "jax"
        os.environ.setdefault("TF_DETERMINISTIC_OPS", "1")
        os.environ[name] = "2"
        other["X"] = "3"
        """)
    assert scan.environment == {"KERAS_BACKEND": "jax", "TF_DETERMINISTIC_OPS": "1"}

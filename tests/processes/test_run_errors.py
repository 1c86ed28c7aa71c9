"""`hvdtrain run` with scripts that end early, fail, or cannot be divided: one clear message."""

import os
import subprocess
import sys
import textwrap

import pytest

from tests import preload

pytestmark = pytest.mark.slow

HEAD = """
    import sys
    import keras
    import numpy as np
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("f4")
    y = x.sum(1)
    def make(optimizer="sgd"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        return model
"""
HOROVOD = "import horovod.tensorflow.keras as hvd\nhvd.init()\n"


def run(folder, ranks, *words, script=None):
    if script is not None:
        (folder / "train.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, "-m", "hvdtrain", *(["launch", "-np", str(ranks)] if ranks else []),
         "run", *words], cwd=folder, text=True, capture_output=True, timeout=200, check=False,
        env={**os.environ, **preload.environment()})


@pytest.mark.parametrize(("script", "code", "told"), [
    ("sys.exit(3)", 3, "all 2 ranks failed alike: exit code 3"),
    ("make().fit(x, y, verbose=0); sys.exit('no more')", 1, "no more"),
    ("print('alone')", 2, "nothing in it was divided over the 2 ranks"),
    ("def f():\n    raise KeyError('mine')\nmake().fit(x, y, verbose=0)\nf()", 1,
     'train.py", line 14, in <module>'),
    ("make().train_on_batch(x, y)", 2, "train.py, line 11: train_on_batch would train each rank"),
    ("import os\nif os.environ['HOROVOD_RANK'] == '0':\n    make().fit(x, y, verbose=0)", 2,
     "train.py, line 13: All ranks must call the same: rank 0 calls fit with arrays, rank 1 ends "
     "the script"),
    ("""
     import tensorflow as tf
     w = tf.Variable(tf.zeros([4]))
     for i in range(0, 64, 16):
         with tf.GradientTape() as tape:
             loss = tf.reduce_mean((tf.linalg.matvec(x[i:i + 16], w) - y[i:i + 16]) ** 2)
         keras.optimizers.SGD(0.1).apply([tape.gradient(loss, w)], [w])
     """, 2, "train.py, line 17: An optimizer was given gradients that are of this rank alone"),
    ("""
     import tensorflow as tf
     with tf.distribute.MirroredStrategy().scope():
         model = make()
     model.fit(x, y)
     """, 2, "take the strategy and its scope() out of the script"),
    ("import time\nkeras.layers.Normalization().adapt(x * (time.time_ns() % 997))", 6,
     "was adapted to other data on rank 1 than on rank 0"),
    (HOROVOD + "make().fit(x, y, verbose=0)", 2, "model.compile(hvd.DistributedOptimizer("),
    (HOROVOD + "m = make(hvd.DistributedOptimizer(keras.optimizers.SGD()))\n"
     "m.set_weights([w + hvd.rank() for w in m.get_weights()])\nm.fit(x, y, verbose=0)", 2,
     "BroadcastGlobalVariablesCallback(0)"),
    (HOROVOD + "if hvd.rank() == 0:\n"
     "    make(hvd.DistributedOptimizer(keras.optimizers.SGD())).fit(x, y, verbose=0)", 2,
     "Do not put"),
    ("import horovod.tensorflow.keras as hvd\nprint('no init')", 2, "called no init()"),
], ids=["exit code", "exit message", "no fit", "an error", "train_on_batch", "one rank", "slices",
        "strategy", "adapt", "hvd not distributed", "hvd no broadcast", "hvd one rank",
        "hvd no init"])
def test_it_ends_with_one_message(script, code, told, tmp_path):
    done = run(tmp_path, 2, "train.py", script=script)
    assert done.returncode == code, done.stdout + done.stderr
    assert told in done.stdout + done.stderr
    assert "hvdtrain/script" not in done.stderr
    assert ("Traceback" in done.stderr) == (code == 1 and "mine" in script)


def test_it_runs_as_python_runs_it(tmp_path):
    """Arguments, `__main__`, `__file__`, the folder's modules, exit codes and standard error."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/__init__.py").touch()
    (tmp_path / "lib/beside.py").write_text("VALUE = 7\n")
    (tmp_path / "lib/__main__.py").write_text(
        "from . import beside\nimport sys\nassert sys.argv[0].endswith('__main__.py')\n"
        "print(beside.VALUE, sys.argv[1:])\n")
    body = """
    import argparse, inspect, os, pickle
    from lib.beside import VALUE
    class Mine:
        pass
    parser = argparse.ArgumentParser()
    parser.add_argument("--explain", type=int)
    parser.add_argument("rest", nargs="*")
    assert pickle.loads(pickle.dumps(Mine())).__class__ is Mine
    assert inspect.getsource(Mine).startswith("class Mine")
    if __name__ == "__main__":
        print(sys.argv, sorted(vars(parser.parse_args()).items()), VALUE, __package__, __spec__,
              os.path.relpath(__file__), sys.path[0] == os.path.dirname(__file__))
        sys.exit(5)
    """
    words = ("--explain", "3", "a", "b")
    ours = run(tmp_path, 0, "./train.py", *words, script=body)
    python = subprocess.run([sys.executable, "./train.py", *words], cwd=tmp_path, text=True,
                            capture_output=True, check=False)
    assert (ours.returncode, ours.stdout) == (5, python.stdout), ours.stderr
    assert python.returncode == 5
    module = run(tmp_path, 0, "-m", "lib", "--set", "x")
    assert (module.returncode, module.stdout) == (0, "7 ['--set', 'x']\n"), module.stderr


def test_what_callbacks_and_tensorflow_save_is_written_once(tmp_path):
    """All ranks run the callback; each file is that of rank 0, complete, and known to all."""
    done = run(tmp_path, 2, "train.py", script="""
        import os
        import tensorflow as tf
        class Saves(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.save(f"m{epoch}.keras")
                self.model.save_weights("last.weights.h5")
                manager.save()
        model = make()
        checkpoint = tf.train.Checkpoint(model=model)
        manager = tf.train.CheckpointManager(checkpoint, "kept", max_to_keep=2)
        model.fit(x, y, epochs=3, verbose=0, callbacks=[Saves()])
        tf.keras.models.save_model(model, "other.keras")
        print(manager.latest_checkpoint, int(checkpoint.save_counter), file=sys.stderr)
        for name in ("m0.keras", "m2.keras", "other.keras"):
            keras.models.load_model(name)
        checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()
        """)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("kept/ckpt-3 3") == 2
    assert {path.name for path in tmp_path.iterdir()} == {
        "train.py", "m0.keras", "m1.keras", "m2.keras", "last.weights.h5", "other.keras", "kept"}


def test_annotations_of_the_script_are_its_own(tmp_path):
    done = run(tmp_path, 0, "train.py", script="""
        import dataclasses
        @dataclasses.dataclass
        class Config:
            steps: int = 3
        print([field.type("4") for field in dataclasses.fields(Config)])
        """)
    assert (done.returncode, done.stdout) == (0, "[4]\n"), done.stderr


def test_a_horovod_script_may_shut_down_itself(tmp_path):
    done = run(tmp_path, 2, "train.py", script=HOROVOD + "print('done', hvd.rank())\n"
               "hvd.shutdown()")
    assert done.returncode == 0, done.stderr


def test_it_says_what_it_does_and_stops(tmp_path):
    done = run(tmp_path, 0, "--explain", "train.py", script="make().fit(x, y)\n1 / 0")
    assert done.returncode == 0
    assert "train.py on 1 rank; a plain script" in done.stderr
    assert "train.py:11  make().fit(...)  each batch is divided" in done.stderr


@pytest.mark.parametrize(("words", "told"), [
    (["missing.py"], "The script missing.py does not exist"),
    (["-m", "missing.module"], "no module 'missing.module'"),
    (["--lr-scaling", "sqrt", "train.py"], "--lr-scaling has no effect"),
    (["--set", "epoch=3", "train.py"], "epoch"),
    (["-m"], "needs the name of a module"),
])
def test_what_is_typed_is_checked(words, told, tmp_path):
    done = run(tmp_path, 0, *words, script="pass")
    assert done.returncode == 2
    assert told in done.stderr

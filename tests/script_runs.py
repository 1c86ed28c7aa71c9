"""Ordinary Keras scripts and Horovod scripts, on one process and on N ranks.

    python tests/script_runs.py data                      files that the scripts read
    python tests/script_runs.py plain OUT NAME ...        by Python
    python tests/script_runs.py added OUT NAME ...        with the lines `# hvdtrain: ...`
    python tests/script_runs.py run OUT NAME ...          unchanged, as by `hvdtrain run`
    python tests/script_runs.py as-2 OUT NAME ...         Horovod scripts, on 1 rank what 2 would do

each in the working directory. A script knows nothing of this: what it has made (models, histories,
figures, predictions) is taken from its variables when it has ended, and written to
`OUT/NAME-RANK.npz`. `differences` compares two of these files.

A Horovod script on N ranks and on one rank does the same if this one has N times the batch and the
rate, and N times less steps: its options `--batch-size`, `--base-lr` and `--steps`.

With `EXACT` in the environment scripts leave out what other numbers of ranks cannot give alike
(noise that each rank draws), and lines `# exact: ...` are added as well. `FLOATX` is the type to
compute in.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

SCRIPTS = Path(__file__).parent / "scripts"
HOROVOD_SCRIPTS = Path(__file__).parent / "horovod_scripts"
NAMES = tuple(sorted(path.stem for path in SCRIPTS.glob("*.py")))
EXACT_VARIABLE = "EXACT"
FLOAT_VARIABLE = "FLOATX"
LIMIT = 1e-6
_MARK, _EXACT_MARK = "# hvdtrain: ", "# exact: "
_FIGURES = ("evaluation", "figures", "history", "first")
_PREDICTIONS = ("predictions", "answers", "classes")


@dataclass(frozen=True)
class HorovodRun:
    """A Horovod script with its options for each of several ranks."""

    script: str
    batch_size: int
    base_lr: float | None = None
    steps: int | None = None
    others: tuple[str, ...] = ()
    same_data: bool = False

    def arguments(self, as_ranks: int = 1) -> list[str]:
        """The options; on one rank those with which it does what `as_ranks` would do."""
        batch = self.batch_size if self.same_data else self.batch_size * as_ranks
        rate = [] if self.base_lr is None else ["--base-lr", str(self.base_lr * as_ranks)]
        steps = [] if self.steps is None else ["--steps", str(self.steps // as_ranks)]
        return ["--batch-size", str(batch), *rate, *steps, *self.others]


_IMAGENET = ("--milestones", "3", "4", "5", "--warmup-epochs", "2", "--norm", "group")
HOROVOD_RUNS = {
    "mnist": HorovodRun("mnist", 8, 0.001, 36),
    "mnist_advanced": HorovodRun("mnist_advanced", 8, 0.01, others=("--rotation", "0")),
    "imagenet": HorovodRun("imagenet", 10, 0.01, others=("--epochs", "4", *_IMAGENET)),
    "imagenet_resumed": HorovodRun("imagenet", 10, 0.01, others=("--epochs", "6", *_IMAGENET)),
    "custom_loop": HorovodRun("custom_loop", 8, 0.001, 48),
    "word2vec": HorovodRun("word2vec", 24, 0.2),
    "word2vec_dense": HorovodRun("word2vec", 24, 0.2, others=("--optimizer", "--sparse-as-dense")),
    "synthetic_benchmark": HorovodRun("synthetic_benchmark", 16, same_data=True),
    "synthetic_fp16": HorovodRun("synthetic_benchmark", 16, others=("--fp16-allreduce",),
                                 same_data=True),
    "elastic": HorovodRun("elastic", 8, 0.001, 36),
    "keras2": HorovodRun("keras2", 25, same_data=True),
}
"""Horovod's examples; `imagenet_resumed` goes on from the checkpoints of `imagenet`. And a plain
script for Keras 2, which no one process can run without `hvdtrain run` either.
"""


def text_of(name: str, *, added: bool = False, exact: bool = False) -> str:
    """A script as it is, or with its lines for N ranks."""
    text = (SCRIPTS / f"{name}.py").read_text()
    if added:
        text = text.replace(_MARK, "")
        text = text.replace(_EXACT_MARK, "") if exact else text
    return text


def added_lines(name: str) -> list[str]:
    """The lines that a script needs for N ranks, beside the import."""
    lines = [line.split(_MARK)[1] for line in text_of(name).splitlines() if _MARK in line]
    return [line for line in lines if line != "import hvdtrain"]


MARKED = tuple(name for name in NAMES if _MARK in text_of(name))
"""The scripts that have lines for N ranks."""


def has_exact(name: str) -> bool:
    """Whether a script leaves something out to be compared."""
    return EXACT_VARIABLE in text_of(name) or _EXACT_MARK in text_of(name)


def make_data() -> None:
    """The files that the scripts read, in the working directory."""
    import keras
    import tensorflow as tf
    from sklearn.datasets import load_digits
    digits = load_digits(n_class=10)
    np.savez("digits.npz", images=(digits.images[:300, ..., None] / 16).astype("float32"),
             labels=digits.target[:300])
    rng = np.random.default_rng(0)
    colours = rng.integers(40, 200, (3, 1, 1, 3))
    images = np.concatenate([
        np.clip(colour + rng.normal(0, 40, (30, 24, 24, 3)), 0, 255) for colour in colours])
    np.savez("photos.npz", images=images[:60].astype("float32"), labels=np.arange(60) // 30)
    for number, image in enumerate(images.astype("uint8")):
        path = Path("photos", "abc"[number // 30], f"{number:03}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(image).numpy())
    _write_base(keras, rng)
    _write_reviews(rng)


def _write_base(keras: Any, rng: np.random.Generator) -> None:
    """A network with batch normalizations that have seen data."""
    from keras import layers
    keras.utils.set_random_seed(0)
    base = keras.Sequential([keras.Input((24, 24, 3)), *(layer for width in (8, 16) for layer in (
        layers.Conv2D(width, 3, strides=2), layers.BatchNormalization(), layers.ReLU()))])
    base.compile("sgd", "mse")
    x = rng.uniform(-1, 1, (64, 24, 24, 3))
    base.fit(x, np.zeros((64, *base.output_shape[1:])), epochs=3, verbose=0)
    base.save("base.keras")


def _write_reviews(rng: np.random.Generator) -> None:
    common = ["the", "a", "it", "was", "and", "of", "this", "movie", "that", "I"]
    words = {"good": ["great", "film", "loved", "story", "fine", "acting", "warm"],
             "bad": ["dull", "boring", "story", "weak", "acting", "waste", "cold"]}
    for kind, own in words.items():
        folder = Path("reviews", kind)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(60):
            text = rng.choice(own + common, rng.integers(6, 24))
            folder.joinpath(f"{number:02}.txt").write_text(" ".join(text) + ".<br />")


def run(name: str, out: Path, *, added: bool, rank: int = 0) -> None:
    """Run one script to its end and write what it has made."""
    import keras
    keras.backend.clear_session()
    keras.config.set_floatx(os.environ.get(FLOAT_VARIABLE, "float32"))
    keras.config.set_dtype_policy(keras.config.floatx())
    path = out / f"{name}-{rank}.py"
    path.write_text(text_of(name, added=added, exact=EXACT_VARIABLE in os.environ))
    made = runpy.run_path(str(path), run_name="__main__")
    np.savez(out / f"{name}-{rank}.npz", **dict(_results(made, keras)))


def run_unchanged(name: str, out: Path, *, as_ranks: int = 1, rank: int = 0) -> None:
    """Run one script by what `hvdtrain run` calls, and write what it has made."""
    import keras

    from hvdtrain.config import TrainConfig
    from hvdtrain.script.run import ScriptOptions, run_script
    keras.backend.clear_session()
    keras.config.set_floatx(os.environ.get(FLOAT_VARIABLE, "float32"))
    keras.config.set_dtype_policy(keras.config.floatx())
    options = ScriptOptions(
        program=str(SCRIPTS / f"{name}.py"),
        # What the lines `# exact:` of a script say.
        config=TrainConfig(merge="none") if EXACT_VARIABLE in os.environ
        and _EXACT_MARK in text_of(name) else TrainConfig()) if name in NAMES else ScriptOptions(
        program=str(HOROVOD_SCRIPTS / f"{HOROVOD_RUNS[name].script}.py"),
        arguments=tuple(HOROVOD_RUNS[name].arguments(as_ranks)))
    with _rates_of(as_ranks):
        made = run_script(options)
    np.savez(out / f"{name}-{rank}.npz", **dict(_results(made, keras)))


@contextmanager
def _rates_of(ranks: int) -> Iterator[None]:
    """Let Horovod's warm-up on one rank be that of several."""
    if ranks == 1:
        yield
        return
    from hvdtrain.tensorflow.keras import callbacks
    current = callbacks.current
    callbacks.current = SimpleNamespace(**vars(current) | {"size": lambda: ranks})
    try:
        yield
    finally:
        callbacks.current = current


def _results(made: dict[str, Any], keras: Any) -> Iterator[tuple[str, np.ndarray]]:
    for key, value in made.items():
        if isinstance(value, keras.Model):
            for number, weight in enumerate(value.weights):
                yield f"weights {key} {number} {weight.path}", np.asarray(weight)
        elif key in _FIGURES or key in _PREDICTIONS:
            kind = "figures" if key in _FIGURES else "predictions"
            value = value.history if isinstance(value, keras.callbacks.History) else value
            for where, leaf in _leaves(value):
                yield f"{kind} {key} {where}".strip(), np.asarray(leaf)


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, f"{where} {key}".strip())
    elif isinstance(value, (list, tuple)) and value and isinstance(value[0], np.ndarray):
        for number, each in enumerate(value):
            yield from _leaves(each, f"{where} {number}".strip())
    else:
        yield where, value


def differences(plain: Path, other: Path) -> dict[str, float]:
    """The difference of each array that the plain script has made, as a share of its largest value
    where that is above 1. What is missing, or of another shape, is infinite.
    """
    with np.load(plain) as expected, np.load(other) as got:
        return {name: _largest(expected[name], got.get(name)) for name in expected.files}


def _largest(expected: np.ndarray, got: np.ndarray | None) -> float:
    if got is None or expected.shape != got.shape or not np.isfinite(got).all():
        return float("inf")
    expected, got = expected.astype("float64"), got.astype("float64")
    return float(np.abs(expected - got).max() / max(1.0, np.abs(expected).max()))


def largest(found: dict[str, float], *kinds: str) -> float:
    """The largest difference of arrays of some kinds: weights, figures, predictions."""
    return max((difference for name, difference in found.items() if name.startswith(kinds)),
               default=0.0)


def main(what: str, *arguments: str) -> None:
    if what == "data":
        make_data()
        return
    out, *names = arguments
    rank = int(os.environ.get("HOROVOD_RANK", "0"))
    for name in names:
        if what in ("plain", "added"):
            run(name, Path(out), added=what == "added", rank=rank)
        else:
            run_unchanged(name, Path(out), as_ranks=int(what.removeprefix("as-")) if what != "run"
                          else 1, rank=rank)


if __name__ == "__main__":
    main(*sys.argv[1:])

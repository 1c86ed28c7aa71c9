"""Runs the scripts of `tests/scripts`, as they are or with the lines for N ranks.

    python tests/script_runs.py data                      files that the scripts read
    python tests/script_runs.py plain OUT NAME ...
    python tests/script_runs.py added OUT NAME ...        with the lines `# hvdtrain: ...`

each in the working directory. A script knows nothing of this: what it has made (models, histories,
figures, predictions) is read from its variables when it has ended, and written to
`OUT/NAME-RANK.npz`. `differences` compares two of these files.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = tuple(sorted(path.stem for path in SCRIPTS.glob("*.py")))
MARK = "# hvdtrain: "
EXACT_VARIABLE = "EXACT"
"""Tells a script to leave out what cannot be equal on other numbers of ranks."""
FIGURES = ("evaluation", "figures", "history", "first")
PREDICTIONS = ("predictions", "answers", "classes")


def added(text: str) -> str:
    """A script with its lines for N ranks."""
    return text.replace(MARK, "")


def added_lines(name: str) -> list[str]:
    """The lines that a script needs for N ranks, beside the import."""
    lines = [line.split(MARK)[1] for line in (SCRIPTS / f"{name}.py").read_text().splitlines()
             if MARK in line]
    return [line for line in lines if line != "import hvdtrain"]


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
    words = {"good": "great film loved story fine acting warm".split(),
             "bad": "dull boring story weak acting waste cold".split()}
    common = "the a it was and of this movie that I".split()
    for kind, own in words.items():
        folder = Path("reviews", kind)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(60):
            text = rng.choice(own + common, rng.integers(6, 24))
            folder.joinpath(f"{number:02}.txt").write_text(" ".join(text) + ".<br />")


def run(name: str, out: Path, *, lines: bool, rank: int = 0) -> None:
    """Run one script to its end and write what it has made."""
    import keras
    keras.backend.clear_session()
    keras.config.set_floatx(os.environ.get("FLOATX", "float32"))
    keras.config.set_dtype_policy(keras.config.floatx())
    path = SCRIPTS / f"{name}.py"
    if lines:
        text, path = added(path.read_text()), out / f"{name}-{rank}.py"
        path.write_text(text)
    started = time.perf_counter()
    made = runpy.run_path(str(path), run_name="__main__")
    results = dict(_results(made, keras))
    np.savez(out / f"{name}-{rank}.npz", seconds=time.perf_counter() - started, **results)


def _results(made: dict[str, Any], keras: Any) -> Iterator[tuple[str, np.ndarray]]:
    for key, value in made.items():
        if isinstance(value, keras.Model):
            for number, weight in enumerate(value.weights):
                yield f"weights {key} {number} {weight.path}", np.asarray(weight)
        elif key in FIGURES or key in PREDICTIONS:
            kind = "figures" if key in FIGURES else "predictions"
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
    """The largest difference of weights, figures and predictions; what is missing is infinite."""
    found: dict[str, float] = {}
    for name, each in each_difference(plain, other).items():
        kind = name.split()[0]
        found[kind] = max(found.get(kind, 0.0), each)
    return found


def each_difference(plain: Path, other: Path) -> dict[str, float]:
    """The difference of each array that the plain script has made."""
    with np.load(plain) as expected, np.load(other) as got:
        return {name: _largest(expected[name], got[name] if name in got else None)
                for name in expected.files if name != "seconds"}


def _largest(expected: np.ndarray, got: np.ndarray | None) -> float:
    if got is None or expected.shape != got.shape:
        return float("inf")
    if not np.isfinite(got).all() or not expected.size:
        return float("inf")
    return float(np.abs(expected.astype("float64") - got.astype("float64")).max())


def main(what: str, *arguments: str) -> None:
    if what == "data":
        make_data()
        return
    out, *names = arguments
    rank = int(os.environ.get("HOROVOD_RANK", "0"))
    for name in names:
        run(name, Path(out), lines=what == "added", rank=rank)


if __name__ == "__main__":
    main(*sys.argv[1:])

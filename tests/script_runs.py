"""Ten ordinary Keras scripts, as they are and with their lines for N ranks.

    python tests/script_runs.py data                      files that the scripts read
    python tests/script_runs.py plain OUT NAME ...
    python tests/script_runs.py added OUT NAME ...        with the lines `# hvdtrain: ...`

each in the working directory. A script knows nothing of this: what it has made (models, histories,
figures, predictions) is taken from its variables when it has ended, and written to
`OUT/NAME-RANK.npz`. `differences` compares two of these files.

With `EXACT` in the environment scripts leave out what other numbers of ranks cannot give alike
(noise that each rank draws), and lines `# exact: ...` are added as well. `FLOATX` is the type to
compute in.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = tuple(sorted(path.stem for path in SCRIPTS.glob("*.py")))
EXACT_VARIABLE = "EXACT"
FLOAT_VARIABLE = "FLOATX"
LIMIT = 1e-6
_MARK, _EXACT_MARK = "# hvdtrain: ", "# exact: "
_FIGURES = ("evaluation", "figures", "history", "first")
_PREDICTIONS = ("predictions", "answers", "classes")


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
    return max(difference for name, difference in found.items() if name.startswith(kinds))


def main(what: str, *arguments: str) -> None:
    if what == "data":
        make_data()
        return
    out, *names = arguments
    rank = int(os.environ.get("HOROVOD_RANK", "0"))
    for name in names:
        run(name, Path(out), added=what == "added", rank=rank)


if __name__ == "__main__":
    main(*sys.argv[1:])

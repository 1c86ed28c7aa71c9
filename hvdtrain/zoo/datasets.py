"""Named data sets: real data that ships in a package, files, and synthetic data."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np

from hvdtrain.data.source import ArraySource, DataSplits, load_npz
from hvdtrain.errors import DataError
from hvdtrain.optional import require

SPLIT_SEED = 20
"""The held-out fifth of digits and text is the same in every run."""


def digits(target: str = "class") -> DataSplits:
    """The 1,797 handwritten digits (8x8) of scikit-learn, flat; a fifth is held out.

    Args:
        target: String: `"class"` for the digit, `"input"` for the image itself (autoencoder).

    Returns:
        `DataSplits` with x float32 `(n, 64)` in [0, 1] and y int32 `(n,)` or x itself.
    """
    x, y = _load_digits()
    if target not in ("class", "input"):
        raise DataError(f"digits: target must be 'class' or 'input'. Received: {target!r}")
    return _held_out_fifth(x, y if target == "class" else x, "digits")


def digits_images() -> DataSplits:
    """As `digits`, with x of shape `(n, 8, 8, 1)`."""
    x, y = _load_digits()
    return _held_out_fifth(x.reshape(-1, 8, 8, 1), y, "digits")


def _load_digits() -> tuple[np.ndarray, np.ndarray]:
    loaded = require("sklearn.datasets", "the digits data set").load_digits()
    return (loaded.data / 16.0).astype(np.float32), loaded.target.astype(np.int32)


def _held_out_fifth(x: np.ndarray, y: np.ndarray, name: str) -> DataSplits:
    order = np.random.default_rng(SPLIT_SEED).permutation(len(x))
    held = len(x) // 5
    test, train = order[:held], order[held:]
    return DataSplits(train=ArraySource((x[train], y[train]), name=name),
                      validation=ArraySource((x[test], y[test]), name=f"{name} (held out)"))


def npz(path: str, x: str = "x", y: str = "y", validation: str | None = None) -> DataSplits:
    """Arrays from `.npz` files; memory-mapped where they are not compressed.

    Args:
        path: String, the training file.
        x: String, name of the inputs' array.
        y: String, name of the targets' array; empty for none.
        validation: String or None, the validation file, with the same arrays.
    """
    def load(file: str) -> ArraySource:
        return load_npz(file, x=x, y=y or None)
    return DataSplits(train=load(path), validation=load(validation) if validation else None)


def synthetic(samples: int = 4096, features: int = 64, classes: int = 10,
              seed: int = 0) -> DataSplits:
    """Random inputs with labels from a random linear rule: learnable, of any size.

    Args:
        samples: Integer, number of samples.
        features: Integer, length of an input.
        classes: Integer, number of classes.
        seed: Integer.

    Returns:
        `DataSplits` with x float32 `(samples, features)` and y int32 `(samples,)`.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples, features), dtype=np.float32)
    y = (x @ rng.standard_normal((features, classes), dtype=np.float32)).argmax(1)
    return DataSplits(train=ArraySource((x, y.astype(np.int32)), name="synthetic"))


def text(path: str | None = None, length: int = 64) -> DataSplits:
    """Text as windows of characters, each with the characters that follow.

    Args:
        path: String or None, a text file; by default the data set descriptions (English
            prose, about 60,000 characters) that ship with scikit-learn.
        length: Integer, characters per window.

    Returns:
        `DataSplits` with x and y int32 `(n, length)`, numbers 0..95: printable ASCII, and 95
        for everything else. The last tenth of the text is for validation.
    """
    raw = Path(path).read_bytes() if path else _descriptions()
    codes = np.frombuffer(raw, np.uint8).astype(np.int32) - 32
    codes[(codes < 0) | (codes > 94)] = 95
    if len(codes) < 20 * length:
        raise DataError(f"text: {len(codes)} characters are too few for windows of {length}; "
                        f"at least {20 * length} are needed.")
    cut = len(codes) * 9 // 10
    return DataSplits(train=_windows(codes[:cut], length, "text"),
                      validation=_windows(codes[cut:], length, "text (last tenth)"))


def _windows(codes: np.ndarray, length: int, name: str) -> ArraySource:
    count = (len(codes) - 1) // length
    return ArraySource((codes[:count * length].reshape(count, length),
                        codes[1:count * length + 1].reshape(count, length)), name=name)


def _descriptions() -> bytes:
    require("sklearn", "the default text")
    folder = resources.files("sklearn.datasets") / "descr"
    return b"\n".join((folder / name).read_bytes() for name in sorted(
        f.name for f in folder.iterdir() if f.name.endswith(".rst")))

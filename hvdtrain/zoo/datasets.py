"""Named data sets: real data that ships in a package, files, and synthetic data."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.arrays import load_npy, load_npz, unpacked
from hvdtrain.data.by_file import by_file
from hvdtrain.data.csv_files import load_csv
from hvdtrain.data.images import load_images
from hvdtrain.data.parquet import load_parquet
from hvdtrain.data.source import ArraySource, DataSplits, Source
from hvdtrain.data.tfrecord import load_tfrecord
from hvdtrain.data.weights import weighted
from hvdtrain.errors import DataError
from hvdtrain.optional import require

SPLIT_SEED = 20  # the held-out fifth of digits and text is the same in every run
_NOT_IN_JOBS = ("parse", "cache", "groups_kept", "class_names")
"""Arguments of a loader that TOML cannot hold, or that jobs do not need."""


def digits(target: str = "class") -> DataSplits:
    """The 1,797 handwritten digits (8x8) of scikit-learn, flat; a fifth is held out.

    x is float32 `(n, 64)` in [0, 1], y int32 `(n,)`; with `target="input"` y is x (autoencoder).
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

    `path` and `validation` are files, `x` and `y` names of their arrays (`y` empty: no targets).
    """
    held = load_npz(validation, x=x, y=y or None) if validation else None
    return DataSplits(train=load_npz(path, x=x, y=y or None), validation=held)


def synthetic(samples: int = 4096, features: int = 64, classes: int = 10,
              seed: int = 0) -> DataSplits:
    """Random inputs with labels from a random linear rule: learnable, of any size.

    x is float32 `(samples, features)`, y int32 `(samples,)`.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples, features), dtype=np.float32)
    y = (x @ rng.standard_normal((features, classes), dtype=np.float32)).argmax(1)
    return DataSplits(train=ArraySource((x, y.astype(np.int32)), name="synthetic"))


def text(path: str | None = None, length: int = 64) -> DataSplits:
    """Text as windows of `length` characters, each with the characters that follow.

    x and y are int32 `(n, length)`, numbers 0..95: printable ASCII, and 95 for everything else. The
    last tenth is for validation. `path` is a text file, by default the data set descriptions of
    scikit-learn (English prose, about 60,000 characters).
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


def npy(x: str, y: str | None = None, sample_weight: str | None = None,
        validation_x: str | None = None, validation_y: str | None = None,
        class_weight: Any = None) -> DataSplits:
    """Arrays in `.npy` files, memory-mapped: inputs, targets and sample weights.

    `validation_x` and `validation_y` are for validation; `class_weight` is as for
    `hvdtrain.weighted`, for the training data.
    """
    return DataSplits(train=_weighted(load_npy(x, y, sample_weight), class_weight),
                      validation=load_npy(validation_x, validation_y) if validation_x else None)


def _weighted(source: Source, class_weight: Any) -> Source:
    return source if class_weight is None else weighted(source, class_weight)


def _in_files(load: Callable[..., Source], **extra: Any) -> Callable[..., DataSplits]:
    """A data set of job files from a loader of `hvdtrain.data`, with its arguments.

    And these: `path` and `validation`, the files; `unpack`, to read from arrays that each host
    makes once (`hvdtrain.unpacked`); `class_weight`, as for `hvdtrain.weighted`, for the training
    data; and `extra`, with defaults. `shard` is `"sample"`, or `"file"`: each rank opens its own
    training files only (`hvdtrain.by_file`).
    """
    def data_set(path: Any, *, unpack: bool = False, shard: str = "sample",
                 validation: Any = None, class_weight: Any = None, **options: Any) -> DataSplits:
        if shard not in ("sample", "file"):
            raise DataError(f"shard must be 'sample' or 'file'. Received: {shard!r}")
        classes: dict[str, Any] = {}

        def opened(files: Any) -> Source:
            source = load(files, **options, **classes)
            if load is load_images:  # the folder for validation has the same classes
                classes["class_names"] = source.class_names  # type: ignore[attr-defined]
            return unpacked(source) if unpack else source

        def for_training(files: Any) -> Source:
            return _weighted(opened(files), class_weight)
        return DataSplits(
            train=by_file(path, for_training) if shard == "file" else for_training(path),
            validation=opened(validation) if validation else None)

    own = list(inspect.signature(load).parameters.values())[1:]
    more = {"unpack": False, **extra, "validation": None, "class_weight": None}
    data_set.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        inspect.Parameter("path", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own
          if parameter.name not in _NOT_IN_JOBS),
        *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
          for name, default in more.items())])
    return data_set


csv = _in_files(load_csv, shard="sample")
images = _in_files(load_images)
parquet = _in_files(load_parquet, shard="sample")
tfrecord = _in_files(load_tfrecord, shard="sample")

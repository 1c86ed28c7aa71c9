"""`weighted`: class weights, as the sample weights that Keras makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvdtrain.data.source import Source, Structure, as_source
from hvdtrain.errors import DataError

_CHUNK_ROWS = 4096

own_files_only: ContextVar[bool] = ContextVar("own_files_only", default=False)
"""True while `by_file` opens the files of one rank, which do not represent all data."""


def weighted(source: Source | Any,
             class_weight: Mapping[Any, float] | Literal["balanced"]) -> Source:
    """A source with sample weights by class.

    As `class_weight` of `keras.Model.fit`: other classes have weight 1. Sample weights of the
    source are multiplied by it.

    Args:
        source: A source of, or arrays, `(x, y)` or `(x, y, sample_weight)`, y being one integer per
            sample.
        class_weight: Mapping from classes to weights; or `"balanced"`: samples / (classes * samples
            of the class), so that all classes have the same total weight. This counts all targets
            once, which reads all samples on every rank unless the source has them available (arrays
            and image folders do). Not within `by_file`.

    Raises:
        DataError: Targets are no integers, or a weight is negative or not finite.
    """
    source = as_source(source, "data")
    if not isinstance(source, Source):
        raise DataError(f"{source.name}: class weights need samples that are read by number. Give "
                        "the samples of a stream their weights where it is made.")
    signature = source.signature
    target = signature[1] if isinstance(signature, tuple) and len(signature) > 1 else None
    if not isinstance(target, tf.TensorSpec):
        raise DataError(f"{source.name}: class weights need one target per sample, (x, y).")
    if not target.dtype.is_integer or target.shape.as_list() not in ([], [1]):
        raise DataError(
            f"{source.name}: class weights need integer targets, one per sample. Found: "
            f"{target.dtype.name} of shape {target.shape.as_list()}. Give the numbers of the "
            "classes (with a sparse loss), or a sample_weight.")
    if class_weight == "balanced":
        if own_files_only.get():
            raise DataError(
                f"{source.name}: \"balanced\" class weights count the targets of all samples, and "
                "with sharding by file a rank opens its own files only. Give the weights "
                "themselves ({0: 1.0, 1: 5.0}), or share the files by sample.")
        found, counts = np.unique(np.concatenate(list(_targets(source))), return_counts=True)
        balanced = counts.sum() / (len(counts) * counts)
        return WeightedSource(source, dict(zip(found.tolist(), balanced.tolist(), strict=True)))
    if not isinstance(class_weight, Mapping):
        raise DataError(f"class_weight must be a mapping from classes to weights or 'balanced'. "
                        f"Received: {class_weight!r}")
    try:
        # A job file has its keys as strings.
        weights = {int(name): float(weight) for name, weight in class_weight.items()}
    except (TypeError, ValueError) as error:
        raise DataError(f"class_weight must map whole numbers to numbers. Received: "
                        f"{dict(class_weight)}") from error
    return WeightedSource(source, weights)


def _targets(source: Source) -> Iterator[np.ndarray[Any, Any]]:
    """All targets; where samples must be read, without those of weight 0, maybe bad ones."""
    targets = source.targets()
    if targets is not None:
        yield np.asarray(targets).reshape(-1)
        return
    for begin in range(0, len(source), _CHUNK_ROWS):
        _, y, *given = source.read(np.arange(begin, min(begin + _CHUNK_ROWS, len(source))))
        y = np.asarray(y).reshape(-1)
        yield y[np.asarray(given[0]) != 0] if given else y


class WeightedSource(Source):
    """Another source with sample weights by class. Made by `weighted`."""

    signature: Structure = None

    def __init__(self, source: Source, weights: Mapping[int, float]) -> None:
        for name, weight in weights.items():
            if not (np.isfinite(weight) and weight >= 0):
                raise DataError(f"The weight of class {name} must be at least 0 and finite. "
                                f"Received: {weight}")
        self.name = source.name
        self.class_weight = dict(sorted(weights.items()))
        self.targets = source.targets  # type: ignore[method-assign]
        self._source = source
        self.signature = (*source.signature[:2], tf.TensorSpec((), tf.float32))
        self.index_bytes_read = source.index_bytes_read

    def __len__(self) -> int:
        return len(self._source)

    def read(self, rows: np.ndarray[Any, Any]) -> Structure:
        x, y, *given = self._source.read(rows)
        weights = np.fromiter((self.class_weight.get(target, 1.0) for target in
                               np.asarray(y).reshape(-1).tolist()), np.float32, len(y))
        if given:
            weights = weights * np.asarray(given[0], np.float32)
        return x, y, weights

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self._source.bytes_read

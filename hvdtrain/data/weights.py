"""`weighted`: class weights, as the sample weights that Keras makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvdtrain.data.source import DataSplits, Source, Structure, as_source
from hvdtrain.errors import DataError

_CHUNK_ROWS = 4096

own_files_only: ContextVar[bool] = ContextVar("own_files_only", default=False)
"""True while `by_file` opens the files of one rank, which say nothing of those of the others."""


def weighted(source: Source | Any,
             class_weight: Mapping[Any, float] | Literal["balanced"]) -> Source:
    """A source whose samples have weights by their class.

    As `class_weight` of `keras.Model.fit`: a class that is not named has the weight 1. Where the
    source has sample weights, both are multiplied.

    Args:
        source: A source of, or arrays, `(x, y)` or `(x, y, sample_weight)`, y being integers, one
            per sample.
        class_weight: Mapping from classes to weights; or `"balanced"`: samples / (classes *
            samples of the class), so that all classes weigh as much in sum. For that all targets
            are counted once, which reads all samples on every rank where the source does not
            have them at hand (arrays and image folders do). Not within `by_file`.

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
        return WeightedSource(source, _balanced(source))
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


def with_class_weight(splits: DataSplits, class_weight: Any) -> DataSplits:
    """The splits with the training data `weighted`; as they are where `class_weight` is None."""
    if class_weight is None:
        return splits
    return DataSplits(train=weighted(splits.train, class_weight), validation=splits.validation)


class WeightedSource(Source):
    """Another source with sample weights by class. Made by `weighted`."""

    def __init__(self, source: Source, weights: Mapping[int, float]) -> None:
        for name, weight in weights.items():
            if not (np.isfinite(weight) and weight >= 0):
                raise DataError(f"The weight of class {name} must be at least 0 and finite. "
                                f"Received: {weight}")
        self.name = source.name
        self.class_weight = dict(sorted(weights.items()))
        self._source = source
        self._classes = np.asarray(list(self.class_weight), np.int64)
        self._weights = np.asarray(list(self.class_weight.values()), np.float32)

    def __len__(self) -> int:
        return len(self._source)

    @property
    def signature(self) -> Structure:
        """See `Source.signature`."""
        return (*self._source.signature[:2], tf.TensorSpec((), tf.float32))

    def read(self, rows: np.ndarray[Any, Any]) -> Structure:
        """See `Source.read`."""
        x, y, *given = self._source.read(rows)
        weights = self._weights_of(np.asarray(y).reshape(-1))
        if given:
            weights = weights * np.asarray(given[0], np.float32)
        return x, y, weights

    @property
    def bytes_read(self) -> int:
        """See `Source.bytes_read`."""
        return self._source.bytes_read

    @property
    def index_bytes_read(self) -> int:
        """See `Source.index_bytes_read`."""
        return self._source.index_bytes_read

    def targets(self) -> np.ndarray[Any, Any] | None:
        """See `Source.targets`."""
        return self._source.targets()

    def _weights_of(self, targets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if not len(self._classes):
            return np.ones(len(targets), np.float32)
        place = np.searchsorted(self._classes, targets).clip(max=len(self._classes) - 1)
        named = self._classes[place] == targets
        return np.where(named, self._weights[place], np.float32(1))


def _balanced(source: Source) -> dict[int, float]:
    """Weights that make all classes equal.

    Where samples are read, those of weight 0, which may be bad ones, do not count.
    """
    targets = source.targets()
    if targets is not None:
        found, counts = np.unique(np.asarray(targets), return_counts=True)
        return _equal(dict(zip(found.tolist(), counts.tolist(), strict=True)))
    sums: dict[int, int] = {}
    for begin in range(0, len(source), _CHUNK_ROWS):
        _, y, *given = source.read(np.arange(begin, min(begin + _CHUNK_ROWS, len(source))))
        y = np.asarray(y).reshape(-1)
        if given:
            y = y[np.asarray(given[0]) != 0]
        for name, count in zip(*np.unique(y, return_counts=True), strict=True):
            sums[int(name)] = sums.get(int(name), 0) + int(count)
    return _equal(sums)


def _equal(counts: Mapping[int, int]) -> dict[int, float]:
    total = sum(counts.values())
    return {name: total / (len(counts) * count) for name, count in counts.items()}

"""`FileSource`: what all sources over files have in common: counting, and samples that are bad.

A bad sample is one that is damaged, incomplete or not what it should be. With `on_error="raise"`
it ends the reading, and the error names file and place. With `"skip"` it stays where it is, as
zeros with a sample weight of 0: every rank keeps its steps, and the order of all other samples
is as it was.
"""

from __future__ import annotations

import math
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import tensorflow as tf

from hvdtrain.data.files import ByteCount
from hvdtrain.data.source import Source, Structure
from hvdtrain.errors import DataError
from hvdtrain.log import get_logger

OnError: TypeAlias = Literal["raise", "skip"]

NAMED_BAD_SAMPLES = 5
"""So many bad samples are named in warnings; after that only their number, at 10, 100, ..."""


class BadSamplesError(Exception):
    """Some of the samples that were asked for are bad.

    Args:
        messages: For each bad sample, by its position in what was asked for: file, place, reason.
    """

    def __init__(self, messages: Mapping[int, str]) -> None:
        super().__init__("; ".join(messages.values()))
        self.messages = dict(messages)


class FileSource(Source):
    """Samples in files. Subclasses say what is in them (`fields`), and `read_rows`.

    Args:
        name: String for messages.
        on_error: What is done with a bad sample: `"raise"` an error that names it, or `"skip"`:
            yield it as zeros with sample weight 0. Then all samples have a sample weight.
        content_key: Callable that returns a string that is another one if files or settings
            differ; None if that cannot be told.
    """

    def __init__(self, name: str, on_error: OnError,
                 content_key: Callable[[], str] | None) -> None:
        if on_error not in ("raise", "skip"):
            raise DataError(f"{name}: on_error must be 'raise' or 'skip'. Received: {on_error!r}")
        self.name = name
        self.on_error = on_error
        self._content_key = content_key
        self.count = ByteCount()
        self.index_count = ByteCount()
        self._bad: dict[int, str] = {}
        self._lock = threading.Lock()
        if on_error == "skip":
            weakref.finalize(self, _report, name, self._bad)

    @property
    @abstractmethod
    def fields(self) -> Structure:
        """The structure of `tf.TensorSpec` of what `read_rows` returns."""

    @abstractmethod
    def read_rows(self, rows: np.ndarray[Any, Any]) -> Structure:
        """Read some samples. Any thread.

        Args:
            rows: int64 array, not empty; a number may occur twice.

        Raises:
            BadSamplesError: Some of them are bad.
        """

    @property
    def signature(self) -> Structure:
        """See `Source.signature`."""
        if self.on_error == "raise":
            return self.fields
        self.check_fields()
        fields = self.fields
        return (*fields[:2], tf.TensorSpec((), tf.float32))

    def content_key(self) -> str | None:
        """A name for all that this source yields: another one if files or settings differ.

        Returns:
            String, or None if that cannot be told, since a function of the user decides.
        """
        return f"{self._content_key()}-{self.on_error}" if self._content_key else None

    def check_fields(self) -> None:
        """Refuse to skip samples that cannot have a weight; called by subclasses, when made.

        Raises:
            DataError: `on_error` is `"skip"`, and there is no target.
        """
        if self.on_error == "skip" and (
                not isinstance(self.fields, tuple) or len(self.fields) < 2):
            raise DataError(
                f"{self.name}: on_error='skip' gives bad samples the weight 0, and Keras knows "
                "weights only beside targets. Name a target, or use on_error='raise'.")

    @property
    def bytes_read(self) -> int:
        """See `Source.bytes_read`."""
        return self.count.value

    @property
    def index_bytes_read(self) -> int:
        """See `Source.index_bytes_read`."""
        return self.index_count.value

    @property
    def skipped(self) -> int:
        """Different bad samples that this process has met (`on_error="skip"`)."""
        return len(self._bad)

    def read(self, rows: np.ndarray[Any, Any]) -> Structure:
        """See `Source.read`.

        Raises:
            DataError: A sample is bad, and `on_error` is `"raise"`.
        """
        rows = np.asarray(rows, np.int64)
        if self.on_error == "skip":
            return self._read_weighted(rows)
        try:
            return self.read_rows(rows)
        except BadSamplesError as error:
            first, *others = error.messages.values()
            more = f" {len(others)} more samples of this batch are bad." if others else ""
            raise DataError(
                f"{first}{more} Mend or replace the file, or give bad samples the weight 0 with "
                "on_error='skip'.") from error

    def _read_weighted(self, rows: np.ndarray[Any, Any]) -> Structure:
        """The samples with a sample weight: 0 for the bad ones."""
        good = np.fromiter((int(row) not in self._bad for row in rows), bool, len(rows))
        found: Any = None
        while found is None and good.any():
            try:
                found = self.read_rows(rows[good])
            except BadSamplesError as error:
                positions = np.flatnonzero(good)
                for position, message in error.messages.items():
                    self._remember(int(rows[positions[position]]), message)
                    good[positions[position]] = False
        if found is None:
            found = tf.nest.map_structure(_nothing, self.fields)
        x, y = tf.nest.map_structure(lambda array: _spread(array, good), tuple(found[:2]))
        weights = np.zeros(len(rows), np.float32)
        weights[good] = found[2] if len(found) > 2 else 1.0
        return x, y, weights

    def _remember(self, row: int, message: str) -> None:
        with self._lock:
            if row in self._bad:
                return
            self._bad[row] = message
            count = len(self._bad)
        if count <= NAMED_BAD_SAMPLES:
            get_logger().warning("%s It has the sample weight 0.", message)
        elif count == 10 ** round(math.log10(count)):
            get_logger().warning("%s: %d bad samples so far, with the sample weight 0",
                                 self.name, count)


def _report(name: str, bad: Mapping[int, str]) -> None:
    """When the source is no longer used, at the latest when the process ends."""
    if bad:
        get_logger().warning("%s: %d bad sample%s, with the sample weight 0", name, len(bad),
                             "s" if len(bad) > 1 else "")


def _nothing(spec: Any) -> np.ndarray[Any, Any]:
    """An array of no samples; axes of unknown length have one element."""
    return np.zeros((0, *(size or 1 for size in spec.shape)), spec.dtype.as_numpy_dtype)


def _spread(array: np.ndarray[Any, Any], good: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array with zeros (or empty strings) for the samples that are not good."""
    if good.all():
        return array
    empty: Any = b"" if array.dtype == object else 0
    spread = np.full((len(good), *array.shape[1:]), empty, array.dtype)
    spread[good] = array
    return spread

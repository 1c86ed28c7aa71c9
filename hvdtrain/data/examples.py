"""`ExampleParser`: serialized `tf.train.Example`s as arrays, by a table of features."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.file_source import BadSamplesError
from hvdtrain.data.pictures import PictureFormat, decode_picture, first_line
from hvdtrain.data.source import Structure
from hvdtrain.errors import DataError

ENCODINGS = ("list", "raw", "image")
_KEYS = ("shape", "dtype", "encoding", "default")


@dataclass(frozen=True, kw_only=True)
class _Feature:
    """One feature: how it is parsed, and what it becomes."""

    spec: Any
    """`tf.io.FixedLenFeature` or `tf.io.FixedLenSequenceFeature`."""
    shape: tuple[int | None, ...]
    dtype: Any
    encoding: str
    picture: PictureFormat | None


class ExampleParser:
    """Makes arrays of `tf.train.Example`s.

    Args:
        features: Mapping from names to features. A feature is a `tf.io.FixedLenFeature` or
            `tf.io.FixedLenSequenceFeature`, or a mapping with some of the keys `shape` (default
            `[]`), `dtype` (`"float32"`), `encoding` and `default`. Encodings: `"list"`, numbers or
            strings in a list; `"raw"`, the bytes of an array, little-endian; `"image"`, a JPEG,
            PNG, GIF or BMP, which is resized to `shape` `(height, width, channels)`.
        target: String or None, the feature that is the target.
        sample_weight: String or None, the feature that is the sample weight.
        threads: Integer, images that are decoded at the same time.

    Raises:
        DataError: A feature cannot be parsed so, or is named but not described.
    """

    def __init__(self, features: Mapping[str, Any], *, target: str | None = None,
                 sample_weight: str | None = None, threads: int = 1) -> None:
        for role in (target, sample_weight):
            if role is not None and role not in features:
                raise DataError(f"The feature {role!r} is not described. Described: "
                                f"{', '.join(features) or 'none'}.")
        if sample_weight is not None and target is None:
            raise DataError("sample_weight needs a target: Keras knows weights only beside one.")
        self._features = {name: _feature(name, given) for name, given in features.items()}
        self._inputs = [name for name in features if name not in (target, sample_weight)]
        self._others = [name for name in (target, sample_weight) if name is not None]
        if threads < 1:
            raise DataError(f"threads must be at least 1. Received: threads={threads}")
        self._pool = ThreadPoolExecutor(threads)
        if not self._inputs:
            raise DataError("No feature is an input. Describe at least one beside target and "
                            "sample_weight.")

    @property
    def signature(self) -> Structure:
        """The structure of `tf.TensorSpec` of what a call returns, without the batch axis."""
        return self._arrange({name: tf.TensorSpec(feature.shape, feature.dtype)
                              for name, feature in self._features.items()})

    def __call__(self, records: Sequence[bytes]) -> Structure:
        """Parse some examples.

        Raises:
            BadSamplesError: Some cannot be parsed; by their position, what is wrong.
        """
        try:
            return self._arrange(self._parse(records))
        except (tf.errors.OpError, ValueError) as error:
            problems = {}
            for position, record in enumerate(records):
                try:
                    self._parse([record])
                except (tf.errors.OpError, ValueError) as own:
                    problems[position] = first_line(own)
            if not problems:
                raise DataError(f"The examples cannot be parsed together: {first_line(error)}. A "
                                "feature of variable length must have the same length in all, or "
                                "be a tf.io.FixedLenSequenceFeature.") from error
            raise BadSamplesError(problems) from error

    def _parse(self, records: Sequence[bytes]) -> dict[str, np.ndarray[Any, Any]]:
        with tf.device("CPU:0"):
            parsed = tf.io.parse_example(
                tf.constant(list(records), tf.string),
                {name: feature.spec for name, feature in self._features.items()})
            return {name: self._decode(name, parsed[name], feature)
                    for name, feature in self._features.items()}

    def _decode(self, name: str, value: Any, feature: _Feature) -> np.ndarray[Any, Any]:
        if feature.picture is not None:
            decode = functools.partial(_picture, name, feature.picture)
            return np.stack(list(self._pool.map(decode, value.numpy().tolist())))
        if feature.encoding == "raw":
            flat = tf.io.decode_raw(value, feature.dtype)
            expected = tf.TensorShape(feature.shape).num_elements()
            if flat.shape[1] != expected:
                raise ValueError(
                    f"feature {name!r} has {flat.shape[1]} numbers of type {feature.dtype.name}, "
                    f"and shape {list(feature.shape)} needs {expected}")
            value = tf.reshape(flat, [-1, *feature.shape])
        return tf.cast(value, feature.dtype).numpy()  # type: ignore[no-any-return]

    def _arrange(self, values: Mapping[str, Any]) -> Structure:
        inputs: Any = {name: values[name] for name in self._inputs}
        if len(self._inputs) == 1:
            inputs = inputs[self._inputs[0]]
        others = [values[name] for name in self._others]
        return (inputs, *others) if others else inputs


def _feature(name: str, given: Any) -> _Feature:
    if isinstance(given, tf.io.FixedLenFeature):
        return _Feature(spec=given, shape=tuple(given.shape), dtype=tf.as_dtype(given.dtype),
                        encoding="list", picture=None)
    if isinstance(given, tf.io.FixedLenSequenceFeature):
        return _Feature(spec=given, shape=(None, *given.shape), dtype=tf.as_dtype(given.dtype),
                        encoding="list", picture=None)
    if not isinstance(given, Mapping) or set(given) - set(_KEYS):
        raise DataError(
            f"The feature {name!r} is described by {given!r}. Expected a tf.io.FixedLenFeature, a "
            f"tf.io.FixedLenSequenceFeature, or a mapping with some of {', '.join(_KEYS)}.")
    encoding = given.get("encoding", "list")
    if encoding not in ENCODINGS:
        raise DataError(f"The feature {name!r}: unknown encoding {encoding!r}. Expected one of: "
                        f"{', '.join(ENCODINGS)}.")
    shape = tuple(int(size) for size in given.get("shape", ()))
    dtype = _dtype(name, "float32" if encoding == "image" else given.get("dtype", "float32"))
    if encoding == "image" and len(shape) != 3:
        raise DataError(f"The feature {name!r}: an image needs shape = [height, width, channels]. "
                        f"Received: {list(shape)}")
    if encoding != "list":
        if "default" in given:
            raise DataError(f"The feature {name!r}: default does not go with encoding "
                            f"{encoding!r}.")
        picture = PictureFormat(height=shape[0], width=shape[1], channels=shape[2]) \
            if encoding == "image" else None
        return _Feature(spec=tf.io.FixedLenFeature([], tf.string), shape=shape, dtype=dtype,
                        encoding=encoding, picture=picture)
    spec = tf.io.FixedLenFeature(shape, _stored_dtype(dtype), given.get("default"))
    return _Feature(spec=spec, shape=shape, dtype=dtype, encoding=encoding, picture=None)


def _dtype(name: str, given: Any) -> Any:
    try:
        return tf.as_dtype(given)
    except TypeError as error:
        raise DataError(f"The feature {name!r}: unknown dtype {given!r}. Expected a name as "
                        "'float32', 'int64', 'uint8' or 'string'.") from error


def _stored_dtype(dtype: Any) -> Any:
    """The type in which an example holds numbers of this type."""
    if dtype == tf.string:
        return tf.string
    return tf.float32 if dtype.is_floating else tf.int64


def _picture(name: str, picture: PictureFormat, content: bytes) -> np.ndarray[Any, Any]:
    try:
        return decode_picture(content, picture)
    except ValueError as error:
        raise ValueError(f"feature {name!r} cannot be decoded as an image: {error}") from error

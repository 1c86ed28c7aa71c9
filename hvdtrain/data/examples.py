"""`ExampleParser`: serialized `tf.train.Example`s as arrays, by a table of features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.data.files import alone_or_tuple
from hvdtrain.data.images import ImageFormat
from hvdtrain.data.source import Structure
from hvdtrain.errors import DataError

ENCODINGS = ("list", "raw", "image")
_KEYS = ("shape", "dtype", "encoding", "default")


class _Feature(NamedTuple):
    stored: Any
    spec: Any
    decode: Callable[[Any], Any]


class ExampleParser:
    """Parses `tf.train.Example`s to arrays.

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
        self._others = [name for name in (target, sample_weight) if name is not None]
        for role in self._others:
            if role not in features:
                raise DataError(f"The feature {role!r} is not described. Described: "
                                f"{', '.join(features) or 'none'}.")
        if sample_weight is not None and target is None:
            raise DataError("sample_weight needs a target: Keras knows weights only beside one.")
        if threads < 1:
            raise DataError(f"threads must be at least 1. Received: threads={threads}")
        pool = ThreadPoolExecutor(threads)
        self._features = {name: _feature(name, given, pool) for name, given in features.items()}
        self._inputs = [name for name in features if name not in self._others]
        if not self._inputs:
            raise DataError("No feature is an input. Describe at least one beside target and "
                            "sample_weight.")
        self.signature = self._arrange(
            {name: feature.spec for name, feature in self._features.items()})
        """The structure of `tf.TensorSpec` of what a call returns, without the batch axis."""

    def __call__(self, records: Any) -> Structure:
        """Parse a string tensor of examples, eagerly; a ValueError or OpError where one is bad."""
        parsed = tf.io.parse_example(
            records, {name: feature.stored for name, feature in self._features.items()})
        return self._arrange({name: tf.cast(feature.decode(parsed[name]), feature.spec.dtype)
                              for name, feature in self._features.items()})

    def _arrange(self, values: Mapping[str, Any]) -> Structure:
        inputs: Any = {name: values[name] for name in self._inputs}
        if len(self._inputs) == 1:
            inputs = inputs[self._inputs[0]]
        return alone_or_tuple([inputs, *(values[name] for name in self._others)])


def _feature(name: str, given: Any, pool: ThreadPoolExecutor) -> _Feature:
    if isinstance(given, (tf.io.FixedLenFeature, tf.io.FixedLenSequenceFeature)):
        any_length = (None,) if isinstance(given, tf.io.FixedLenSequenceFeature) else ()
        return _Feature(given, tf.TensorSpec((*any_length, *given.shape), given.dtype), tf.identity)
    if not isinstance(given, Mapping) or set(given) - set(_KEYS):
        raise DataError(
            f"The feature {name!r} is described by {given!r}. Expected a tf.io.FixedLenFeature, a "
            f"tf.io.FixedLenSequenceFeature, or a mapping with some of {', '.join(_KEYS)}.")
    encoding = given.get("encoding", "list")
    if encoding not in ENCODINGS:
        raise DataError(f"The feature {name!r}: unknown encoding {encoding!r}. Expected one of: "
                        f"{', '.join(ENCODINGS)}.")
    dtype_name = "float32" if encoding == "image" else given.get("dtype", "float32")
    try:
        dtype = tf.as_dtype(dtype_name)
    except TypeError as error:
        raise DataError(f"The feature {name!r}: unknown dtype {dtype_name!r}. Expected a name as "
                        "'float32', 'int64', 'uint8' or 'string'.") from error
    spec = tf.TensorSpec([int(size) for size in given.get("shape", ())], dtype)
    if encoding == "list":
        # The types in which an example holds numbers.
        number = tf.float32 if dtype.is_floating else tf.int64
        stored = tf.io.FixedLenFeature(spec.shape, dtype if dtype == tf.string else number,
                                       given.get("default"))
        return _Feature(stored, spec, tf.identity)
    if "default" in given:
        raise DataError(f"The feature {name!r}: default does not go with encoding {encoding!r}.")
    decode = partial(_decode_raw, name, spec)
    if encoding == "image":
        if spec.shape.rank != 3:
            raise DataError(f"The feature {name!r}: an image needs shape = [height, width, "
                            f"channels]. Received: {spec.shape.as_list()}")
        decode = partial(_decode_images, name, ImageFormat(*spec.shape.as_list()), pool)
    return _Feature(tf.io.FixedLenFeature([], tf.string), spec, decode)


def _decode_raw(name: str, spec: Any, value: Any) -> Any:
    flat, expected = tf.io.decode_raw(value, spec.dtype), spec.shape.num_elements()
    if flat.shape[1] != expected:
        raise ValueError(
            f"feature {name!r} has {flat.shape[1]} numbers of type {spec.dtype.name}, and "
            f"shape {spec.shape.as_list()} needs {expected}")
    return tf.reshape(flat, [-1, *spec.shape])


def _decode_images(name: str, image: ImageFormat, pool: ThreadPoolExecutor, value: Any) -> Any:
    try:
        return np.stack(list(pool.map(image.decode, value.numpy().tolist())))
    except ValueError as error:
        raise ValueError(f"feature {name!r} cannot be decoded as an image: {error}") from error

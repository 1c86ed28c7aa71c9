"""`unpacked`: any source as memory-mapped arrays, made once per host."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.file_source import FileSource
from hvdtrain.data.files import cache_folder
from hvdtrain.data.once import once_per_host
from hvdtrain.data.source import ArraySource, Source
from hvdtrain.errors import DataError
from hvdtrain.log import get_logger

_CHUNK_BYTES = 64 << 20


def unpacked(source: Source, *, key: str | None = None,
             cache: str | Path | None = None) -> ArraySource:
    """The samples of a source as arrays in files, which one process of each host writes once.

    For formats in which a single sample is expensive to reach or to decode (Parquet, CSV, images)
    and data that is small enough for a disk of each host: it takes the size of the arrays. From
    then on each rank reads only the rows it trains on.

    Args:
        source: Samples of known shapes and numbers, read once from beginning to end.
        key: String, another one for other samples. None: a name of the source's files, their
            sizes and times, and its settings, which only sources over files have.
        cache: Folder for the arrays; see `hvdtrain.data.files.cache_folder`.

    Raises:
        DataError: There is no key, shapes are not known, the arrays cannot be written, or what
            the source raises.
    """
    if key is None:
        key = source.content_key() if isinstance(source, FileSource) else None
        if key is None:
            raise DataError(f"{source.name}: nothing tells whether samples have changed since they "
                            "were unpacked. Give a key=... that is another one for other samples.")
    else:
        key = hashlib.sha256(key.encode()).hexdigest()[:24]
    specs = tf.nest.flatten(source.signature)
    for spec in specs:
        if not spec.shape.is_fully_defined() or spec.dtype == tf.string:
            raise DataError(f"{source.name}: {spec.dtype.name} of shape {spec.shape.as_list()} "
                            "cannot be unpacked; expected numbers of a known shape.")
    folder = once_per_host(cache_folder(cache) / f"arrays-{key}",
                           lambda path: _write(source, specs, path))
    arrays = [np.lib.format.open_memmap(folder / f"{number}.npy", mode="r")
              for number in range(len(specs))]
    return ArraySource(tf.nest.pack_sequence_as(source.signature, arrays), name=source.name)


def _write(source: Source, specs: list[Any], folder: Path) -> None:
    folder.mkdir()
    sizes = [spec.dtype.size * int(np.prod(spec.shape.as_list())) for spec in specs]
    get_logger().info("unpacking %s: %d samples, %.1f MB", source.name, len(source),
                      len(source) * sum(sizes) / 1e6)
    arrays = [np.lib.format.open_memmap(
        folder / f"{number}.npy", mode="w+", dtype=spec.dtype.as_numpy_dtype,
        shape=(len(source), *spec.shape.as_list())) for number, spec in enumerate(specs)]
    step = max(1, _CHUNK_BYTES // max(1, sum(sizes)))
    for begin in range(0, len(source), step):
        rows = np.arange(begin, min(begin + step, len(source)))
        for array, values in zip(arrays, tf.nest.flatten(source.read(rows)), strict=True):
            array[begin:begin + len(rows)] = values
    for array in arrays:
        array.flush()

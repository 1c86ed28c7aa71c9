"""Arrays as a source: from `.npy` and `.npz` files, a dataset or another source."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.build_once import cache_folder, once_per_host
from hvdtrain.data.files import Array, FileSource, alone_or_tuple
from hvdtrain.data.source import ArraySource, Source
from hvdtrain.errors import DataError
from hvdtrain.log import get_logger

MAX_BYTES = 1 << 30
_CHUNK_BYTES = 64 << 20


def load_npy(x: str | Path, y: str | Path | None = None,
             sample_weight: str | Path | None = None) -> ArraySource:
    """Open `.npy` files as a source; each rank reads only the rows it trains on.

    Args:
        x: Path of the inputs.
        y: Path of the targets, or None.
        sample_weight: Path of the sample weights, or None; only with `y`.

    Raises:
        DataError: A file is missing, unreadable or empty, or they differ in length.
    """
    if sample_weight is not None and y is None:
        raise DataError("sample_weight needs y: Keras knows weights only beside targets.")
    files = [Path(path) for path in (x, y, sample_weight) if path is not None]
    arrays = []
    for file in files:
        if not file.is_file():
            raise DataError(f"The data file {file} does not exist. Expected a .npy file. A "
                            f"relative path is taken from the folder {Path.cwd()}.")
        try:
            arrays.append(np.lib.format.open_memmap(file, mode="r"))
        except (ValueError, OSError, EOFError) as error:
            # An array of no elements cannot be mapped either.
            raise DataError(f"{file} cannot be read as a .npy file with at least one sample "
                            f"({error}). Write it with numpy.save(file, array).") from error
    return ArraySource(alone_or_tuple(arrays), name=str(x))


def load_npz(path: str | Path, *, x: str = "x", y: str | None = "y",
             sample_weight: str | None = None) -> ArraySource:
    """Open an `.npz` file as a source.

    Members that are not compressed (`np.savez`) are memory-mapped, so that each rank reads
    only the rows it trains on; compressed ones are loaded whole.

    Args:
        path: Path of the file.
        x: String, the name of the inputs' array.
        y: String or None, the name of the targets' array.
        sample_weight: String or None, the name of the weights' array.

    Raises:
        DataError: The file is missing, unreadable, empty or lacks an array.
    """
    file, names = Path(path), [name for name in (x, y, sample_weight) if name is not None]
    if not file.is_file():
        raise DataError(f"The data file {file} does not exist. Expected an .npz file with the "
                        f"arrays {', '.join(names)}.")
    try:
        with zipfile.ZipFile(file) as archive:
            there = [name.removesuffix(".npy") for name in archive.namelist()]
            for name in names:
                if name not in there:
                    raise DataError(f"{file} has no array {name!r}; it has {', '.join(there)}. "
                                    "Name the arrays with x = ... and y = ...")
            arrays = [_member(archive, file, f"{name}.npy") for name in names]
    except DataError:
        raise
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        raise DataError(f"{file} cannot be read as an .npz file ({error}). "
                        "Write it with numpy.savez(file, x=..., y=...).") from error
    return ArraySource(alone_or_tuple(arrays), name=str(file))


def _member(archive: zipfile.ZipFile, file: Path, member: str) -> Array:
    info = archive.getinfo(member)
    if info.compress_type != zipfile.ZIP_STORED:
        with archive.open(member) as stream:
            return np.lib.format.read_array(stream, allow_pickle=False)
    with file.open("rb") as stream:
        # Local header: 30 bytes, then name and extra field, whose lengths stand at 26 and 28.
        stream.seek(info.header_offset + 26)
        skip = int.from_bytes(stream.read(2), "little") + int.from_bytes(stream.read(2), "little")
        stream.seek(info.header_offset + 30 + skip)
        version = np.lib.format.read_magic(stream)
        read_header = (np.lib.format.read_array_header_1_0 if version == (1, 0)
                       else np.lib.format.read_array_header_2_0)
        shape, fortran, dtype = read_header(stream)
        if dtype.hasobject:
            raise ValueError(f"{member} holds Python objects")
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(file, dtype=dtype, mode="r", offset=stream.tell(), shape=shape,
                         order="F" if fortran else "C")


def load_dataset(dataset: Iterable[Any] | Callable[[], Iterable[Any]], *, batched: bool = False,
                 max_bytes: int = MAX_BYTES, name: str = "dataset") -> ArraySource:
    """Read a dataset of fixed order and unknown length into arrays. Every rank reads it whole.

    Data that can only be read from its beginning cannot be divided over ranks; in memory it can.
    All ranks must read the same samples in the same order: do not shuffle in `dataset`.

    Args:
        dataset: A `tf.data.Dataset`, a generator, another iterable, or a function that returns one.
            It yields samples: `x`, `(x, y)` or `(x, y, sample_weight)`, each an array or a
            structure of arrays.
        batched: Boolean, it yields batches of samples.
        max_bytes: Integer, limit of all samples; twice that is used for a moment.
        name: String for messages.

    Raises:
        DataError: It is larger, infinite or empty, or its samples differ in structure or shape.
    """
    first: Any = None
    columns: list[list[Array]] = []
    size = count = 0
    for element in _elements(dataset, name):
        element = tuple(element) if isinstance(element, list) else element
        if first is None:
            first, columns = element, [[] for _ in tf.nest.flatten(element)]
        try:
            tf.nest.assert_same_structure(first, element)
        except (ValueError, TypeError) as error:
            raise DataError(f"{name}: element {count} has another structure than the first: "
                            f"{str(error).splitlines()[0]}") from error
        for column, value in zip(columns, tf.nest.flatten(element), strict=True):
            column.append(np.asarray(value))
            size += column[-1].nbytes
        count += 1
        if size > max_bytes:
            raise DataError(
                f"{name}: {count} elements take {size} bytes, more than max_bytes={max_bytes}, and "
                "there are more. Give more, if every rank has that memory; else write the data to "
                "files once (numpy.save, TFRecord), and open those with load_npy or "
                "load_tfrecord.")
    if not count:
        raise DataError(f"{name}: the data set is empty; at least one sample is needed. A "
                        "generator can be read only once.")
    try:
        arrays = [np.concatenate(column) if batched else np.stack(column) for column in columns]
    except ValueError as error:
        raise DataError(f"{name}: samples cannot be put into one array: {error}. All must have "
                        "the same shape; pad them. Say batched=True if it yields batches.",
                        ) from error
    return ArraySource(tf.nest.pack_sequence_as(first, arrays), name=name)


def _elements(dataset: Any, name: str) -> Iterator[Any]:
    if callable(dataset) and not isinstance(dataset, tf.data.Dataset):
        dataset = dataset()
    if isinstance(dataset, tf.data.Dataset):
        if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise DataError(f"{name}: the data set has no end. Take some of it: "
                            "dataset.take(number).")
        for spec in tf.nest.flatten(dataset.element_spec):
            if not isinstance(spec, tf.TensorSpec):
                raise DataError(f"{name}: elements hold a {type(spec).__name__}; expected dense "
                                "tensors. Use to_dense or to_tensor in a map.")
        dataset = dataset.as_numpy_iterator()
    if isinstance(dataset, (str, bytes)) or not isinstance(dataset, Iterable):
        raise DataError(f"{name}: expected a tf.data.Dataset, a generator or a function that "
                        f"returns one. Received: {type(dataset).__name__}")
    return iter(dataset)


def unpacked(source: Source, *, key: str | None = None,
             cache: str | Path | None = None) -> ArraySource:
    """The samples of a source as arrays in files, which one process of each host writes once.

    For formats in which reading or decoding a single sample is expensive (Parquet, images) and data
    that fits on a disk of each host: it takes the size of the arrays. From then on each rank reads
    only the rows it trains on.

    Args:
        source: A `Source` of known shapes, read once from beginning to end.
        key: String, different for different samples. None: derived from the source's files, their
            sizes and times, and its settings, which only sources over files have.
        cache: Folder for the arrays; see `hvdtrain.data.build_once.cache_folder`.

    Raises:
        DataError: There is no key, shapes are not known, the arrays cannot be written, or what the
            source raises.
    """
    if key is not None:
        key = hashlib.sha256(key.encode()).hexdigest()[:24]
    elif isinstance(source, FileSource):
        key = source.content_key()
    if key is None:
        raise DataError(f"{source.name}: nothing tells whether samples have changed since they "
                        "were unpacked. Give a key=... that is another one for other samples.")
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
    size = sum(spec.dtype.size * spec.shape.num_elements() for spec in specs)
    get_logger().info("unpacking %s: %d samples, %.1f MB", source.name, len(source),
                      len(source) * size / 1e6)
    arrays = [np.lib.format.open_memmap(
        folder / f"{number}.npy", mode="w+", dtype=spec.dtype.as_numpy_dtype,
        shape=(len(source), *spec.shape.as_list())) for number, spec in enumerate(specs)]
    step = max(1, _CHUNK_BYTES // max(1, size))
    for begin in range(0, len(source), step):
        rows = np.arange(begin, min(begin + step, len(source)))
        for array, values in zip(arrays, tf.nest.flatten(source.read(rows)), strict=True):
            array[begin:begin + len(rows)] = values
    for array in arrays:
        array.flush()

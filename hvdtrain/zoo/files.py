"""Data sets in files, for job files: the functions of `hvdtrain.data` with a validation set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.data.csv_files import load_csv
from hvdtrain.data.file_shares import by_file
from hvdtrain.data.images import load_images
from hvdtrain.data.npy import load_npy
from hvdtrain.data.parquet import load_parquet
from hvdtrain.data.source import DataSplits, Source
from hvdtrain.data.tfrecord import load_tfrecord
from hvdtrain.data.unpack import unpacked
from hvdtrain.data.weights import with_class_weight
from hvdtrain.errors import DataError


def npy(x: str, y: str | None = None, sample_weight: str | None = None,
        validation_x: str | None = None, validation_y: str | None = None,
        class_weight: Any = None) -> DataSplits:
    """Arrays in `.npy` files, memory-mapped.

    Args:
        x: String, the file of the inputs.
        y: String or None, the file of the targets.
        sample_weight: String or None, the file of the sample weights.
        validation_x: String or None, the inputs for validation.
        validation_y: String or None, the targets for validation.
        class_weight: As for `hvdtrain.weighted`, for the training data; or None.
    """
    validation = load_npy(validation_x, validation_y) if validation_x else None
    return with_class_weight(
        DataSplits(train=load_npy(x, y, sample_weight), validation=validation), class_weight)


def tfrecord(path: str | list[str], features: dict[str, Any], target: str | None = None,
             sample_weight: str | None = None, compression: Any = "auto", on_error: Any = "raise",
             unpack: bool = False, shard: Any = "sample", validation: str | list[str] | None = None,
             class_weight: Any = None) -> DataSplits:
    """TFRecord files; the arguments are those of `hvdtrain.load_tfrecord`.

    Args:
        path: String, a file or pattern, or a list of them.
        features: Mapping from names to mappings with `shape`, `dtype`, `encoding`, `default`.
        target: String or None, the feature that is the target.
        sample_weight: String or None, the feature that is the sample weight.
        compression: `"auto"`, `"none"`, `"gzip"` or `"zlib"`.
        on_error: `"raise"` or `"skip"`.
        unpack: Boolean; read from arrays that each host makes once, see `hvdtrain.unpacked`.
        shard: `"sample"` or `"file"`: each rank opens its own training files only, see
            `hvdtrain.by_file`.
        validation: As `path`, for validation; or None.
        class_weight: As for `hvdtrain.weighted`, for the training data; or None.
    """
    def load(files: Any) -> Source:
        return load_tfrecord(files, features, target=target, sample_weight=sample_weight,
                             compression=compression, on_error=on_error)
    return _from_files(load, path, validation, class_weight, unpack=unpack, shard=shard)


def images(path: str, size: Sequence[int] = (256, 256), channels: int = 3,
           label_mode: Any = "int", interpolation: str = "bilinear",
           crop_to_aspect_ratio: bool = False, on_error: Any = "raise", threads: int = 4,
           unpack: bool = False, validation: str | None = None,
           class_weight: Any = None) -> DataSplits:
    """A folder with one folder of images per class; as `hvdtrain.load_images`.

    Args:
        path: String, the folder.
        size: Height and width to which images are resized.
        channels: Integer: 1, 3 or 4.
        label_mode: `"int"` or `"categorical"`.
        interpolation: String, a method of `tf.image.resize`.
        crop_to_aspect_ratio: Boolean; cut images instead of distorting them.
        on_error: `"raise"` or `"skip"`.
        threads: Integer, images that are decoded at the same time.
        unpack: Boolean; read from arrays that each host makes once, see `hvdtrain.unpacked`.
        validation: String or None, a folder with the same classes.
        class_weight: As for `hvdtrain.weighted`, for the training data; or None.
    """
    names: list[str] = []

    def load(folder: Any) -> Source:
        source = load_images(folder, size, channels=channels, label_mode=label_mode,
                             class_names=names or None, interpolation=interpolation,
                             crop_to_aspect_ratio=crop_to_aspect_ratio, on_error=on_error,
                             threads=threads)
        names[:] = source.class_names
        return source
    return _from_files(load, path, validation, class_weight, unpack=unpack)


def csv(path: str | list[str], target: str | None = None, sample_weight: str | None = None,
        columns: list[str] | None = None, target_dtype: str = "float32",
        classes: list[str] | None = None, missing: float | None = None, delimiter: str = ",",
        quote: str = '"', header: bool = True, on_error: Any = "raise", unpack: bool = False,
        shard: Any = "sample", validation: str | list[str] | None = None,
        class_weight: Any = None) -> DataSplits:
    """CSV files of numbers; the arguments are those of `hvdtrain.load_csv`.

    Args:
        path: String, a file or pattern, or a list of them.
        target: String or None, the column that is the target.
        sample_weight: String or None, the column that is the sample weight.
        columns: The columns that are the input; None for all others.
        target_dtype: String, the type of the target.
        classes: Words that stand for classes in the target's column.
        missing: Number for empty fields, or None.
        delimiter: String, the character between fields.
        quote: String, the character around fields.
        header: Boolean; the first row has the columns' names.
        on_error: `"raise"` or `"skip"`.
        unpack: Boolean; read from arrays that each host makes once, see `hvdtrain.unpacked`.
        shard: `"sample"` or `"file"`: each rank opens its own training files only, see
            `hvdtrain.by_file`.
        validation: As `path`, for validation; or None.
        class_weight: As for `hvdtrain.weighted`, for the training data; or None.
    """
    def load(files: Any) -> Source:
        return load_csv(files, target=target, sample_weight=sample_weight, columns=columns,
                        target_dtype=target_dtype, classes=classes, missing=missing,
                        delimiter=delimiter, quote=quote, header=header, on_error=on_error)
    return _from_files(load, path, validation, class_weight, unpack=unpack, shard=shard)


def parquet(path: str | list[str], target: str | None = None, sample_weight: str | None = None,
            columns: list[str] | None = None, shape: list[int] | None = None,
            dtype: str = "float32", target_dtype: str | None = None, on_error: Any = "raise",
            unpack: bool = False, shard: Any = "sample", validation: str | list[str] | None = None,
            class_weight: Any = None) -> DataSplits:
    """Parquet files; the arguments are those of `hvdtrain.load_parquet`.

    Args:
        path: String, a file or pattern, or a list of them.
        target: String or None, the column that is the target.
        sample_weight: String or None, the column that is the sample weight.
        columns: The columns that are the input; None for all others.
        shape: Shape of a sample's input, or None.
        dtype: String, the type of the input.
        target_dtype: String, the type of the target; None for that of the column.
        on_error: `"raise"` or `"skip"`.
        unpack: Boolean; read from arrays that each host makes once, see `hvdtrain.unpacked`.
        shard: `"sample"` or `"file"`: each rank opens its own training files only, see
            `hvdtrain.by_file`.
        validation: As `path`, for validation; or None.
        class_weight: As for `hvdtrain.weighted`, for the training data; or None.
    """
    def load(files: Any) -> Source:
        return load_parquet(files, target=target, sample_weight=sample_weight, columns=columns,
                            shape=shape, dtype=dtype, target_dtype=target_dtype,
                            on_error=on_error)
    return _from_files(load, path, validation, class_weight, unpack=unpack, shard=shard)


def _from_files(load: Callable[[Any], Source], path: Any, validation: Any, class_weight: Any, *,
                unpack: bool, shard: Any = "sample") -> DataSplits:
    def opened(files: Any) -> Source:
        source = load(files)
        return unpacked(source) if unpack else source

    def opened_for_training(files: Any) -> Source:
        return with_class_weight(DataSplits(train=opened(files)), class_weight).train
    if shard not in ("sample", "file"):
        raise DataError(f"shard must be 'sample' or 'file'. Received: {shard!r}")
    return DataSplits(
        train=(by_file(path, opened_for_training) if shard == "file"
               else opened_for_training(path)),
        validation=opened(validation) if validation else None)

"""`load_images`: a folder of images with one folder per class, as a source."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvdtrain.data.file_source import BadSamplesError, FileSource, OnError
from hvdtrain.data.files import fingerprint
from hvdtrain.data.pictures import PictureFormat, decode_picture
from hvdtrain.data.source import Structure
from hvdtrain.errors import DataError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
"""Names of files that are images; all others are passed over, as Keras does."""


def load_images(folder: str | Path, size: tuple[int, int] | Sequence[int] = (256, 256), *,
                channels: int = 3, label_mode: Literal["int", "categorical"] = "int",
                class_names: Sequence[str] | None = None, interpolation: str = "bilinear",
                crop_to_aspect_ratio: bool = False, on_error: OnError = "raise",
                threads: int = 4) -> ImageSource:
    """Open a folder with one folder of images per class.

    Classes, labels and pixels are those of
    `keras.utils.image_dataset_from_directory(folder, shuffle=False)`.

    Args:
        folder: Path; the names of the folders in it are the classes, in alphabetical order.
            Images may lie deeper in them. Names that begin with a dot are passed over.
        size: Height and width to which images are resized.
        channels: Integer: 1 (gray), 3 (RGB) or 4 (RGBA).
        label_mode: `"int"`: int32 targets `()`; `"categorical"`: float32 one-hot targets.
        class_names: The classes in another order, or some of them; None for all.
        interpolation: String, a method of `tf.image.resize`.
        crop_to_aspect_ratio: Boolean; cut the images, from the center, to the shape of `size`
            instead of distorting them.
        on_error: `"raise"`, or `"skip"`: images that cannot be decoded have sample weight 0.
        threads: Integer, images that are decoded at the same time.

    Raises:
        DataError: There is no such folder, or no class or image in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"The image folder {root} does not exist. Expected a folder with one "
                        "folder per class.")
    if len(size) != 2:
        raise DataError(f"size must be (height, width). Received: {tuple(size)}")
    if label_mode not in ("int", "categorical"):
        raise DataError(f"label_mode must be 'int' or 'categorical'. Received: {label_mode!r}")
    if threads < 1:
        raise DataError(f"threads must be at least 1. Received: threads={threads}")
    format_ = PictureFormat(height=int(size[0]), width=int(size[1]), channels=channels,
                            interpolation=interpolation, crop_to_aspect_ratio=crop_to_aspect_ratio)
    names = _classes(root, class_names)
    files = [_images(root / name) for name in names]
    if not any(files):
        raise DataError(f"{root} has no image in its {len(names)} folders. Expected files that end "
                        f"in {', '.join(SUFFIXES)}.")
    labels = np.repeat(np.arange(len(names), dtype=np.int32), [len(found) for found in files])
    return ImageSource(root, [file for found in files for file in found], labels, names, format_,
                       one_hot=label_mode == "categorical", on_error=on_error, threads=threads)


class ImageSource(FileSource):
    """Images and their classes. Made by `load_images`."""

    def __init__(self, root: Path, files: Sequence[str], labels: np.ndarray[Any, Any],
                 class_names: Sequence[str], format_: PictureFormat, *, one_hot: bool,
                 on_error: OnError, threads: int) -> None:
        settings = (tuple(class_names), format_, one_hot)
        super().__init__(str(root), on_error, lambda: fingerprint(
            [Path(file) for file in files], "images", *settings))
        self.class_names = tuple(class_names)
        self.file_paths = tuple(files)
        self._labels = labels
        self._format = format_
        self._one_hot = one_hot
        self._pool = ThreadPoolExecutor(threads)

    def __len__(self) -> int:
        return len(self.file_paths)

    @property
    def fields(self) -> Structure:
        """See `FileSource.fields`."""
        target = tf.TensorSpec((len(self.class_names),), tf.float32) if self._one_hot else \
            tf.TensorSpec((), tf.int32)
        return tf.TensorSpec(self._format.shape, tf.float32), target

    def targets(self) -> np.ndarray[Any, Any] | None:
        """See `Source.targets`."""
        return None if self._one_hot else self._labels

    def read_rows(self, rows: np.ndarray[Any, Any]) -> Structure:
        """See `FileSource.read_rows`."""
        found = list(self._pool.map(self._read_one, rows.tolist()))
        problems = {position: image for position, image in enumerate(found)
                    if isinstance(image, str)}
        if problems:
            raise BadSamplesError(problems)
        labels = self._labels[rows]
        if self._one_hot:
            labels = np.eye(len(self.class_names), dtype=np.float32)[labels]
        return np.stack(found), labels

    def _read_one(self, row: int) -> np.ndarray[Any, Any] | str:
        """An image, or what is wrong with it."""
        path = self.file_paths[row]
        try:
            with open(path, "rb") as stream:
                content = stream.read()
            self.count.add(len(content))
            return decode_picture(content, self._format)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}."
        except ValueError as error:
            return f"{path} cannot be decoded as an image: {error}."


def _classes(root: Path, given: Sequence[str] | None) -> list[str]:
    there = sorted(entry.name for entry in os.scandir(root)
                   if entry.is_dir() and not entry.name.startswith("."))
    if not there:
        raise DataError(f"{root} has no folder in it. Expected one folder of images per class.")
    if given is None:
        return there
    missing = [name for name in given if name not in there]
    if missing:
        raise DataError(f"{root} has no folder {missing[0]!r}. It has: {', '.join(there)}.")
    return list(given)


def _images(folder: Path) -> list[str]:
    """The images in a folder and those below it, in the order of Keras."""
    return [os.path.join(parent, name)
            for parent, _, names in sorted(os.walk(folder), key=lambda entry: entry[0])
            for name in sorted(names) if name.lower().endswith(SUFFIXES)]

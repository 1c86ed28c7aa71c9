"""`load_images`: a folder of images with one folder per class, as a source; and their decoding."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tensorflow as tf

from hvdtrain.data.build_once import fingerprint
from hvdtrain.data.files import Array, BadSamplesError, FileSource, OnError
from hvdtrain.data.source import Structure
from hvdtrain.errors import DataError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
"""Suffixes of images; other files are skipped, as Keras does."""
RESIZE_METHODS = ("bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5", "gaussian",
                  "mitchellcubic")
_LINE_CHARACTERS = 200


def load_images(folder: str | Path, size: tuple[int, int] | Sequence[int] = (256, 256), *,
                channels: int = 3, label_mode: Literal["int", "categorical"] = "int",
                class_names: Sequence[str] | None = None, interpolation: str = "bilinear",
                crop_to_aspect_ratio: bool = False, on_error: OnError = "raise",
                threads: int = 4) -> ImageSource:
    """Open a folder with one folder of images per class.

    Classes, labels and pixels are those of
    `keras.utils.image_dataset_from_directory(folder, shuffle=False)`.

    Args:
        folder: Path; the names of the folders in it are the classes, in alphabetical order. Images
            may be in subfolders of them. Names that begin with a dot are skipped.
        size: Height and width to which images are resized.
        channels: Integer: 1 (gray), 3 (RGB) or 4 (RGBA).
        label_mode: `"int"`: int32 targets `()`; `"categorical"`: float32 one-hot targets.
        class_names: The classes in another order, or some of them; None for all.
        interpolation: String, a method of `tf.image.resize`.
        crop_to_aspect_ratio: Boolean, cut images from the center instead of distorting them.
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
    format_ = ImageFormat(height=int(size[0]), width=int(size[1]), channels=channels,
                          interpolation=interpolation, crop_to_aspect_ratio=crop_to_aspect_ratio)
    names = _classes(root, class_names)
    files = [_images(root / name) for name in names]
    if not any(files):
        raise DataError(f"{root} has no image in its {len(names)} folders. Expected files that end "
                        f"in {', '.join(SUFFIXES)}.")
    labels = np.repeat(np.arange(len(names), dtype=np.int32), [len(found) for found in files])
    return ImageSource(root, [file for found in files for file in found], labels, names, format_,
                       one_hot=label_mode == "categorical", on_error=on_error, threads=threads)


@dataclass(frozen=True)
class ImageFormat:
    """What images become: float32 `(height, width, channels)`, values from 0 to 255."""

    height: int
    width: int
    channels: int = 3
    interpolation: str = "bilinear"
    crop_to_aspect_ratio: bool = False

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 1:
            raise DataError(f"The size of images must be at least 1 x 1. Received: "
                            f"{self.height} x {self.width}")
        if self.channels not in (1, 3, 4):
            raise DataError(f"Images have 1, 3 or 4 channels. Received: {self.channels}")
        if self.interpolation not in RESIZE_METHODS:
            raise DataError(f"Unknown interpolation {self.interpolation!r}. Expected one of: "
                            f"{', '.join(RESIZE_METHODS)}.")

    def decode(self, content: bytes) -> Array:
        """Decode and resize an image, the first of a GIF; ValueError where it cannot be decoded."""
        if not content:
            raise ValueError("it is empty")
        size = (self.height, self.width)
        with tf.device("CPU:0"):
            try:
                image = tf.io.decode_image(content, self.channels, expand_animations=False)
            except (tf.errors.OpError, UnicodeDecodeError) as error:
                raise ValueError(first_line(error)) from error
            if self.crop_to_aspect_ratio:  # the largest centered part, cut as Keras does
                height, width = image.shape[:2]
                new_height = min(height, max(1, math.floor(width * size[0] / size[1])))
                new_width = min(width, max(1, math.floor(height * size[1] / size[0])))
                top, left = (height - new_height) // 2, (width - new_width) // 2
                image = image[top:top + new_height, left:left + new_width]
            resized = tf.image.resize(image, size, method=self.interpolation)
            return tf.cast(resized, tf.float32).numpy()  # type: ignore[no-any-return]


def first_line(error: BaseException) -> str:
    """The first line of a TensorFlow error, without names of operations."""
    message = getattr(error, "message", "") or str(error) or type(error).__name__
    if isinstance(error, UnicodeDecodeError):
        # TensorFlow quotes the data in its message, which then is no text for Python.
        message = error.object.decode(errors="replace")
    line = re.sub(r"^\{\{.*?\}\} ?|Name: <unknown>, |\s*\[Op:.*$", "", message.splitlines()[0])
    return line[:_LINE_CHARACTERS].rstrip(".")


class ImageSource(FileSource):
    """Images and their classes. Made by `load_images`."""

    def __init__(self, root: Path, files: Sequence[str], labels: Array,
                 class_names: Sequence[str], format_: ImageFormat, *, one_hot: bool,
                 on_error: OnError, threads: int) -> None:
        super().__init__(str(root), on_error, lambda: fingerprint(
            list(map(Path, files)), "images", tuple(class_names), format_, one_hot))
        self.class_names = tuple(class_names)
        self.file_paths = tuple(files)
        self._labels, self._format, self._one_hot = labels, format_, one_hot
        self._pool = ThreadPoolExecutor(threads)
        target = ((len(class_names),), tf.float32) if one_hot else ((), tf.int32)
        self.fields = (tf.TensorSpec((format_.height, format_.width, format_.channels), tf.float32),
                       tf.TensorSpec(*target))

    def __len__(self) -> int:
        return len(self.file_paths)

    def targets(self) -> Array | None:
        return None if self._one_hot else self._labels

    def read_rows(self, rows: Array) -> Structure:
        found = list(self._pool.map(self._read_one, rows.tolist()))
        problems = {position: image for position, image in enumerate(found)
                    if isinstance(image, str)}
        if problems:
            raise BadSamplesError(problems)
        labels = self._labels[rows]
        if self._one_hot:
            labels = np.eye(len(self.class_names), dtype=np.float32)[labels]
        return np.stack(found), labels

    def _read_one(self, row: int) -> Array | str:
        path = Path(self.file_paths[row])
        try:
            content = path.read_bytes()
            self.count_bytes(len(content))
            return self._format.decode(content)
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}."
        except ValueError as error:
            return f"{path} cannot be decoded as an image: {error}."


def _classes(root: Path, given: Sequence[str] | None) -> list[str]:
    there = sorted(entry.name for entry in os.scandir(root)
                   if entry.is_dir() and not entry.name.startswith("."))
    if not there:
        raise DataError(f"{root} has no folder in it. Expected one folder of images per class.")
    missing = [name for name in given or () if name not in there]
    if missing:
        raise DataError(f"{root} has no folder {missing[0]!r}. It has: {', '.join(there)}.")
    return there if given is None else list(given)


def _images(folder: Path) -> list[str]:
    return [os.path.join(parent, name)
            for parent, _, names in sorted(os.walk(folder), key=lambda entry: entry[0])
            for name in sorted(names) if name.lower().endswith(SUFFIXES)]

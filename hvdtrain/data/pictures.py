"""Encoded pictures (JPEG, PNG, GIF, BMP) as arrays of one size."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.errors import DataError

RESIZE_METHODS = ("bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5", "gaussian",
                  "mitchellcubic")
_LINE_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class PictureFormat:
    """What pictures become: float32 `(height, width, channels)`, values from 0 to 255.

    Raises:
        DataError: A size or method is not possible.
    """

    height: int
    width: int
    channels: int = 3
    """1 (gray), 3 (RGB) or 4 (RGBA)."""
    interpolation: str = "bilinear"
    """A method of `tf.image.resize`."""
    crop_to_aspect_ratio: bool = False
    """Cut what does not fit the shape, from the center, instead of distorting it."""

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 1:
            raise DataError(f"The size of images must be at least 1 x 1. Received: "
                            f"{self.height} x {self.width}")
        if self.channels not in (1, 3, 4):
            raise DataError(f"Images have 1, 3 or 4 channels. Received: {self.channels}")
        if self.interpolation not in RESIZE_METHODS:
            raise DataError(f"Unknown interpolation {self.interpolation!r}. Expected one of: "
                            f"{', '.join(RESIZE_METHODS)}.")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width, channels."""
        return self.height, self.width, self.channels


def decode_picture(content: bytes, format_: PictureFormat) -> np.ndarray[Any, Any]:
    """Decode and resize a picture, on the CPU.

    Args:
        content: The encoded picture; of an animation the first picture is taken.
        format_: What it becomes.

    Returns:
        float32 array of shape `format_.shape`.

    Raises:
        ValueError: It cannot be decoded; the message has one line.
    """
    if not content:
        raise ValueError("it is empty")
    with tf.device("CPU:0"):
        try:
            image = tf.io.decode_image(content, channels=format_.channels, expand_animations=False)
        except (tf.errors.OpError, UnicodeDecodeError) as error:
            raise ValueError(first_line(error)) from error
        size = (format_.height, format_.width)
        if format_.crop_to_aspect_ratio:
            image = _crop(image, size)
        resized = tf.image.resize(image, size, method=format_.interpolation)
        return tf.cast(resized, tf.float32).numpy()  # type: ignore[no-any-return]


def _crop(image: Any, size: tuple[int, int]) -> Any:
    """The largest part of the image's center that has the shape of `size`; as Keras cuts it."""
    height, width = image.shape[:2]
    new_height = min(height, max(1, math.floor(width * size[0] / size[1])))
    new_width = min(width, max(1, math.floor(height * size[1] / size[0])))
    top, left = (height - new_height) // 2, (width - new_width) // 2
    return image[top:top + new_height, left:left + new_width]


def first_line(error: BaseException) -> str:
    """What TensorFlow says in its first line, without names of operations."""
    message = getattr(error, "message", "") or str(error) or type(error).__name__
    if isinstance(error, UnicodeDecodeError):
        # TensorFlow quotes the data in its message, which then is no text for Python.
        message = error.object.decode(errors="replace")
    line = re.sub(r"^\{\{.*?\}\} ?|Name: <unknown>, |\s*\[Op:.*$", "", message.splitlines()[0])
    return line[:_LINE_CHARACTERS].rstrip(".")

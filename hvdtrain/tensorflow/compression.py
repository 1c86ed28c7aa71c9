"""How tensors are sent: as they are, or in float16."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Makes a tensor smaller before it is sent, and as it was afterwards."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what is sent, and what `decompress` needs beside it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor that was received, in the form that was given to `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """See `Compressor.compress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """See `Compressor.decompress`."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors in float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """See `Compressor.compress`."""
        sent = tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor
        return sent, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """See `Compressor.decompress`."""
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


class Compression:
    """The compressors: `Compression.none`, which is the default, and `Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor

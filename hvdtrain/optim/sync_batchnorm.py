"""`sync_batchnorm`: batch normalization over the samples of all ranks.

It replaces, on each `BatchNormalization` object of a model, the one method that computes mean and
variance of a batch: class, config and weights stay Keras' own, and a saved file holds plain layers.
"""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from hvdtrain.collectives import current
from hvdtrain.collectives.base import Collective
from hvdtrain.errors import OptimizerError
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.optim.sample_weights import has_samples
from hvdtrain.optim.tracing import CallNames, inside_xla

_counter = itertools.count()


def sync_batchnorm(model: Any, collective: Collective | None = None) -> int:
    """Make all batch normalizations of `model` use the samples of all ranks, in place.

    All ranks must call it, in the same order for several models, once the model's layers exist (a
    subclassed model that makes layers in `build` must be built). Calling it again does nothing.
    From then on each training step of a layer has one collective in the forward pass and one in the
    backward pass: **all ranks must take the same number of training steps.** Samples have equal
    weight on all ranks: ranks may have batches of other sizes, masks, or no sample at all.

    Args:
        model: A Keras model.
        collective: The collective to use; defaults to that of `hvdtrain.init()`.

    Returns:
        The number of batch normalizations in the model.

    Raises:
        OptimizerError: The Keras version is not supported, or a layer overrides its moments.

    Example:
        >>> model = keras.applications.ResNet50(weights=None)
        >>> hvdtrain.sync_batchnorm(model)
        53
    """
    keras_model.check_batch_normalization()
    collective = collective or current()
    layers = keras_model.batch_normalizations(model)
    for layer in layers:
        synchronize(layer, collective)
    return len(layers)


def synchronize(layer: Any, collective: Collective) -> None:
    """Make one batch normalization use the samples of all ranks. All ranks, in the same order."""
    if not is_synchronized(layer):
        moments = SyncMoments(layer, collective, f"hvdtrain.norm{next(_counter)}")
        keras_seam.set_on_instance(layer, keras_model.MOMENTS, moments)


def is_synchronized(layer: Any) -> bool:
    """Whether this very layer uses the samples of all ranks; a copy of it does not."""
    moments = vars(layer).get(keras_model.MOMENTS)
    return isinstance(moments, SyncMoments) and moments.layer is layer


class SyncMoments:
    """Mean and variance of a batch over all ranks, in place of a layer's own method."""

    def __init__(self, layer: Any, collective: Collective, name: str) -> None:
        self.layer = layer
        self._collective = collective
        self._names = CallNames(name)

    def __call__(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Mean and variance of each channel, equal on all ranks. All ranks must call it."""
        # The batch of this rank may be empty. A mask has its shape without the last axis.
        if inside_xla():
            raise OptimizerError(
                f"The layer `{self.layer.name}` is synchronized over ranks, but the whole train "
                "step is being compiled by XLA (jit_compile or xla), for which collectives have "
                "no kernel. Call model.compile(..., jit_compile=False), and leave xla out.")
        name = self._names.next()
        # A step waits for the statistics of the one before, and so for its collective.
        with tf.control_dependencies([tf.convert_to_tensor(self.layer.moving_mean)]):
            x = tf.identity(inputs)
        x = x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
        valid = None
        if mask is not None:
            valid = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(x))
        present = has_samples()
        if present is not None:  # a sample that does not count stands for none
            valid = tf.fill(tf.shape(x), present) if valid is None else tf.logical_and(
                valid, present)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def moments(x: Any) -> Any:
            count, mean, variance = self._pool(*self._local(x, valid), name)

            def gradient(to_mean: Any, to_variance: Any) -> Any:
                # Each sample has moved the mean and variance that all ranks used.
                both = self._sum(tf.concat([to_mean, to_variance], 0), f"{name}.back")
                to_mean, to_variance = tf.split(tf.cast(both / tf.tile(count, [2]), x.dtype), 2)
                to_x = self._spread(to_mean) + 2 * (x - self._spread(mean)) * self._spread(
                    to_variance)
                return _only(to_x, valid)
            return (mean, variance), gradient

        mean, variance = moments(x)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)

    def _local(self, x: Any, valid: Any) -> tuple[Any, Any, Any]:
        """Of this rank: samples, their mean, and the sum of squared distances to that mean."""
        axes, channels = list(self.layer._reduction_axes), x.shape[self.layer.axis]
        count = tf.reduce_sum(tf.cast(valid, tf.float64), axes) if valid is not None else (
            tf.fill([channels], tf.cast(tf.size(x, tf.int64) // channels, tf.float64)))
        mean = tf.reduce_sum(_only(x, valid), axes) / tf.cast(tf.maximum(count, 1), x.dtype)
        distance = _only(tf.math.squared_difference(x, self._spread(mean)), valid)
        return count, mean, tf.reduce_sum(distance, axes)

    def _pool(self, count: Any, mean: Any, distance: Any, name: str) -> tuple[Any, Any, Any]:
        """Samples (at least 1), mean and variance over all ranks."""
        # In float64: of data far from zero, the difference of two float32 sums has few digits.
        dtype = mean.dtype
        mean, distance = tf.cast(mean, tf.float64), tf.cast(distance, tf.float64)
        sums = tf.concat([count, count * mean, distance + count * tf.square(mean)], 0)
        count, first, second = tf.split(self._sum(sums, name), 3)
        count = tf.maximum(count, 1)
        mean = first / count
        variance = tf.maximum(second / count - tf.square(mean), 0)
        return count, tf.cast(mean, dtype), tf.cast(variance, dtype)

    def _sum(self, vector: Any, name: str) -> Any:
        return self._collective.reduce([tf.cast(vector, tf.float64)], name=name, op="sum")[0]

    def _spread(self, vector: Any) -> Any:
        shape = [1] * (len(self.layer._reduction_axes) + 1)
        shape[self.layer.axis] = -1
        return tf.reshape(vector, shape)


def _only(x: Any, valid: Any) -> Any:
    """`x` where `valid`, else 0; all of it where `valid` is None."""
    return x if valid is None else tf.where(valid, x, tf.zeros_like(x))

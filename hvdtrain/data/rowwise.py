"""Whether a map of batches gives, of a part of a batch, that part of what it gives of the batch.

Then a batch can be divided before the map. It is tried on the first samples, for several parts,
to the last bit; and only of functions that depend on nothing else than their arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data import tf_steps
from hvdtrain.data.batches import count, rows

_SAMPLES = 16
"""How many samples are tried, at most."""
_READ_FROM = frozenset({"TensorSlice", "Tensor", "Range", "TextLine", "TFRecord",
                        "FixedLengthRecord"})


class NoSamplesError(Exception):
    """No sample can be had without a change to what the pipeline gives later."""


def why_not(step: Any) -> str:
    """Why a batch is not divided before a map, in words; "" if it can be."""
    mapped = tf_steps.Mapped(step)
    if mapped.draws:
        return f"{mapped.name} of batches draws random numbers"
    kept = mapped.keeps(python=True)
    if kept:
        return f"{mapped.name} of batches may keep a state ({kept})"
    if not all(map(_has_own_width, tf.nest.flatten(step.element_spec))):
        return f"{mapped.name} of batches may pad to the longest sample"
    try:
        with tf_steps.as_seeded(None), tf.device("CPU:0"):
            batch = next(iter(_batches(tf_steps.inputs(step)[0]).take(1)), None)
            if batch is None:
                return "there is no sample to try it with"
            same = _is_same(mapped.function(), batch)
    except NoSamplesError as error:
        return f"{mapped.name} of batches cannot be tried ({error})"
    except tf.errors.OpError as error:
        return f"{mapped.name} of batches fails with a part of one ({type(error).__name__})"
    return "" if same else f"{mapped.name} of batches mixes the samples of a batch"


def _has_own_width(spec: Any) -> bool:
    if isinstance(spec, tf.RaggedTensorSpec):
        return True
    shape = getattr(spec, "shape", None)
    return spec is None or shape is None or (
        shape.rank is not None and shape.rank > 0 and shape[1:].is_fully_defined())


def _is_same(function: Callable[[Any], Any], batch: Any) -> bool:
    whole, samples = function(batch), int(count(batch))
    cuts = [cut for size in (2, 3, samples) for cut in _parts(samples, size)]
    return samples > 1 and int(count(whole)) == samples and all(
        _equal(rows(whole, begin, length), function(rows(batch, begin, length)))
        for begin, length in cuts)


def _parts(samples: int, size: int) -> list[tuple[int, int]]:
    edges = [samples * part // size for part in range(size + 1)]
    return [(a, b - a) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def _equal(one: Any, other: Any) -> bool:
    found = [tf.nest.flatten(each, expand_composites=True) for each in (one, other)]
    return len(found[0]) == len(found[1]) and all(
        np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(*found, strict=True)
        if a is not None)


def _batches(step: Any) -> Any:
    """Batches like those that a step gives, of its first samples, in any order.

    Raises:
        NoSamplesError: Reading them would change what is read later, as with a generator.
    """
    name, before = tf_steps.kind(step), tf_steps.inputs(step)
    if name in tf_steps.SAME_ELEMENTS | tf_steps.OTHER_ELEMENTS | {"Cache", "Concatenate"}:
        return _batches(before[0])
    if name == "Map":
        mapped = tf_steps.Mapped(step)
        if mapped.keeps(python=False):
            raise NoSamplesError(f"{mapped.name} keeps a state")
        function = mapped.function()
        return _pairs(_batches(before[0])).map(lambda number, element: function(element))
    if name == "Zip":
        return tf.data.Dataset.zip(tf_steps.zipped_as(step, [_batches(each) for each in before]))
    if name in ("Batch", "PaddedBatch"):
        size = min(tf_steps.batch_size(step), _SAMPLES)
        return tf_steps.batched(_pairs(_batches(before[0])), step, size).map(
            lambda number, batch: batch)
    if name in _READ_FROM or tf_steps.keeps_nothing(step):
        return step
    raise NoSamplesError(f"{tf_steps.shown(step)} may not be read twice")


def _pairs(dataset: Any) -> Any:
    return tf.data.Dataset.zip((tf.data.Dataset.counter(), dataset))

"""`divided`: a rank's part of each batch of a `tf.data` pipeline, taken before it is decoded.

A pipeline of batches is followed from its end to the step that makes the batches, and from there to
where its samples begin (`undecoded`). The samples are divided there, and the later steps are
rebuilt over this rank's samples only. Where a step may give other results for a part, the batches
are divided after it: always correct, but every rank does all the work before it. Whether a map of
batches may is tried with the first samples, bit for bit, if it depends on its arguments only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data import tf_pipeline
from hvdtrain.data.pipeline import as_it_is
from hvdtrain.data.plans import Part
from hvdtrain.data.tf_pipeline import Undecoded, undecoded
from hvdtrain.errors import DataError

_TRIED_SAMPLES = 16

@dataclass(frozen=True, kw_only=True)
class Divided:
    """One rank's part of each global batch of a pipeline; None for what is unknown.

    Where `weighted`, `dataset` has pairs (weight, batch), as ranks may have different numbers of
    samples. `global_batch` and `last_batch` are samples of all ranks. `early`: some work is done
    for this rank's samples only; `why` says before which step it is divided, and what prevents
    more. `skip(batches)` (read when iterated) begins later and continues the shuffles of `dataset`.
    """

    dataset: Any
    weighted: bool
    global_batch: int | None
    last_batch: int | None
    steps: int | None
    early: bool
    why: str
    skip: Callable[[Any], Any] = field(repr=False)


@dataclass(frozen=True)
class _Parts:
    """One rank's parts of batches: `at(batches)` are pairs of the samples of a batch and the part.

    They begin so many batches later, without work for those before where possible. `sizes`: all
    possible samples of a batch. `ordered`: only the last may be smaller.
    """

    at: Callable[[Any], Any]
    full: int | None = None
    sizes: Collection[int] | None = None
    last: int | None = None
    ordered: bool = False
    before: tuple[str, ...] = ()
    why: str = ""

    def then(self, step: Callable[[Any], Any]) -> _Parts:
        return replace(self, at=lambda steps: step(self.at(steps)))

    def made(self, pairs: Any) -> _Parts:
        """The same with `pairs`, which are made from the beginning."""
        return replace(self, at=lambda steps: _after(pairs, steps))


def divided(dataset: Any, part: Part, *, batches_per_step: int = 1,
            before_decoding: bool = True) -> Divided:
    """Divide the batches of a pipeline (as Keras' `fit` takes it) over the ranks, or DataError."""
    # `batches_per_step` consecutive batches make a global batch. With `before_decoding` it divides
    # as early as gives the same, else each finished batch.
    _static_count(dataset)
    why = "as asked"
    if before_decoding:
        try:
            parts = _parts(dataset, part, batches_per_step)
            return _finished(dataset, parts, part, batches_per_step)
        except tf_pipeline.NOT_UNDERSTOOD as error:
            why = f"since it is not understood ({type(error).__name__}: {error})"
    parts = _late(dataset, part, batches_per_step, why)
    return _finished(dataset, parts, part, batches_per_step)


def _parts(dataset: Any, part: Part, per_step: int) -> _Parts:
    name = tf_pipeline.kind(dataset)
    if name in tf_pipeline.BATCHES:
        return _at_batch(dataset, part, per_step)
    known = {"Map", "Cache"} | tf_pipeline.SAME_ELEMENTS | tf_pipeline.OTHER_ELEMENTS
    if name not in known or (per_step > 1 and name in tf_pipeline.OTHER_ELEMENTS):
        return _late(dataset, part, per_step, f"since {tf_pipeline.shown(dataset)} makes it")
    parts = _parts(tf_pipeline.inputs(dataset)[0], part, per_step)
    if name == "Map":
        why = _why_not_before(dataset)
        if why:
            return _late(dataset, part, per_step, f"since {why}")
        mapped = tf_pipeline.Mapped(dataset)
        function = tf_pipeline.second(mapped.function())
        done = parts.then(lambda pairs: pairs.map(function, **mapped.calls))
        return replace(done, before=(*done.before, mapped.name))
    if name == "Options":
        return parts  # those of the whole pipeline are set in the end
    if name == "Prefetch":
        return parts.then(lambda pairs: tf_pipeline.again(dataset, pairs))
    if name == "Cache" and not tf_pipeline.is_in_memory(dataset):
        return _late(dataset, part, per_step, "since it is cached in a file")
    if not parts.before:
        return _late(dataset, part, per_step, parts.why)
    again = parts.made(tf_pipeline.again(dataset, parts.at(0)))
    return again if name == "Cache" else replace(again, last=None, ordered=False)


def _late(dataset: Any, part: Part, per_step: int, why: str) -> _Parts:
    batches = _together(dataset, per_step) if per_step > 1 else dataset

    @as_it_is
    def cut(*batch: Any) -> Any:
        return _part_of(batch if isinstance(dataset.element_spec, tuple) else batch[0], part)
    return _Parts(lambda steps: _after(batches, steps).map(cut), why=why,
                  **_sizes(dataset, per_step))


def _sizes(dataset: Any, per_step: int) -> dict[str, Any]:
    """What `_Parts` says of the global batches, as far as it is known."""
    if tf_pipeline.kind(dataset) not in tf_pipeline.BATCHES:
        batch = _static_count(dataset)
        if batch is None:
            return {}
        full = batch * per_step
        return {"full": full, "sizes": range(batch, full + 1, batch), "ordered": True,
                "last": full if per_step == 1 else None}
    batch, drops = tf_pipeline.batch_of(dataset)
    samples = int(tf_pipeline.inputs(dataset)[0].cardinality())
    full = batch * per_step
    if samples == tf.data.INFINITE_CARDINALITY or (drops and per_step == 1):
        samples = full
    elif samples < 0:
        return {"full": full, "ordered": True}
    samples -= samples % batch if drops else 0
    last = samples % full or full
    return {"full": full, "last": last, "ordered": True,
            "sizes": {full, last} if samples >= full else {last}}


def _at_batch(dataset: Any, part: Part, per_step: int) -> _Parts:
    begin = undecoded(tf_pipeline.inputs(dataset)[0])
    why = _why_not_undecoded(dataset, begin)
    if why:
        return _late(dataset, part, per_step, f"since {why}")
    sized = _sizes(dataset, per_step)
    batch, drops = tf_pipeline.batch_of(dataset)
    raw, decoder = begin.begin, begin.decoder(part.rank)
    if drops and per_step > 1:
        raw = raw.batch(batch, drop_remainder=True).unbatch()
    raw = raw.batch(batch * per_step, drop_remainder=drops and per_step == 1)

    @as_it_is
    def numbered(*whole: Any) -> Any:
        samples, own = _part_of(whole if isinstance(raw.element_spec, tuple) else whole[0], part)
        return tf.fill([tf.maximum(part.count(samples), 1)], samples), own

    def made(batches: Any) -> Any:
        own = decoder(batches.map(numbered).unbatch())
        return _in_batches(own, dataset, part, sized.get("sizes", range(1, batch * per_step + 1)))
    parts = _Parts(lambda steps: made(_after(raw, steps)), **sized,
                   before=tuple(step.name for step in begin.steps if step.function),
                   why=f"since {begin.why}" if begin.why else "")
    return parts.made(parts.at(0)) if begin.is_kept else parts


def _why_not_undecoded(dataset: Any, begin: Undecoded) -> str:
    if tf_pipeline.kind(dataset) == "PaddedBatch" and any(
            (shape.numpy() < 0).any() for shape in tf.nest.flatten(dataset._padded_shapes)):
        return "padded_batch pads to the longest sample of a batch"
    for spec in tf.nest.flatten(begin.begin.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is not None and not shape.is_fully_defined():
            return "samples have different shapes before they are decoded"
    return "" if begin.steps else begin.why or "nothing is done to the samples before"


def _in_batches(own: Any, dataset: Any, part: Part, sizes: Collection[int]) -> Any:
    """This rank's samples, each with the size of its global batch, in batches."""
    full = max(sizes)
    width = max(int(part.count(full)), 1)
    if max(int(part.count(size)) for size in sizes) <= width:
        pairs = tf_pipeline.batched(own, dataset, width)
    else:
        # The last batch may give a rank more samples than the others: each ends by its own number.
        pairs = own.group_by_window(
            lambda samples, sample: samples,
            lambda samples, group: tf_pipeline.batched(group, dataset, full),
            window_size_func=lambda samples: tf.maximum(part.count(samples), 1))
    return pairs.map(lambda samples, batch: (samples[0], batch))


def _after(dataset: Any, steps: Any) -> Any:
    if isinstance(steps, tf.Variable):
        # Not `skip` within a `flat_map`: an iterator of it that Keras makes and does not use would
        # let a shuffle draw no order, as it does in a run that was not resumed.
        @as_it_is
        def is_left(number: Any, element: Any) -> Any:
            return number >= tf.cast(steps, tf.int64)
        return dataset.enumerate().filter(is_left).map(as_it_is(lambda number, element: element))
    begins = isinstance(steps, int) and steps == 0
    return dataset if begins else dataset.skip(tf.cast(steps, tf.int64))


def _finished(dataset: Any, parts: _Parts, part: Part, per_step: int) -> Divided:
    sizes = parts.sizes
    weighted = not part.is_even(None) and (
        sizes is None or not all(map(part.is_even, sizes)))
    vanish = part.remainder == "drop" and (sizes is None or min(sizes) < part.size)
    if vanish:
        kept = parts.then(lambda pairs: pairs.filter(lambda samples, batch: samples >= part.size))
        parts = kept if parts.ordered else parts.made(kept.at(0))
    steps, last, batches = None, parts.last, int(dataset.cardinality())
    if batches >= 0 and not (vanish and (not parts.ordered or last is None)):
        steps = -(-batches // per_step) - (vanish and (last or 0) < part.size)
    if vanish and last is not None and last < part.size:
        last = parts.full
    options = tf.data.Options().merge(dataset.options())
    options.deterministic = True
    static = int(part.count(next(iter(sizes)))) if sizes and len(sizes) == 1 else None

    @as_it_is
    def shaped(samples: Any, batch: Any) -> Any:
        for tensor in tf.nest.flatten(batch):
            if static and isinstance(tensor, tf.Tensor) and tensor.shape.rank:
                tensor.set_shape([static, *tensor.shape[1:]])
        return (tf.cast(part.weight(samples), tf.float32), batch) if weighted else batch

    @as_it_is
    def finished(begin: Any) -> Any:
        found = parts.at(begin).map(shaped)
        if steps is not None and isinstance(begin, int):
            found = found.apply(tf.data.experimental.assert_cardinality(max(steps - begin, 0)))
        return found.with_options(options)
    if parts.before:
        why = f"divided before {', '.join(parts.before)}"
        why += f"; not earlier, {parts.why}" if parts.why else ""
    else:
        why = f"each whole batch is divided, {parts.why}"
    return Divided(dataset=finished(0), weighted=weighted, global_batch=parts.full,
                   last_batch=last, steps=steps, early=bool(parts.before), why=why, skip=finished)


def _count(batch: Any) -> Any:
    """The number of samples of a batch, an int64 tensor."""
    first = next(each for each in tf.nest.flatten(batch) if each is not None)
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first, tf.int64)[0]


def _rows(batch: Any, begin: Any, length: Any, *, wraps: bool = False) -> Any:
    """Consecutive samples of a batch; `wraps`: after the last come the first again."""
    def cut(tensor: Any) -> Any:
        if tensor is None:
            return None
        if isinstance(tensor, tf.SparseTensor):
            rest = tensor.dense_shape[1:]
            return tf.sparse.slice(tf.sparse.concat(0, [tensor, tensor]) if wraps else tensor,
                                   tf.concat([[begin], tf.zeros_like(rest)], 0),
                                   tf.concat([[length], rest], 0))
        # A copy: of arrays of a script a slice would be a view, in which later steps may write.
        places = begin + tf.range(length)
        return tf.gather(tensor, places % _count(tensor) if wraps else places)
    return tf.nest.map_structure(cut, batch)


def _part_of(batch: Any, part: Part) -> Any:
    """The size of a batch, and one rank's samples of it: one sample where it has none."""
    samples = _count(batch)
    return samples, _rows(batch, part.begin(samples), tf.maximum(part.count(samples), 1),
                         wraps=part.remainder == "pad")


def _static_count(dataset: Any) -> int | None:
    """The static batch size of a dataset, or None; DataError where elements are no batches."""
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(dataset.element_spec)]
    known = [shape for shape in shapes if shape is not None and shape.rank is not None]
    if any(shape.rank == 0 for shape in known):
        raise DataError(
            "The tf.data.Dataset gives samples, or something beside them that has no sample "
            f"axis: {dataset.element_spec}. Expected batches, as fit of Keras takes them: call "
            "dataset.batch(batch_size) before.")
    return next((shape[0] for shape in known if shape[0]), None)


def _together(batches: Any, number: int) -> Any:
    """Concatenate every `number` consecutive batches; shorter samples are padded with zeros."""
    shape = batches.element_spec
    flat = [spec is not None and hasattr(spec, "shape") for spec in tf.nest.flatten(shape)]

    @as_it_is
    def without_nothing(*batch: Any) -> Any:
        leaves = tf.nest.flatten(batch if isinstance(shape, tuple) else batch[0])
        return tuple(leaf for leaf in leaves if leaf is not None)

    @as_it_is
    def one(*windows: Any) -> Any:
        # What is in a window has been read: it is counted without being made again.
        samples = windows[0].reduce(tf.constant(0, tf.int64), lambda total, batch:
                                    total + _count(batch))
        return tf.data.Dataset.zip(tuple(joined(each, samples) for each in windows))

    def joined(window: Any, samples: Any) -> Any:
        spec = window.element_spec
        if isinstance(spec, tf.TensorSpec) and not spec.shape[1:].is_fully_defined():
            return window.unbatch().padded_batch(samples)
        return window.unbatch().batch(samples)

    @as_it_is
    def with_nothing(*leaves: Any) -> Any:
        left = iter(leaves)
        return tf.nest.pack_sequence_as(shape, [next(left) if is_there else None
                                                for is_there in flat])
    return batches.map(without_nothing).window(number).flat_map(one).map(with_nothing)


def _why_not_before(step: Any) -> str:
    """In words; "" if a batch can be divided before a map."""
    mapped = tf_pipeline.Mapped(step)
    if mapped.draws:
        return f"{mapped.name} of batches draws random numbers"
    kept = mapped.keeps(python=True)
    if kept:
        return f"{mapped.name} of batches may keep a state ({kept})"
    for spec in tf.nest.flatten(step.element_spec):
        shape = None if isinstance(spec, tf.RaggedTensorSpec) else getattr(spec, "shape", None)
        if shape is not None and not (shape.rank and shape[1:].is_fully_defined()):
            return f"{mapped.name} of batches may pad to the longest sample"
    try:
        with tf_pipeline.as_seeded(None), tf.device("CPU:0"):
            some = tf_pipeline.some_batches(tf_pipeline.inputs(step)[0], _TRIED_SAMPLES)
            batch = next(iter(some.take(1)), None)
            if batch is None:
                return "there is no sample to try it with"
            same = _is_same(mapped.function(), batch)
    except tf_pipeline.NoSamplesError as error:
        return f"{mapped.name} of batches cannot be tried ({error})"
    except tf.errors.OpError as error:
        return f"{mapped.name} of batches fails with a part of one ({type(error).__name__})"
    return "" if same else f"{mapped.name} of batches mixes the samples of a batch"


def _is_same(function: Callable[[Any], Any], batch: Any) -> bool:
    whole, samples = function(batch), int(_count(batch))

    def is_same_for(part: Part) -> bool:
        where = part.begin(samples), part.count(samples)
        one, other = (tf.nest.flatten(found, expand_composites=True) for found in (
            _rows(whole, *where), function(_rows(batch, *where))))
        return len(one) == len(other) and all(
            np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(one, other, strict=True)
            if a is not None)
    parts = [Part(rank=rank, size=size) for size in (2, 3, samples) for rank in range(size)]
    return samples > 1 and int(_count(whole)) == samples and all(
        is_same_for(part) for part in parts if part.count(samples))

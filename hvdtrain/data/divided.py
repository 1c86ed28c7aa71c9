"""`divided`: a rank's part of each batch of a `tf.data` pipeline, taken before it is decoded.

A pipeline of batches is followed from its end to the step that makes the batches, and from there
to where its samples begin (`undecoded`). The samples are divided there, and the steps after it are
made anew over this rank's samples only. Where a step is not known to give the same on a part, the
batches are divided after it: that is always right, and costs every rank the whole work before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from hvdtrain.data import tf_steps
from hvdtrain.data.batches import part_of, static_count, together
from hvdtrain.data.part import Part
from hvdtrain.data.rowwise import why_not
from hvdtrain.data.undecoded import Undecoded, undecoded


@dataclass(frozen=True, kw_only=True)
class Divided:
    """One rank's part of each global batch of a pipeline."""

    dataset: Any
    """This rank's batches; where `weighted`, pairs of a weight and a batch."""
    weighted: bool
    """Whether ranks may have different numbers of samples in some batch."""
    global_batch: int | None
    """Samples of a full batch of all ranks, if known."""
    last_batch: int | None
    """Samples of the last batch of all ranks, if known."""
    steps: int | None
    """Batches; None if their number is not known, or without end."""
    early: bool
    """Whether some work is done for this rank's samples only."""
    why: str
    """Before what it is divided, and what prevents more, in words."""
    skip: Callable[[Any], Any] = field(repr=False)
    """From a number of batches (an integer, tensor or variable, which is read when iterated) to
    a dataset that begins so much later. It goes on with the shuffles of `dataset`."""


@dataclass(frozen=True)
class _Parts:
    """One rank's parts of batches, as pairs of the samples of the batch and the part."""

    pairs: Any
    later: Callable[[Any], Any] | None = None
    """From a number of batches to pairs that begin so much later, without work for those before;
    None where they must be made."""
    full: int | None = None
    sizes: frozenset[int] | None = None
    """All numbers of samples of a batch that there may be, if known."""
    last: int | None = None
    ordered: bool = False
    """Whether only the last batch may be smaller than the others."""
    before: tuple[str, ...] = ()
    why: str = ""

    def then(self, step: Callable[[Any], Any]) -> _Parts:
        """A step for each part."""
        later = self.later
        return replace(self, pairs=step(self.pairs),
                       later=None if later is None else lambda steps: step(later(steps)))


def divided(dataset: Any, part: Part, *, batches_per_step: int = 1,
            before_decoding: bool = True) -> Divided:
    """Divide the batches of a pipeline over the ranks.

    Args:
        dataset: A `tf.data.Dataset` of batches, as `fit` of Keras takes it.
        part: Which rank of how many.
        batches_per_step: Integer, how many following batches make a global batch together.
        before_decoding: Boolean, divide as early as gives the same; else each made batch.

    Raises:
        DataError: The elements of the dataset are no batches.
    """
    static_count(dataset)
    parts = None
    if before_decoding:
        try:
            parts = _parts(dataset, part, batches_per_step)
        except tf_steps.NOT_UNDERSTOOD as error:
            parts = _late(dataset, part, batches_per_step, f"since it is not understood "
                          f"({type(error).__name__}: {error})")
    if parts is None:
        parts = _late(dataset, part, batches_per_step, "as asked")
    return _finished(dataset, parts, part, batches_per_step)


def _parts(dataset: Any, part: Part, per_step: int) -> _Parts:
    """Follow a pipeline of batches from its end."""
    name = tf_steps.kind(dataset)
    if name in ("Batch", "PaddedBatch"):
        return _at_batch(dataset, part, per_step)
    known = {"Map", "Cache"} | tf_steps.SAME_ELEMENTS | tf_steps.OTHER_ELEMENTS
    if name not in known or (per_step > 1 and name in tf_steps.OTHER_ELEMENTS):
        return _late(dataset, part, per_step, f"since {tf_steps.shown(dataset)} makes it")
    parts = _parts(tf_steps.inputs(dataset)[0], part, per_step)
    if name == "Map":
        return _before_map(dataset, parts, part, per_step)
    if name == "Options":
        return parts  # those of the whole pipeline are set in the end
    if name == "Prefetch":
        return parts.then(lambda pairs: tf_steps.again(dataset, pairs))
    if name == "Cache" and not tf_steps.is_in_memory(dataset):
        return _late(dataset, part, per_step, "since it is cached in a file")
    if not parts.before:
        return _late(dataset, part, per_step, parts.why)
    again = replace(parts, pairs=tf_steps.again(dataset, parts.pairs), later=None)
    if name == "Cache":
        return again
    return replace(again, last=None, ordered=False)


def _before_map(dataset: Any, parts: _Parts, part: Part, per_step: int) -> _Parts:
    why = why_not(dataset)
    if why:
        return _late(dataset, part, per_step, f"since {why}")
    mapped = tf_steps.Mapped(dataset)
    function = mapped.function()

    @tf_steps.as_it_is
    def of_part(samples: Any, batch: Any) -> Any:
        return samples, function(batch)
    done = parts.then(lambda pairs: pairs.map(of_part, **mapped.calls))
    return replace(done, before=(*done.before, mapped.name))


def _late(dataset: Any, part: Part, per_step: int, why: str) -> _Parts:
    """Divide each batch when it is made."""
    batches = together(dataset, per_step) if per_step > 1 else dataset
    parts = _sized(dataset, per_step)

    @tf_steps.as_it_is
    def cut(*batch: Any) -> Any:
        return part_of(batch if isinstance(dataset.element_spec, tuple) else batch[0], part)
    return replace(parts, pairs=batches.map(cut), why=why,
                   later=lambda steps: _after(batches, steps).map(cut))


def _sized(dataset: Any, per_step: int) -> _Parts:
    """What is known of the sizes of batches."""
    if tf_steps.kind(dataset) in ("Batch", "PaddedBatch"):
        batch, drops = tf_steps.batch_size(dataset), tf_steps.drops_remainder(dataset)
        samples = int(tf_steps.inputs(dataset)[0].cardinality())
        full = batch * per_step
        if samples == tf.data.INFINITE_CARDINALITY or (drops and per_step == 1):
            return _Parts(None, full=full, sizes=frozenset({full}), last=full, ordered=True)
        if samples < 0:
            return _Parts(None, full=full, ordered=True)
        samples -= samples % batch if drops else 0
        sizes = {full} if samples >= full else set()
        last = samples % full or full
        return _Parts(None, full=full, sizes=frozenset(sizes | {last}), last=last, ordered=True)
    batch_or_none = static_count(dataset)
    if batch_or_none is None:
        return _Parts(None)
    full = batch_or_none * per_step
    sizes = {batch_or_none * number for number in range(1, per_step + 1)}
    return _Parts(None, full=full, sizes=frozenset(sizes), last=full if per_step == 1 else None,
                  ordered=True)


def _at_batch(dataset: Any, part: Part, per_step: int) -> _Parts:
    """Divide the samples of a batch before they are decoded."""
    begin = undecoded(tf_steps.inputs(dataset)[0])
    why = _why_not_before(dataset, begin)
    if why or not begin.steps:
        why = why or begin.why or "nothing is done to the samples before"
        return _late(dataset, part, per_step, f"since {why}")
    sized = _sized(dataset, per_step)
    batch, drops = tf_steps.batch_size(dataset), tf_steps.drops_remainder(dataset)
    raw, decoder = begin.begin, begin.decoder(part.rank)
    if drops and per_step > 1:
        raw = raw.batch(batch, drop_remainder=True).unbatch()
    raw = raw.batch(batch * per_step, drop_remainder=drops and per_step == 1)

    @tf_steps.as_it_is
    def numbered(*whole: Any) -> Any:
        samples, own = part_of(whole if isinstance(raw.element_spec, tuple) else whole[0], part)
        return tf.fill([tf.maximum(part.count(samples), 1)], samples), own

    def made(batches: Any) -> Any:
        own = decoder(batches.map(numbered).unbatch())
        return _in_batches(own, dataset, part, sized.sizes or range(1, batch * per_step + 1))
    return replace(sized, pairs=made(raw), before=(begin.names,),
                   why=f"since {begin.why}" if begin.why else "",
                   later=None if begin.is_kept else lambda steps: made(_after(raw, steps)))


def _why_not_before(dataset: Any, begin: Undecoded) -> str:
    if tf_steps.kind(dataset) == "PaddedBatch" and tf_steps.padding(dataset) is None:
        return "padded_batch pads to the longest sample of a batch"
    for spec in tf.nest.flatten(begin.begin.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is not None and not shape.is_fully_defined():
            return "samples have different shapes before they are decoded"
    return ""


def _in_batches(own: Any, dataset: Any, part: Part, sizes: Collection[int]) -> Any:
    """This rank's samples, each with the samples of its global batch, in batches."""
    full = max(sizes)
    width = max(int(part.count(full)), 1)
    if max(int(part.count(size)) for size in sizes) <= width:
        pairs = tf_steps.batched(own, dataset, width)
        return pairs.map(lambda samples, batch: (samples[0], batch))
    # The last batch may give a rank more samples than the others: each ends by its own number.
    return own.group_by_window(
        lambda samples, sample: samples,
        lambda samples, group: tf_steps.batched(group, dataset, full),
        window_size_func=lambda samples: tf.maximum(part.count(samples), 1)).map(
            lambda samples, batch: (samples[0], batch))


def _after(dataset: Any, steps: Any) -> Any:
    if isinstance(steps, tf.Variable):
        return tf.data.Dataset.from_tensors(0).flat_map(
            lambda _: dataset.skip(tf.cast(steps, tf.int64)))
    return dataset.skip(tf.cast(steps, tf.int64))


def _finished(dataset: Any, parts: _Parts, part: Part, per_step: int) -> Divided:
    sizes = parts.sizes
    weighted = not part.is_even(None) and (
        sizes is None or not all(map(part.is_even, sizes)))
    vanish = part.remainder == "drop" and (sizes is None or min(sizes) < part.size)
    steps = _steps(dataset, parts, part, per_step, vanish=vanish)
    options = tf.data.Options().merge(dataset.options())
    options.deterministic = True
    static = int(part.count(next(iter(sizes)))) if sizes and len(sizes) == 1 else None

    @tf_steps.as_it_is
    def shaped(samples: Any, batch: Any) -> Any:
        for tensor in tf.nest.flatten(batch):
            if static and isinstance(tensor, tf.Tensor) and tensor.shape.rank:
                tensor.set_shape([static, *tensor.shape[1:]])
        return (part.weight(samples), batch) if weighted else batch

    def finished(pairs: Any, begin: Any = 0, *, made: bool = True) -> Any:
        if vanish:
            pairs = pairs.filter(lambda samples, batch: samples >= part.size)
        if made and not (isinstance(begin, int) and begin == 0):
            pairs = _after(pairs, begin)
        batches = pairs.map(shaped)
        if steps is not None and isinstance(begin, int):
            batches = batches.apply(
                tf.data.experimental.assert_cardinality(max(steps - begin, 0)))
        return batches.with_options(options)

    @tf_steps.as_it_is
    def skip(begin: Any) -> Any:
        if parts.later is None or (vanish and not parts.ordered):
            return finished(parts.pairs, begin)
        return finished(parts.later(begin), begin, made=False)
    last = parts.last
    if vanish and last is not None and last < part.size:
        last = parts.full
    return Divided(dataset=finished(parts.pairs), weighted=weighted, global_batch=parts.full,
                   last_batch=last, steps=steps, early=bool(parts.before), why=_words(parts),
                   skip=skip)


def _steps(dataset: Any, parts: _Parts, part: Part, per_step: int, *,
           vanish: bool) -> int | None:
    """How many global batches there are, if known."""
    batches = int(dataset.cardinality())
    if batches < 0:
        return None
    if not vanish:
        return -(-batches // per_step)
    if not parts.ordered or parts.last is None:
        return None
    return -(-batches // per_step) - (parts.last < part.size)


def _words(parts: _Parts) -> str:
    if not parts.before:
        return f"each whole batch is divided, {parts.why}"
    done = f"divided before {', '.join(parts.before)}"
    return f"{done}; not earlier, {parts.why}" if parts.why else done

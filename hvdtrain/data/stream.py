"""Streams: samples that come one after another, in an unknown number.

The shares of the ranks are counted once, before the first step, and `StreamPlan` makes a plan: the
same number of steps on every rank, and each rank's weight in each step, since shares differ. A rank
whose share has ended continues with a sample that does not count.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.data.pipeline import first_of_epoch, numbers_of, ready
from hvdtrain.data.plans import StreamPlan
from hvdtrain.data.source import Structure, keras_like
from hvdtrain.data.tf_order import SAMPLES, check_order, is_batched, is_tuned, order_of
from hvdtrain.data.tf_pipeline import Undecoded, samples_of
from hvdtrain.errors import DataError
from hvdtrain.log import get_logger

_SAY_EVERY_S = 5.0


class StreamSource:
    """Samples from a `tf.data.Dataset` or a generator, of any length.

    Samples whose shapes differ are padded with zeros within a batch.

    Args:
        make: A `tf.data.Dataset` of samples, or of batches, which are unbatched; rank r takes the
            samples r, r + N, r + 2N, ..., so its order must be the same on all ranks. Or a function
            `make(rank, size)` that returns the dataset, or a new iterator, of one rank's samples,
            so that each rank reads its own files only; it is called or iterated again for each
            epoch. `make(rank, size, epoch)` gets the epoch, counted from 0: a resumed run sees the
            same order if it depends on that alone.
        name: String for messages.

    Example:
        ```python
        hvdtrain.fit(model, hvdtrain.StreamSource(tf.data.TextLineDataset(files).map(parse)))
        ```
    """

    def __init__(self, make: Any | Callable[..., Any], *, name: str = "stream") -> None:
        self.name = name
        if not isinstance(make, tf.data.Dataset) and not callable(make):
            raise DataError(
                f"{name}: expected a tf.data.Dataset, or a function make(rank, size) that returns "
                f"one or an iterator. Received: {type(make).__name__}.")
        self._make = make
        self._undecoded = (samples_of(make, batched=is_batched(make))
                           if isinstance(make, tf.data.Dataset) else None)
        self._shares: dict[tuple[int, int], Callable[[Any], Any]] = {}
        self._by_epoch = False
        if self._undecoded is None:
            with suppress(TypeError, ValueError):
                inspect.signature(make).bind(0, 1, 0)
                self._by_epoch = True
        self._counts: dict[tuple[int, int], int] = {}
        self.counts: tuple[int, ...] = ()
        """Samples of each rank's share; known once `count_everywhere` was called."""

    def divide_made(self) -> None:
        """Let each rank make all samples of a pipeline, and take its share of them."""
        if self._undecoded is not None and self._undecoded.steps:
            made = self._make.unbatch() if is_batched(self._make) else self._make
            self._undecoded, self._shares = Undecoded(made), {}

    def __len__(self) -> int:
        if not self.counts:
            raise DataError(f"{self.name}: the stream was not counted yet.")
        return sum(self.counts)

    def count_everywhere(self, collective: Collective) -> tuple[int, ...]:
        """Count every rank's share, each rank its own, and compare their order. All ranks."""
        if self._undecoded is not None:
            check_order(self._make, self._first_samples, collective, self.name)
        self.counts = tuple(collective.gather_objects(self.count(collective.rank, collective.size)))
        return self.counts

    @property
    def order(self) -> str:
        """What decides the order of the samples, as far as it is known; equal on all ranks."""
        return "" if self._undecoded is None else repr(order_of(self._make))

    @cached_property
    def signature(self) -> Structure:
        """Structure of `tf.TensorSpec` of one sample, which must be batchable."""
        made = self._share(0, 1)
        if isinstance(made, tf.data.Dataset):
            signature = made.element_spec
        else:
            sample = self._not_empty(itertools.islice(made, 1))[0]
            signature = tf.nest.map_structure(
                lambda value: tf.type_spec_from_value(
                    value if isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
                    else np.asarray(value)), keras_like(sample))
        for spec in tf.nest.flatten(signature):
            if not isinstance(spec, tf.TensorSpec):
                raise DataError(
                    f"{self.name}: expected samples of dense tensors. Received: "
                    f"{type(spec).__name__.removesuffix('Spec')} of {spec.dtype.name}. Make it "
                    "dense before, e.g. dataset.map(lambda x, y: (x.to_tensor(), y)) for a "
                    "RaggedTensor, tf.sparse.to_dense(x) for a SparseTensor.")
        return signature

    def _not_empty(self, samples: Iterable[Any]) -> list[Any]:
        found = list(samples)
        if not found:
            raise DataError(f"{self.name}: the stream is empty; at least one sample is needed.")
        return found

    def samples(self, rank: int, size: int, epoch: Any = 0, begin: Any = 0) -> Any:
        """The share of one rank, a `tf.data.Dataset` of samples. Iterate it once per epoch."""
        # `begin` samples are skipped, without decoding those of a `tf.data.Dataset`. `begin` and
        # `epoch` may be tensors.
        signature = self.signature
        if not self._by_epoch:
            made = self._share(rank, size, begin=begin)
            if isinstance(made, tf.data.Dataset):
                return made if self._undecoded else made.skip(begin)
        return tf.data.Dataset.from_generator(
            lambda number: map(keras_like, iter(self._share(rank, size, int(number)))),
            args=(epoch,), output_signature=signature).skip(begin)

    def begin_at(self, epoch: int, rank: int, size: int) -> None:
        """Let the shuffles of a rank's share continue as after so many epochs."""
        if not self._by_epoch:
            samples = self.samples(rank, size)
            for _ in range(epoch):  # a shuffle draws a new order each time it is iterated
                iter(samples)

    def count(self, rank: int, size: int) -> int:
        """The number of samples of a rank's share: reads them once, unless it is known."""
        # Those of a `tf.data.Dataset` are not decoded for it.
        if (rank, size) not in self._counts:
            dataset = (self.samples(rank, size) if self._undecoded is None
                       else self._undecoded.begin.shard(size, rank))
            known = int(dataset.cardinality())
            if known == tf.data.INFINITE_CARDINALITY:
                raise DataError(f"{self.name}: the data set never ends. Cut it with .take(samples "
                                "per epoch).")
            self._counts[rank, size] = self._read_over(dataset) if known < 0 else known
        return self._counts[rank, size]

    def _read_over(self, dataset: Any) -> int:
        """Count by reading, with a message where it takes long: it may never end."""
        count, said = 0, time.monotonic()
        for part in dataset.map(lambda *sample: 1).batch(64).as_numpy_iterator():
            count += len(part)
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                get_logger().warning(
                    "%s: counting its samples, %d so far. A stream that never ends must be cut: "
                    ".take(samples per epoch), or a generator that returns.", self.name, count)
        return count

    def numbers(self, rank: int, size: int) -> np.ndarray[Any, Any]:
        """The indices of a rank's samples among all, after `count_everywhere`."""
        # With a function they follow the samples of the ranks before.
        if self._undecoded is not None:
            return np.arange(rank, len(self), size, dtype=np.int64)
        return np.full(self.counts[rank], rank, np.int64)

    def batches(self, rank: int, size: int, batch: int, epoch: Any = 0, begin: Any = 0) -> Any:
        """The share of one rank in batches, once; the last one may be smaller."""
        samples = self.samples(rank, size, epoch, begin * batch)
        shapes = [spec.shape for spec in tf.nest.flatten(samples.element_spec)]
        if all(shape.is_fully_defined() or shape.rank is None for shape in shapes):
            return samples.batch(batch)
        return samples.padded_batch(batch)

    def first(self) -> Structure:
        """One sample, with a first axis of length 1."""
        return self._first_samples[0]

    @cached_property
    def _first_samples(self) -> list[Structure]:
        return self._not_empty(self.samples(0, 1).take(SAMPLES).batch(1).as_numpy_iterator())

    def _share(self, rank: int, size: int, epoch: int = 0, begin: Any = 0) -> Any | Iterable[Any]:
        if self._undecoded is not None:
            if (rank, size) not in self._shares:
                self._shares[rank, size] = self._undecoded.share(rank, size)
            return self._shares[rank, size](begin)
        return self._make(rank, size, epoch) if self._by_epoch else self._make(rank, size)


def stream_dataset(source: StreamSource, plan: StreamPlan, *, first_epoch: int = 0,
                   first_step: int = 0, epochs: int | None = None) -> Any:
    """As `training_dataset`, for a stream: this rank's batches, epoch after epoch without end."""
    # What comes before `first_step` is read and dropped. Where a share gives fewer samples than
    # were counted, or more, reading it fails: at the latest in place of the last batch of the
    # epoch.
    weights = tf.constant(plan.weights())
    sizes = tf.constant([*plan.sizes(plan.rank), 0], tf.int64)
    source.begin_at(first_epoch, plan.rank, plan.size)
    first = tf.nest.map_structure(tf.convert_to_tensor, source.first())
    spare = tf.data.Dataset.from_tensors(first).repeat()

    def marked(batches: Any, *, real: bool) -> Any:
        return tf.data.Dataset.zip(batches, tf.data.Dataset.from_tensors(real).repeat())

    def checked(step: Any, batch_and_real: Any) -> Any:
        batch, real = batch_and_real
        found = tf.where(real, tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0], 0)
        check = tf.debugging.Assert(tf.equal(found, sizes[step]), [
            f"{source.name}: the stream changed: samples of rank {plan.rank} in step", step,
            "expected", sizes[step], "found", found])
        with tf.control_dependencies([check] if check is not None else []):
            return tf.identity(step), tf.nest.map_structure(tf.identity, batch)

    def one_epoch(epoch: Any) -> Any:
        begin = first_of_epoch(epoch, first_epoch, first_step)
        # One step more than there are: nothing must be left over.
        steps = tf.data.Dataset.range(begin, plan.steps + 1)
        own = source.batches(plan.rank, plan.size, plan.batch_per_rank, epoch, begin)
        batches = marked(own, real=True).concatenate(marked(spare, real=False))
        found = tf.data.Dataset.zip(steps, batches).map(checked)
        # Each batch waits until the next is checked, so the last one until nothing is left over.
        late = found.scan((tf.constant(-1, tf.int64), first), lambda last, this: (this, last))
        batches = late.filter(lambda step, batch: step >= 0)
        if not plan.uneven:
            return batches.map(lambda step, batch: batch)
        return batches.map(lambda step, batch: (tf.identity(weights[step]), batch))

    return ready(numbers_of(first_epoch, epochs).flat_map(one_epoch),
                 autotune=is_tuned(source.samples(plan.rank, plan.size)))

"""Streams: samples that come one after another, in a number that nobody knows before.

`StreamSource` divides one into a share for each rank. The shares are counted once, before the
first step, and `StreamPlan` makes of the counts a plan like that of any other data: the same
number of steps on every rank, and the weight of each rank in each step, since shares differ. A
rank whose share has ended goes on with a sample that does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.data.source import Source, Stream, Structure
from hvdtrain.data.stream_plan import StreamPlan
from hvdtrain.errors import DataError


class StreamSource(Stream):
    """Samples from a `tf.data.Dataset` or a generator, of any length.

    Args:
        make: A `tf.data.Dataset` of samples, not of batches (`dataset.unbatch()` makes one), of
            which rank r takes the samples r, r + N, r + 2N, ...; or a function `make(rank, size)`
            that returns the dataset, or a new iterator, of one rank's share, so that each rank
            reads its own files only. It is called for each epoch anew, or iterated anew.
        name: String for messages.

    Example:
        ```python
        hvdtrain.fit(model, hvdtrain.StreamSource(tf.data.TextLineDataset(files).map(parse)))
        ```
    """

    def __init__(self, make: Any | Callable[[int, int], Any], *, name: str = "stream") -> None:
        self.name = name
        if not isinstance(make, tf.data.Dataset) and not callable(make):
            raise DataError(
                f"{name}: expected a tf.data.Dataset, or a function make(rank, size) that returns "
                f"one or an iterator. Received: {type(make).__name__}.")
        self._make = make
        self._signature: Structure | None = None
        self._counts: dict[tuple[int, int], int] = {}
        self._total: int | None = None

    def __len__(self) -> int:
        """Samples of all shares; known once `count_everywhere` was called."""
        if self._total is None:
            raise DataError(f"{self.name}: the stream was not counted yet.")
        return self._total

    def count_everywhere(self, collective: Collective) -> tuple[int, ...]:
        """Count every rank's share, each rank its own. All ranks."""
        counts = tuple(collective.gather_objects(self.count(collective.rank, collective.size)))
        self._total = sum(counts)
        return counts

    @property
    def signature(self) -> Structure:
        """Structure of `tf.TensorSpec` of one sample.

        Raises:
            DataError: There is no sample.
        """
        if self._signature is None:
            made = self._share(0, 1)
            if isinstance(made, tf.data.Dataset):
                self._signature = made.element_spec
            else:
                sample = next(iter(made), None)
                if sample is None:
                    raise DataError(f"{self.name}: the stream is empty; at least one sample is "
                                    "needed.")
                self._signature = tf.nest.map_structure(_spec_of, sample)
        return self._signature

    def samples(self, rank: int, size: int) -> Any:
        """The share of one rank, a `tf.data.Dataset` of samples. Iterate it once per epoch."""
        made = self._share(rank, size)
        if isinstance(made, tf.data.Dataset):
            return made
        return tf.data.Dataset.from_generator(
            lambda: iter(self._share(rank, size)), output_signature=self.signature)

    def count(self, rank: int, size: int) -> int:
        """The number of samples of a rank's share: reads them once, unless it is known."""
        if (rank, size) not in self._counts:
            dataset = self.samples(rank, size)
            known = int(dataset.cardinality())
            if known == tf.data.INFINITE_CARDINALITY:
                raise DataError(f"{self.name}: the data set never ends. Cut it with .take(samples "
                                "per epoch).")
            if known < 0:
                known = int(dataset.reduce(np.int64(0), lambda n, *sample: n + 1))
            self._counts[rank, size] = known
        return self._counts[rank, size]

    def batches(self, rank: int, size: int, batch: int) -> Any:
        """The share of one rank in batches, once; the last one may be smaller."""
        return self.samples(rank, size).batch(batch)

    def first(self) -> Structure:
        """One sample, with a first axis of length 1.

        Raises:
            DataError: There is none.
        """
        for batch in self.samples(0, 1).batch(1).take(1).as_numpy_iterator():
            return batch
        raise DataError(f"{self.name}: the stream is empty; at least one sample is needed.")

    def _share(self, rank: int, size: int) -> Any | Iterable[Any]:
        if isinstance(self._make, tf.data.Dataset):
            return self._make.shard(size, rank) if size > 1 else self._make
        return self._make(rank, size)


def stream_dataset(source: StreamSource, plan: StreamPlan, *, first_epoch: int = 0,
                   first_step: int = 0) -> Any:
    """This rank's batches of a stream, epoch after epoch without end.

    Args:
        source: The stream.
        plan: Its steps.
        first_epoch: Integer, the epoch to begin with.
        first_step: Integer, the step of that epoch to begin with; what comes before is read over.

    Returns:
        A `tf.data.Dataset` of pairs `(weight, batch)`, as `training_dataset` where a plan is
        uneven. Where a share gives fewer samples than were counted, or more, reading it fails: at
        the latest in place of the last batch of the epoch.
    """
    weights = tf.constant(plan.weights())
    sizes = tf.constant([plan.batch_of(plan.rank, step) for step in range(plan.steps + 1)],
                        tf.int64)
    own = source.samples(plan.rank, plan.size).batch(plan.batch_per_rank)
    # Of a rank that has none at all, the first sample of all.
    spare_of = source.samples(plan.rank, plan.size) if plan.counts[plan.rank] else source.samples(
        0, 1)
    first = next(iter(spare_of.take(1).batch(1)))
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
        begin = tf.where(tf.equal(epoch, first_epoch), tf.constant(first_step, tf.int64), 0)
        # One step more than there are: nothing must be left over.
        steps = tf.data.Dataset.range(begin, plan.steps + 1)
        batches = marked(own.skip(begin), real=True).concatenate(marked(spare, real=False))
        found = tf.data.Dataset.zip(steps, batches).map(checked)
        # Each batch waits until the next is checked, so the last one until nothing is left over.
        late = found.scan((tf.constant(-1, tf.int64), first), lambda last, this: (this, last))
        return late.filter(lambda step, batch: step >= 0).map(
            lambda step, batch: (tf.identity(weights[step]), batch))

    return tf.data.Dataset.counter(first_epoch).flat_map(one_epoch).prefetch(tf.data.AUTOTUNE)


def one_sample(source: Source | StreamSource) -> Structure:
    """One sample, with a first axis of length 1."""
    if isinstance(source, StreamSource):
        return source.first()
    return source.read(np.zeros(1, np.int64))


def _spec_of(value: Any) -> Any:
    array = np.asarray(value)
    return tf.TensorSpec(array.shape, tf.as_dtype(array.dtype))

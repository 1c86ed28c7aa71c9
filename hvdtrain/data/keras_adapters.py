"""What Keras' `fit` is given, divided over the ranks: each takes its part of each batch.

`RankAdapter` wraps Keras' own adapter (and its private parts), so that batches, their order and the
calls of a dataset's methods are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    array_slicing,
    data_adapter_utils,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from hvdtrain.collectives.base import Collective
from hvdtrain.config import DEFAULT_BATCH
from hvdtrain.data.divided import divided
from hvdtrain.data.pipeline import as_it_is, ready
from hvdtrain.data.plans import Part, in_turn, uneven_batch_text
from hvdtrain.data.source import Structure, keras_like, tensors_of
from hvdtrain.data.tf_order import (
    check_alike,
    check_order,
    first_before_shuffles,
    is_tuned,
    order_of,
)
from hvdtrain.data.tf_pipeline import NOT_UNDERSTOOD, some_batches


def is_arrays(x: Any) -> bool:
    """Whether Keras treats `x` as arrays."""
    return bool(array_data_adapter.can_convert_arrays((x,)))


def validation_split_of(arrays: tuple[Any, Any, Any], split: float) -> tuple[Any, Any]:
    """Arrays `(x, y, sample_weight)` without their last part, and that part, as Keras cuts them."""
    return tuple(array_slicing.train_validation_split(arrays, validation_split=split))


def unpacked(data: Any) -> tuple[Any, Any, Any]:
    """Validation data as Keras reads them: x, y and sample weights, where given."""
    return tuple(data_adapter_utils.unpack_x_y_sample_weight(data))


def adapter_of(x: Any, y: Any = None, sample_weight: Any = None, *,
               part: Part, batch_size: int | None = None, batch_ranks: int = 1,
               class_weight: Mapping[int, float] | None = None, shuffle: Any = False,
               steps: int | None = None, seed: int | None = None,
               before_decoding: bool = True, name: str = "training") -> RankAdapter:
    """Whatever Keras' `fit`, `evaluate` and `predict` take, divided over the ranks."""
    # A global batch is made of as many batches as `batch_ranks`. `name` is for messages.
    if batch_ranks > 1 and (batch_size is not None or steps is None):
        batch_size = (batch_size or DEFAULT_BATCH) * batch_ranks
    given = data_adapters.get_data_adapter(
        x=x, y=y, sample_weight=sample_weight, batch_size=batch_size, steps_per_epoch=steps,
        shuffle=shuffle, class_weight=class_weight)
    if isinstance(given, RankAdapter):
        return given
    adapter = (ArrayAdapter(given, part, batch_ranks, seed=seed)
               if isinstance(given, data_adapters.ArrayDataAdapter) else
               RankAdapter(given, part, batch_ranks, before_decoding=before_decoding,
                           batches=None if steps is None or name == "training" else
                           steps * batch_ranks))
    adapter.name, adapter.steps_per_epoch = name, steps
    return adapter


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The steps of an epoch over batches that are made as in one process.

    Stands for a `ShardPlan` where each rank takes its part of a batch given to Keras' `fit`. None
    is unknown before reading. `order`, `divided` and `stream_order` (for a resumed run) are texts.
    """

    rank: int
    size: int
    global_batch: int | None
    steps: int | None
    samples: int | None
    growth: int
    uneven: bool
    order: str
    divided: str
    stream_order: str = ""

    @property
    def samples_per_epoch(self) -> int | None:
        return self.samples

    def samples_before(self, step: int) -> int:
        """As `ShardPlan.samples_before`; steps, where the size of a batch is not known."""
        seen = step * (self.global_batch or 1)
        return seen if self.samples is None else min(seen, self.samples)

    def step_after(self, samples: int) -> int:
        if self.steps is not None and self.samples is not None and samples >= self.samples:
            return self.steps
        return samples // (self.global_batch or 1)

    def batch_text(self, party: str) -> str:
        if self.global_batch is None:
            return f"as the data set makes it, divided over {self.size} {party}s"
        each, left = divmod(self.global_batch, self.size)
        if not left:
            return f"{self.global_batch} global = {each} per {party} x {self.size}"
        return uneven_batch_text(self.global_batch, each + 1, self.size, party)

    def data_text(self, party: str) -> str:
        known = "samples" if self.samples is None else f"{self.samples:,} samples"
        where = f"; {self.divided}" if self.size > 1 and self.divided else ""
        return f"{known}, {self.order}{where}"


class RankAdapter(DataAdapter):  # type: ignore[misc]
    """This rank's part of the batches of `given`, one of Keras' own adapters; a `train.feed.Feed`.

    `growth` of its batches make one global batch. `weighted`: the data are pairs `(weight, batch)`.
    """

    name: str
    steps_per_epoch: int | None
    weighted: bool
    batch_size: int | None = None
    has_partial_batch = partial_batch_size = None
    places = staticmethod(in_turn)

    def __init__(self, given: Any, part: Part, growth: int, *, before_decoding: bool,
                 batches: int | None = None) -> None:
        self._given, self._part, self._growth = given, part, growth
        self._whole = given.get_tf_dataset()
        if batches is not None and isinstance(given, data_adapters.GeneratorDataAdapter):
            # A generator goes on in the next evaluation. What it had made ahead is lost to it then:
            # on each rank other batches, if it is more than what is used.
            self._whole = self._whole._input_dataset.take(batches)  # before Keras' prefetch
        self._divided = divided(self._whole, part, batches_per_step=growth,
                                before_decoding=before_decoding)
        self.weighted = self._divided.weighted
        if self._divided.global_batch is not None:
            self.batch_size = -(-self._divided.global_batch // part.size)
        self.on_epoch_begin, self.on_epoch_end = given.on_epoch_begin, given.on_epoch_end
        self._skip = tf.Variable(0, dtype=tf.int64, trainable=False)

    def get_tf_dataset(self) -> Any:
        dataset = (self._divided.skip(self._skip) if int(self._skip.numpy())
                   else self._divided.dataset)
        return ready(dataset, autotune=is_tuned(self._whole))

    def training(self, epoch: int, step: int, *, begun: int | None) -> dict[str, Any]:
        """Arguments of Keras' `fit`; with only `initial_epoch` it begins with the first data."""
        if begun is not None:
            self.begin_at(epoch - begun, step)
        return {"x": self, "steps_per_epoch": self.steps_per_epoch}

    def evaluation(self) -> RankAdapter:
        """The data for Keras' `evaluate` and `predict`."""
        return self

    def begin_at(self, epoch: int, step: int) -> None:
        """Let the first iterator begin after so many epochs. Before Keras' `fit` is called."""
        if isinstance(self._given, data_adapters.PyDatasetAdapter):
            for _ in range(epoch):  # Keras calls the first of the two once more, at its begin
                self._given.py_dataset.on_epoch_end()
                self._given.py_dataset.on_epoch_begin()
        # With `steps_per_epoch` an iterator continues from one epoch to the next.
        if self.steps_per_epoch:
            step += epoch * self.steps_per_epoch
        else:
            # A shuffle draws a new order each time it is iterated. Keras does so before each epoch,
            # and once more after one of a known number of batches.
            for _ in range(epoch if self.num_batches is None else 2 * epoch):
                iter(self._divided.dataset)
        self._skip.assign(step)

    @property
    def num_batches(self) -> int | None:
        known: int | None = self._given.num_batches
        if known is None or self._divided.steps is not None:
            return self._divided.steps
        return -(-known // self._growth)

    def on_steps_done(self) -> None:
        """After an epoch of training: the next iterator begins at the beginning."""
        # Keras calls `on_epoch_end` before the first epoch as well.
        self._skip.assign(0)

    @property
    def samples(self) -> int | None:
        """Samples of all ranks; None where they were not counted."""
        return self.plan().samples

    def plan(self, model: Any = None) -> BatchPlan:
        """The steps of an epoch, whatever the model."""
        steps_per_epoch = self.steps_per_epoch
        found, batch = self._divided, self._divided.global_batch
        is_pipeline = isinstance(self._given, data_adapters.TFDatasetAdapter)
        if batch is None and not is_pipeline:
            first = next(v for v in tf.nest.flatten(self._first_batch) if v is not None)
            batch = int(np.shape(first)[0]) * self._growth
        steps, samples = steps_per_epoch or self.num_batches, None
        if batch is not None and steps is not None and (steps_per_epoch or found.last_batch):
            samples = steps * batch
            if not steps_per_epoch:
                samples += (found.last_batch or 0) - batch
        return BatchPlan(
            rank=self._part.rank, size=self._part.size, global_batch=batch,
            steps=steps, samples=samples, growth=self._growth, uneven=self.weighted,
            order="in the order of the data set",
            divided=found.why if is_pipeline else "every rank makes the whole batches",
            stream_order=repr(order_of(self._whole)))

    def one_sample(self) -> Structure:
        """One sample, with a first axis of length 1: its shapes and types are those of the data."""
        # A dataset whose shapes are known is not read: iterating a shuffle once more would give the
        # script another order.
        spec = self._whole.element_spec
        if all(isinstance(s, tf.TensorSpec) and s.shape.rank and s.shape[1:].is_fully_defined()
               for s in tf.nest.flatten(spec)):
            return tf.nest.map_structure(
                lambda s: tf.fill([1, *s.shape[1:]], tf.zeros([], s.dtype)), keras_like(spec))
        return tf.nest.map_structure(lambda v: None if v is None else v[:1],
                                     tensors_of(keras_like(self._first_batch)))

    def compare(self, collective: Collective) -> dict[str, Any]:
        """Refuse data that differ between the ranks; return what must be equal. All ranks."""
        name = self.name
        if isinstance(self._given, data_adapters.TFDatasetAdapter):
            check_order(self._whole, first_before_shuffles(self._whole), collective, name)
        else:
            check_alike(tensors_of(keras_like(self._first_batch)), collective, name,
                        exactly=False)
        return {f"steps of the {name} data": self.steps_per_epoch,
                f"number of batches of the {name} data": self.num_batches}

    @cached_property
    def _first_batch(self) -> Structure:
        given = self._given
        if isinstance(given, data_adapters.GeneratorDataAdapter):
            return given._first_batches[0]
        if isinstance(given, data_adapters.PyDatasetAdapter):
            return given._standardize_batch(given.py_dataset[0])
        try:
            return next(iter(some_batches(self._whole).take(1)))
        except NOT_UNDERSTOOD:
            return next(iter(self._whole.take(1)))


class ArrayAdapter(RankAdapter):
    """This rank's rows of arrays, in the order in which Keras takes them in one process.

    A `seed` draws a new order for each epoch. None: Keras' own order, which depends on the seed
    that the script has set, and is the same in each epoch.
    """

    num_batches: int = 0

    def __init__(self, given: Any, part: Part, growth: int, *, seed: int | None) -> None:
        self._given, self._part, self._growth, self._seed = given, part, growth, seed
        self._skip = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._samples, self._batch = int(given._num_samples), int(given._batch_size)
        last = self._samples % self._batch
        sizes = [n for n in (self._batch if self._samples >= self._batch else 0, last) if n]
        self.weighted = not all(part.is_even(n) for n in sizes)
        self.num_batches = int(given.num_batches) - (
            part.remainder == "drop" and 0 < last < part.size)
        self.batch_size = -(-self._batch // part.size)
        self._epoch = tf.Variable(0, dtype=tf.int64, trainable=False)
        with tf.device("CPU:0"):  # as tensors, to which a graph refers: else it would hold copies
            self._inputs = _for_each(
                lambda array: tf.convert_to_tensor(array) if isinstance(array, np.ndarray)
                else array, keras_like(array_slicing.convert_to_sliceable(
                    given._inputs, target_backend="tensorflow")))

    def get_tf_dataset(self) -> Any:
        full, width = self._samples // self._batch, max(1, int(self._part.count(self._batch)))
        last = self._samples % self._batch or self._batch
        weights = [float(self._part.weight(n)) for n in (self._batch, last)]

        @as_it_is
        def one_epoch(order: Any) -> Any:
            # All that can be is done once for an epoch, and not in each step.
            whole = tf.reshape(order[:full * self._batch], [full, self._batch])
            own = tf.reshape(self._own(whole), [-1])
            if self.num_batches > full:
                own = tf.concat([own, self._own(order[full * self._batch:])], 0)
            return tf.data.Dataset.range(self._skip, self.num_batches).map(lambda step: self._fetch(
                own[step * width:(step + 1) * width], tf.where(step < full, *weights)))
        return ready(self._orders().flat_map(one_epoch))

    def _orders(self) -> Any:
        """The numbers of all samples in the order of an epoch, as the only element."""
        shuffle, numbers = self._given._shuffle, tf.range(self._samples, dtype=tf.int64)
        if not shuffle:
            return tf.data.Dataset.from_tensors(numbers)
        if self._seed is None or shuffle == "batch":
            batches = data_adapters.ArrayDataAdapter(
                np.arange(self._samples), shuffle=shuffle,
                batch_size=self._batch if shuffle == "batch" else self._samples).get_tf_dataset()
            return batches.map(as_it_is(
                lambda found: found[0] if isinstance(found, tuple) else found)
                ).rebatch(self._samples)

        @as_it_is
        def drawn(_: Any) -> Any:
            seed = tf.stack([tf.constant(self._seed, tf.int64), tf.identity(self._epoch)])
            return tf.random.experimental.stateless_shuffle(numbers, seed=seed)
        return tf.data.Dataset.range(1).map(drawn)

    def _own(self, numbers: Any) -> Any:
        """This rank's part of the last axis, never empty: a rank without samples reads one."""
        samples = tf.cast(tf.shape(numbers)[-1], tf.int64)
        own = self._part.begin(samples) + tf.range(tf.maximum(self._part.count(samples), 1))
        return tf.gather(numbers, own % samples, axis=-1)

    def _fetch(self, rows: Any, weight: Any) -> Any:
        """The rows of this rank's part of a batch, with its weight where parts differ."""
        if self._samples % self._batch == 0:
            rows.set_shape([max(1, int(self._part.count(self._batch)))])
        batch = self._rows(rows)
        return (weight, batch) if self.weighted else batch

    def begin_at(self, epoch: int, step: int) -> None:
        """See `RankAdapter.begin_at`."""
        if self.steps_per_epoch:
            epoch, step = divmod(epoch * self.steps_per_epoch + step, self.num_batches)
        self._epoch.assign(epoch)
        self._skip.assign(step)

    def on_steps_done(self) -> None:
        super().on_steps_done()
        self._epoch.assign_add(1)

    def plan(self, model: Any = None) -> BatchPlan:
        """See `RankAdapter.plan`."""
        order, steps = "in order", self.steps_per_epoch
        if self._given._shuffle:
            order = ("shuffled as Keras does with the script's seed" if self._seed is None else
                     f"reshuffled each epoch (seed {self._seed})")
        return BatchPlan(
            rank=self._part.rank, size=self._part.size, global_batch=self._batch,
            steps=steps or self.num_batches, growth=self._growth, uneven=self.weighted,
            samples=steps * self._batch if steps else self._samples, order=order, divided="",
            stream_order=order)

    def one_sample(self) -> Structure:
        return self._rows(tf.constant([0], tf.int64))

    def compare(self, collective: Collective) -> dict[str, Any]:
        """See `RankAdapter.compare`."""
        some = tf.constant([0, self._samples // 2, self._samples - 1], tf.int64)
        check_alike(self._rows(some), collective, self.name, exactly=True, samples=self._samples)
        return {f"steps of the {self.name} data": self.steps_per_epoch,
                f"batch of the {self.name} data": self._batch}

    def _rows(self, rows: Any) -> Structure:
        def taken(array: Any) -> Any:
            if isinstance(array, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(array, rows)
            return tf.gather(array, rows, axis=0)
        return _for_each(taken, self._inputs)


def _for_each(function: Callable[[Any], Any], arrays: Structure) -> Structure:
    """Apply a function to each array; a sparse one is a tuple of tensors in Keras' adapter."""
    def visit(value: Any) -> Any:
        is_sparse = isinstance(value, array_slicing.TensorflowSparseWrapper)
        if value is None or (isinstance(value, (list, tuple, dict)) and not is_sparse):
            return None
        return function(value)
    return keras.tree.traverse(visit, arrays)

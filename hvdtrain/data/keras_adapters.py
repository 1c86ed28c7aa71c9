"""What Keras' `fit` is given, divided over the ranks: each takes its part of each batch.

Keras makes an adapter of its own of arrays, data sets and generators. Ours stands around it, so
that batches, their order and the calls of a data set's methods are those of one process. The
private parts of Keras' adapters that hvdtrain leans on are used in this module only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from hvdtrain.data.batch_plan import BatchPlan
from hvdtrain.data.divided import divided
from hvdtrain.data.part import Part
from hvdtrain.data.pipeline import ready
from hvdtrain.data.source import Structure, keras_like
from hvdtrain.data.stream_order import (
    check_order,
    checksums,
    first_before_shuffles,
    is_tuned,
    order_of,
    some_batch,
)
from hvdtrain.errors import DataError
from hvdtrain.log import get_logger


def is_arrays(x: Any) -> bool:
    """Whether Keras takes something as arrays."""
    return bool(array_data_adapter.can_convert_arrays((x,)))


def validation_split_of(arrays: tuple[Any, Any, Any], split: float) -> tuple[Any, Any]:
    """Arrays `(x, y, sample_weight)` without their last part, and that part, as Keras cuts them."""
    return tuple(array_slicing.train_validation_split(arrays, validation_split=split))


def unpacked(data: Any) -> tuple[Any, Any, Any]:
    """Validation data as Keras reads them: x, y and weights of samples, where there are some."""
    x, y, sample_weight = data_adapter_utils.unpack_x_y_sample_weight(data)
    return x, y, sample_weight


class RankAdapter(DataAdapter):  # type: ignore[misc]
    """This rank's part of the batches of one of Keras' own adapters.

    Args:
        given: Keras' adapter.
        part: This rank's part.
        batches_per_step: Integer, batches that are one global batch together.
        before_decoding: Boolean, as for `data.divided.divided`.
    """

    def __init__(self, given: Any, part: Part, *, batches_per_step: int = 1,
                 before_decoding: bool = True) -> None:
        self._given = given
        self._part = part
        self._grouped = batches_per_step
        self._whole = given.get_tf_dataset()
        self._divided = divided(self._whole, part, batches_per_step=batches_per_step,
                                before_decoding=before_decoding)
        self.weighted = self._divided.weighted
        """Whether the data are pairs `(weight, batch)`."""
        self._skip = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._first: Structure = None

    def get_tf_dataset(self) -> Any:
        """See Keras' `DataAdapter`."""
        dataset = (self._divided.skip(self._skip) if int(self._skip.numpy())
                   else self._divided.dataset)
        return ready(dataset, autotune=is_tuned(self._whole))

    def begin_at(self, epoch: int, step: int, *, steps_per_epoch: int | None) -> None:
        """Let the first iterator begin where a run goes on. Before Keras' `fit` is called.

        Args:
            epoch: Integer, epochs that were done.
            step: Integer, steps of the next one that were done.
            steps_per_epoch: Integer, where an iterator goes on from one epoch to the next.
        """
        if steps_per_epoch:
            step += epoch * steps_per_epoch
        else:
            for _ in range(epoch):  # a shuffle draws a new order each time it is iterated
                iter(self._divided.dataset)
        self._skip.assign(step)

    @property
    def num_batches(self) -> int | None:
        """See Keras' `DataAdapter`."""
        known: int | None = self._given.num_batches
        if known is None or self._divided.steps is not None:
            return self._divided.steps
        return -(-known // self._grouped)

    @property
    def batch_size(self) -> int | None:
        """See Keras' `DataAdapter`."""
        batch = self._divided.global_batch
        return None if batch is None else -(-batch // self._part.size)

    @property
    def has_partial_batch(self) -> bool | None:
        """See Keras' `DataAdapter`."""
        return None

    @property
    def partial_batch_size(self) -> int | None:
        """See Keras' `DataAdapter`."""
        return None

    def on_epoch_begin(self) -> None:
        """See Keras' `DataAdapter`."""
        self._given.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """See Keras' `DataAdapter`; it is called before the first epoch as well."""
        self._given.on_epoch_end()

    def on_steps_done(self) -> None:
        """An epoch of training has ended: the next iterator begins at the beginning."""
        self._skip.assign(0)

    def plan(self, steps_per_epoch: int | None) -> BatchPlan:
        """The steps of an epoch."""
        found, batch = self._divided, self._divided.global_batch
        is_pipeline = isinstance(self._given, data_adapters.TFDatasetAdapter)
        if batch is None and not is_pipeline:
            first = next(v for v in tf.nest.flatten(self._first_batch()) if v is not None)
            batch = int(np.shape(first)[0]) * self._grouped
        steps, samples = steps_per_epoch or self.num_batches, None
        if batch is not None and steps is not None and (steps_per_epoch or found.last_batch):
            samples = steps * batch
            if not steps_per_epoch:
                samples += (found.last_batch or 0) - batch
        return BatchPlan(
            rank=self._part.rank, size=self._part.size, global_batch=batch,
            steps=steps, samples=samples, growth=self._grouped, uneven=self.weighted,
            order="in the order of the data set",
            divided=found.why if is_pipeline else "every rank makes the whole batches",
            stream_order=repr(order_of(self._whole)))

    def one_sample(self) -> Structure:
        """One sample, with a first axis of length 1: its shapes and types are those of the data.

        A data set whose shapes are known is not read: iterating a shuffle once more would
        give the script another order.
        """
        spec = self._whole.element_spec
        if all(isinstance(s, tf.TensorSpec) and s.shape.rank and s.shape[1:].is_fully_defined()
               for s in tf.nest.flatten(spec)):
            return tf.nest.map_structure(
                lambda s: tf.fill([1, *s.shape[1:]], tf.zeros([], s.dtype)), keras_like(spec))
        return tf.nest.map_structure(lambda v: None if v is None else v[:1],
                                     _tensors(self._first_batch()))

    def compare(self, collective: Collective, name: str) -> dict[str, Any]:
        """Refuse data that differ between the ranks. All ranks.

        Returns:
            What must be equal on all ranks, by name.
        """
        if isinstance(self._given, data_adapters.TFDatasetAdapter):
            check_order(self._whole, first_before_shuffles(self._whole), collective, name)
        else:
            _check_alike(_tensors(self._first_batch()), collective, name, exactly=False)
        return {f"number of batches of the {name} data": self.num_batches}

    def _first_batch(self) -> Structure:
        given = self._given
        if isinstance(given, data_adapters.GeneratorDataAdapter):
            return given._first_batches[0]
        if self._first is None:
            self._first = (given._standardize_batch(given.py_dataset[0])
                           if isinstance(given, data_adapters.PyDatasetAdapter)
                           else some_batch(self._whole))
        return self._first


class ArrayAdapter(RankAdapter):
    """This rank's rows of arrays, in the order in which Keras takes them in one process.

    Args:
        given: Keras' adapter of the arrays.
        part: This rank's part.
        growth: Integer, how many times the batch of one process the global batch is.
        seed: Integer, draws an order for each epoch anew. None: Keras' own order, which depends
            on the seed that the script has set, and is the same in each epoch.
    """

    def __init__(self, given: Any, part: Part, *, growth: int = 1,
                 seed: int | None = None) -> None:
        self._given = given
        self._part = part
        self._grouped = growth
        self._seed = seed
        self._samples, self._batch = int(given._num_samples), int(given._batch_size)
        last = self._samples % self._batch
        sizes = [n for n in (self._batch if self._samples >= self._batch else 0, last) if n]
        self.weighted = not all(part.is_even(n) for n in sizes)
        self._steps = int(given.num_batches)
        if part.remainder == "drop" and 0 < last < part.size:
            self._steps -= 1
        self._skip = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._epoch = tf.Variable(0, dtype=tf.int64, trainable=False)
        with tf.device("CPU:0"):
            self._inputs = _for_each(_tensor, keras_like(array_slicing.convert_to_sliceable(
                given._inputs, target_backend="tensorflow")))

    def get_tf_dataset(self) -> Any:
        """See Keras' `DataAdapter`."""
        if self._given._shuffle == "batch":
            batches = self._order_of_keras(self._batch).take(self._steps)
            return ready(tf.data.Dataset.from_tensors(0).flat_map(
                lambda _: batches.skip(tf.identity(self._skip))).map(self._take))

        def one_epoch(order: Any) -> Any:
            return tf.data.Dataset.range(self._skip, self._steps).map(lambda step: self._take(
                order[step * self._batch:(step + 1) * self._batch]))
        return ready(self._orders().flat_map(one_epoch))

    def _orders(self) -> Any:
        """A dataset of one element: the numbers of all samples, in the order of an epoch."""
        numbers = tf.range(self._samples, dtype=tf.int64)
        if not self._given._shuffle:
            return tf.data.Dataset.from_tensors(numbers)
        if self._seed is None:
            return self._order_of_keras(self._samples)

        def drawn(_: Any) -> Any:
            seed = tf.stack([tf.constant(self._seed, tf.int64), tf.identity(self._epoch)])
            return tf.random.experimental.stateless_shuffle(numbers, seed=seed)
        return tf.data.Dataset.range(1).map(drawn)

    def _order_of_keras(self, batch: int) -> Any:
        """The numbers of the samples in batches of Keras' own adapter."""
        order = data_adapters.ArrayDataAdapter(
            np.arange(self._samples), batch_size=batch,
            shuffle=self._given._shuffle).get_tf_dataset()
        return order.map(lambda numbers: numbers[0] if isinstance(numbers, tuple) else numbers)

    def _take(self, numbers: Any) -> Any:
        samples = tf.size(numbers, tf.int64)
        rows = tf.gather(numbers, self._part.rows(samples))
        if self._samples % self._batch == 0:
            rows.set_shape([max(1, self._part.count(self._batch))])
        batch = _for_each(lambda array: _rows_of(array, rows), self._inputs)
        return (self._part.weight(samples), batch) if self.weighted else batch

    def begin_at(self, epoch: int, step: int, *, steps_per_epoch: int | None) -> None:
        """See `RankAdapter.begin_at`."""
        if steps_per_epoch:
            done = epoch * steps_per_epoch + step
            epoch, step = divmod(done, self._steps)
        self._epoch.assign(epoch)
        self._skip.assign(step)

    @property
    def num_batches(self) -> int | None:
        """See Keras' `DataAdapter`."""
        return self._steps

    @property
    def batch_size(self) -> int | None:
        """See Keras' `DataAdapter`."""
        return -(-self._batch // self._part.size)

    def on_steps_done(self) -> None:
        """See `RankAdapter.on_steps_done`."""
        self._epoch.assign_add(1)
        self._skip.assign(0)

    def plan(self, steps_per_epoch: int | None) -> BatchPlan:
        """See `RankAdapter.plan`."""
        shuffle = self._given._shuffle
        order = ("in order" if not shuffle else
                 f"reshuffled each epoch (seed {self._seed})" if self._seed is not None else
                 "shuffled as Keras does with the script's seed")
        return BatchPlan(
            rank=self._part.rank, size=self._part.size, global_batch=self._batch,
            steps=steps_per_epoch or self._steps,
            samples=steps_per_epoch * self._batch if steps_per_epoch else self._samples,
            growth=self._grouped, uneven=self.weighted, order=order, divided="",
            stream_order=order)

    def one_sample(self) -> Structure:
        """See `RankAdapter.one_sample`."""
        return self._rows([0])

    def compare(self, collective: Collective, name: str) -> dict[str, Any]:
        """See `RankAdapter.compare`."""
        _check_alike(self._rows([0, self._samples // 2, self._samples - 1]), collective, name,
                     exactly=True, samples=self._samples)
        return {f"batch of the {name} data": self._batch}

    def _rows(self, numbers: list[int]) -> Structure:
        return _for_each(lambda array: _rows_of(array, tf.constant(numbers, tf.int64)),
                         self._inputs)


def _for_each(function: Callable[[Any], Any], arrays: Structure) -> Structure:
    """A function of each array; one that is sparse is a tuple of tensors in Keras' adapter."""
    def visit(value: Any) -> Any:
        is_sparse = isinstance(value, array_slicing.TensorflowSparseWrapper)
        if value is None or (isinstance(value, (list, tuple, dict)) and not is_sparse):
            return None
        return function(value)
    return keras.tree.traverse(visit, arrays)


def _tensor(array: Any) -> Any:
    """An array as a tensor, which a graph refers to: else it would hold a copy."""
    return tf.convert_to_tensor(array) if isinstance(array, np.ndarray) else array


def _rows_of(array: Any, rows: Any) -> Any:
    """Some rows of one of the arrays of Keras' adapter, as its own `grab_batch` takes them."""
    if isinstance(array, array_slicing.TensorflowSparseWrapper):
        return array_slicing.slice_tensorflow_sparse_wrapper(array, rows)
    return tf.gather(array, rows, axis=0)


def _tensors(batch: Structure) -> Structure:
    def tensor(value: Any) -> Any:
        is_composite = isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
        return value if value is None or is_composite else tf.convert_to_tensor(value)
    return tf.nest.map_structure(tensor, keras_like(batch))


def _check_alike(some: Structure, collective: Collective, name: str, *, exactly: bool,
                 samples: int | None = None) -> None:
    """Refuse data of which some samples differ between the ranks. All ranks.

    Raises:
        DataError: On every rank. Floats that are not `exactly` equal are told in a warning.
    """
    if collective.size == 1:
        return
    dense = [v for v in tf.nest.flatten(some) if isinstance(v, tf.Tensor)]
    exact, floats = checksums(dense)
    shapes = [samples, *(v.shape[1:].as_list() for v in dense)]
    everyone = collective.gather_objects((exact, shapes, floats))
    compared = 3 if exactly else 2
    odd = next((rank for rank, theirs in enumerate(everyone)
                if theirs[:compared] != everyone[0][:compared]), None)
    if odd is not None:
        counts = ("" if samples is None else
                  f" ({everyone[odd][1][0]} samples, and {everyone[0][1][0]})")
        raise DataError(
            f"The {name} data of rank {odd} differ from those of rank 0{counts}. All ranks must be "
            "given the same data, of which each takes its part: read or make them with equal seeds "
            "on all ranks (hvdtrain.init() sets those of Python, NumPy and TensorFlow alike), and "
            "do not divide them yourself. Data of which each rank has its own: "
            "hvdtrain.StreamSource(make) with a function make(rank, size).")
    if collective.rank == 0 and any(theirs[2] != everyone[0][2] for theirs in everyone):
        get_logger().warning(
            "The first batch of the %s data differs between the ranks in its floats. That is right "
            "for random augmentation; else make the data alike on all ranks.", name)


def adapter_of(x: Any, y: Any = None, sample_weight: Any = None, *,  # noqa: D417
               part: Part,               batch_size: int | None = None, per_rank: bool = False,
               class_weight: Mapping[int, float] | None = None, shuffle: Any = False,
               steps: int | None = None, seed: int | None = None,
               before_decoding: bool = True) -> RankAdapter:
    """Whatever Keras' `fit`, `evaluate` and `predict` take, divided over the ranks.

    Args:
        x: As in Keras; so are y, sample_weight, class_weight and shuffle.
        part: This rank's part of a global batch.
        batch_size: Integer; as in Keras, of arrays only.
        per_rank: Boolean, what a batch is: of each rank, or of all ranks together.
        steps: Integer, the steps of an epoch.
        seed: Integer, as for `ArrayAdapter`.
        before_decoding: Boolean, as for `data.divided.divided`.

    Raises:
        ValueError: What Keras raises of data that it does not take.
    """
    grouped = part.size if per_rank else 1
    if per_rank and (batch_size is not None or steps is None):
        batch_size = (batch_size or DEFAULT_BATCH) * part.size
    given = data_adapters.get_data_adapter(
        x=x, y=y, sample_weight=sample_weight, batch_size=batch_size, steps_per_epoch=steps,
        shuffle=shuffle, class_weight=class_weight)
    if isinstance(given, RankAdapter):
        return given
    if isinstance(given, data_adapters.ArrayDataAdapter):
        return ArrayAdapter(given, part, growth=grouped, seed=seed)
    return RankAdapter(given, part, batches_per_step=grouped, before_decoding=before_decoding)

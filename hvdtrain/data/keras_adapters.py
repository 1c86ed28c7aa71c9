"""What Keras' `fit` is given, divided over the ranks: each takes its part of each batch.

Keras makes an adapter of its own of arrays, data sets and generators. Ours stands around it, so
that batches, their order and the calls of a data set's methods are those of one process. The
private parts of Keras' adapters that hvdtrain leans on are used here, in `array_adapter` and in
`given`.
"""

from __future__ import annotations

from typing import Any

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
            check_alike(_tensors(self._first_batch()), collective, name, exactly=False)
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


def _tensors(batch: Structure) -> Structure:
    def tensor(value: Any) -> Any:
        is_composite = isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
        return value if value is None or is_composite else tf.convert_to_tensor(value)
    return tf.nest.map_structure(tensor, keras_like(batch))


def check_alike(some: Structure, collective: Collective, name: str, *, exactly: bool,
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

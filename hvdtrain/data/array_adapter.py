"""`ArrayAdapter`: a rank's rows of arrays that Keras' `fit` is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing

from hvdtrain.collectives.base import Collective
from hvdtrain.data.batch_plan import BatchPlan
from hvdtrain.data.keras_adapters import RankAdapter, check_alike
from hvdtrain.data.part import Part
from hvdtrain.data.pipeline import ready
from hvdtrain.data.source import Structure, keras_like


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
                lambda _: batches.skip(tf.identity(self._skip))).map(
                    lambda numbers: self._fetch(self._own(numbers),
                                                self._part.weight(tf.size(numbers)))))
        full, width = self._samples // self._batch, max(1, int(self._part.count(self._batch)))
        last = self._samples % self._batch or self._batch
        weights = [float(self._part.weight(n)) for n in (self._batch, last)]

        def one_epoch(order: Any) -> Any:
            # All that can be is done once for an epoch, and not in each step.
            whole = tf.reshape(order[:full * self._batch], [full, self._batch])
            own = tf.reshape(tf.gather(whole, self._part.rows(self._batch), axis=1), [-1])
            if self._steps > full:
                own = tf.concat([own, self._own(order[full * self._batch:])], 0)
            return tf.data.Dataset.range(self._skip, self._steps).map(lambda step: self._fetch(
                own[step * width:(step + 1) * width], tf.where(step < full, *weights)))
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

    def _own(self, numbers: Any) -> Any:
        return tf.gather(numbers, self._part.rows(tf.size(numbers)))

    def _fetch(self, rows: Any, weight: Any) -> Any:
        """The rows of this rank's part of a batch, with its weight where parts differ."""
        if self._samples % self._batch == 0:
            rows.set_shape([max(1, int(self._part.count(self._batch)))])
        batch = _for_each(lambda array: _rows_of(array, rows), self._inputs)
        return (weight, batch) if self.weighted else batch

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
        check_alike(self._rows([0, self._samples // 2, self._samples - 1]), collective, name,
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

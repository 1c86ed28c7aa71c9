"""A pipeline that is divided over ranks: the parts are its batches, and each is decoded once."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.data.divided import divided
from hvdtrain.data.part import Part
from hvdtrain.errors import DataError

data = tf.data.Dataset
EPOCHS = 2


class Decoder:
    """A map whose Python function counts which samples it has seen."""

    def __init__(self):
        self.seen = Counter()

    def __call__(self, number, *rest):
        def decode(value):
            self.seen[int(value)] += 1
            return np.float32([value, 2 * value, 3])
        image = tf.numpy_function(decode, [tf.cast(number, tf.int64)], tf.float32)
        return (tf.ensure_shape(image, [3]), *rest) if rest else tf.ensure_shape(image, [3])


def flat(batch):
    """The samples of a batch, each as plain values."""
    columns = []
    for each in tf.nest.flatten(batch):
        if each is not None:
            each = tf.sparse.to_dense(each) if isinstance(each, tf.SparseTensor) else each
            columns.append(each.to_list() if isinstance(each, tf.RaggedTensor)
                           else each.numpy().tolist())
    return list(zip(*columns, strict=True))


def whole(make, per_step):
    """For each epoch the global batches, as plain samples."""
    tf.random.set_seed(7)
    made, found = make(), []
    for _ in range(EPOCHS):
        batches = [flat(batch) for batch in made]
        found.append([sum(batches[i:i + per_step], []) for i in range(0, len(batches), per_step)])
    return found


def split(make, size, rank, **options):
    tf.random.set_seed(7)
    part = Part(rank=rank, size=size, remainder=options.pop("remainder", "join"))
    return divided(make(), part, **options)


def read(how, dataset=None):
    """The weights and samples of what a rank reads."""
    return [(float(one[0]), flat(one[1])) if how.weighted else (1.0, flat(one))
            for one in (how.dataset if dataset is None else dataset)]


def check(make, size, *, early=True, per_step=1, **options):
    """The parts of all ranks together are the batches of the pipeline."""
    expected = whole(make, per_step)
    hows = [split(make, size, rank, batches_per_step=per_step, **options) for rank in range(size)]
    for epoch in expected:
        parts = [read(how) for how in hows]
        assert {len(part) for part in parts} == {len(epoch)}
        for step, batch in enumerate(epoch):
            joined = []
            for rank, how in enumerate(hows):
                weight, own = parts[rank][step]
                count = Part(rank=rank, size=size).count(len(batch))
                assert weight == pytest.approx(count * size / len(batch))
                assert len(own) == max(count, 1)
                joined += own[:count]
            assert joined == batch
    how = hows[-1]
    assert how.early == early, how.why
    assert how.steps in (None, len(expected[0]))
    assert how.global_batch in (None, max(map(len, expected[0])))
    assert how.last_batch in (None, len(expected[0][-1]))
    again = split(make, size, size - 1, batches_per_step=per_step, **options)
    assert read(again, again.skip(2)) == parts_in_first_epoch(make, size, per_step, options)[2:]
    return how


def parts_in_first_epoch(make, size, per_step, options):
    return read(split(make, size, size - 1, batches_per_step=per_step, **options))


def decodes(make, size):
    """How often each rank decodes samples in an epoch."""
    counts = []
    for rank in range(size):
        decoder = Decoder()
        how = divided(make(decoder), Part(rank=rank, size=size))
        decoder.seen.clear()
        for _ in how.dataset:
            pass
        counts.append(decoder.seen.total())
    return counts


def numbered(count=50):
    return data.from_tensor_slices((np.arange(count), np.arange(count) % 3))


def shuffled_first(decode=None):
    return numbered().shuffle(20).map(decode or Decoder()).batch(8).prefetch(2)


def shuffled_last(decode=None):
    return numbered().map(decode or Decoder(), num_parallel_calls=2).shuffle(20).batch(8)


def cached(decode=None):
    return numbered().map(decode or Decoder()).cache().batch(8)


def zipped(decode=None):
    images = data.range(50).map(decode or Decoder())
    labels = data.range(50).map(lambda x: {"a": x, "b": -x})
    return data.zip((images, labels)).shuffle(50, seed=3).batch(8)


def taken(decode=None):
    return numbered().map(decode or Decoder()).skip(3).take(41).repeat(2).batch(8)


def full_only(decode=None):
    return numbered().map(decode or Decoder()).batch(12, drop_remainder=True)


def in_batches(decode=None):
    made = numbered().map(decode or Decoder()).batch(8)
    return made.map(lambda x, y: (x / 2, tf.one_hot(y, 3))).shuffle(4).take(5).repeat(2)


def filtered(decode=None):
    kept = numbered().filter(lambda x, y: y != 1)
    return kept.map(decode or Decoder()).batch(7)


EARLY = [shuffled_first, shuffled_last, cached, zipped, taken, full_only, in_batches, filtered]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("make", EARLY)
def test_the_parts_are_the_batches(make, size):
    check(make, size)


@pytest.mark.parametrize("make", EARLY)
def test_each_sample_is_decoded_by_one_rank(make):
    one, = decodes(make, 1)
    for size in (2, 3):
        counts = decodes(make, size)
        assert sum(counts) == one, counts
        assert max(counts) - min(counts) <= 1 + one // 8

"""Streams in one process."""

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.data.plans import StreamPlan
from hvdtrain.data.stream import stream_dataset


@pytest.mark.parametrize("counts", [(9, 12), (12, 9), (9, 9), (8, 8)])
def test_a_stream_that_changes_is_noticed_before_its_epoch_ends(counts):
    """Also in the last epoch, when nobody asks for the next one."""
    own = counts[0]
    length = [own]
    source = hvdtrain.StreamSource(lambda rank, size: iter(np.arange(length[0])))
    plan = StreamPlan(counts=counts, rank=0, batch_per_rank=4)
    full = [list(range(own))[i:i + 4] or [0] for i in range(0, 4 * plan.steps, 4)]
    for first_step in (0, plan.steps - 1):
        steps = stream_dataset(source, plan, first_step=first_step).take(plan.steps - first_step)
        found = [one[1] if plan.uneven else one for one in steps.as_numpy_iterator()]
        assert [batch.tolist() for batch in found] == full[first_step:]
        for change in (-1, 1, 5):
            length[0] = own + change
            with pytest.raises(tf.errors.InvalidArgumentError, match="the stream changed"):
                list(steps)
        length[0] = own


def decoded(count, seen, filtered):
    numbers = tf.data.Dataset.range(count)
    if filtered:
        numbers = numbers.filter(lambda number: number >= 0)

    def decode(number):
        def call(value):
            seen.append(int(value))
            return value
        return tf.ensure_shape(tf.numpy_function(call, [number], tf.int64), [])
    return numbers.map(decode).shuffle(count, seed=3)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_a_rank_decodes_its_own_samples_and_counts_without_decoding(filtered, batched):
    expected = [int(x) for x in decoded(20, [], filtered)]
    for size in (1, 2, 3):
        for rank in range(size):
            seen = []
            samples = decoded(20, seen, filtered)
            source = hvdtrain.StreamSource(samples.batch(4).prefetch(1) if batched else samples)
            assert source.count(rank, size) == len(expected[rank::size])
            assert not seen
            if not filtered:  # else it was iterated to be counted
                share = [int(x) for x in source.samples(rank, size)]
                assert share == expected[rank::size]
            seen.clear()
            assert len(list(source.samples(rank, size))) == len(seen) == len(expected[rank::size])


def test_a_stream_begins_later_without_decoding_what_is_before():
    seen = []
    source = hvdtrain.StreamSource(decoded(20, seen, filtered=False))
    plan = StreamPlan(counts=(20,), rank=0, batch_per_rank=4)
    source.first()
    seen.clear()
    assert len(list(stream_dataset(source, plan, first_step=4, epochs=1))) == 1
    assert len(seen) == 4


def test_a_rank_keeps_the_samples_of_its_share_in_memory():
    seen = []
    numbers = tf.data.Dataset.range(20).map(lambda number: tf.ensure_shape(tf.numpy_function(
        lambda value: (seen.append(int(value)), value)[1], [number], tf.int64), []))
    source = hvdtrain.StreamSource(numbers.cache().map(lambda number: number * 2))
    source.first()
    seen.clear()
    plan = StreamPlan(counts=(10, 10), rank=1, batch_per_rank=5)
    batches = stream_dataset(source, plan, epochs=3)
    found = [one.tolist() for one in batches.as_numpy_iterator()]
    assert found == 3 * [[2, 6, 10, 14, 18], [22, 26, 30, 34, 38]]
    assert seen == list(range(1, 20, 2))


def test_divide_decides_whether_a_rank_decodes_the_samples_of_others():
    """`batches`: random augmentation is then that of one process."""
    from hvdtrain.config import TrainConfig
    from hvdtrain.session import Session
    from hvdtrain.train.feed import SourceFeed
    decoded = []

    def decode(number):
        decoded.append(int(number))
        return np.float32(number)
    for divide, expected in (("samples", {1, 3, 5}), ("batches", {0, 1, 2, 3, 4, 5})):
        stream = hvdtrain.StreamSource(tf.data.Dataset.range(6).map(
            lambda n: tf.ensure_shape(tf.numpy_function(decode, [n], tf.float32), [])))
        session = Session(world=None, collective=None, choice=None, devices=None)
        SourceFeed(stream, session, TrainConfig(divide=divide))
        decoded.clear()
        assert [float(s) for s in stream.samples(1, 2)] == [1, 3, 5]
        assert set(decoded) == expected

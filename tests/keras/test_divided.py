"""A pipeline that is divided over ranks: the parts are its batches, and each is decoded once."""

import time
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.data.divided import divided
from hvdtrain.data.plans import Part
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
            for rank in range(size):
                weight, own = parts[rank][step]
                count = Part(rank=rank, size=size).count(len(batch))
                assert weight == pytest.approx(count * size / len(batch))
                assert len(own) == max(count, 1)
                joined += own[:count]
            assert joined == batch
    how = hows[-1]
    assert how.early == early, how.why
    assert how.steps in (None, len(expected[0]))
    assert how.global_batch is None or len(expected[0]) == 1 or (
        how.global_batch == max(map(len, expected[0])))
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


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make", EARLY)
def test_the_parts_are_the_batches(make, size):
    check(make, size)


@pytest.mark.parametrize("make", EARLY)
def test_each_sample_is_decoded_by_one_rank(make):
    one, = decodes(make, 1)
    for size in (2, 3):
        counts = decodes(make, size)
        # A rank that has none of a batch decodes one sample that does not count.
        assert one <= sum(counts) <= one + size - 1, counts
        assert max(counts) - min(counts) <= 1 + one // 8


def test_images_of_a_folder(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(21):
        path = tmp_path / f"class_{number % 3}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        keras.utils.save_img(path, rng.integers(0, 255, (9, 9, 3)), scale=False)

    def make():
        return keras.utils.image_dataset_from_directory(
            tmp_path, image_size=(6, 5), batch_size=8, seed=3, verbose=False)

    def rescaled():
        scale = keras.layers.Rescaling(1 / 255)
        return make().map(lambda x, y: (scale(x), y)).prefetch(tf.data.AUTOTUNE)

    def weighted_classes():
        from keras.src.trainers.data_adapters import tf_dataset_adapter
        classes = {0: 1.0, 1: 2.0, 2: 5.0}
        return tf_dataset_adapter.TFDatasetAdapter(make(), classes).get_tf_dataset()
    for each in (make, rescaled, weighted_classes):
        for size in (2, 3):
            assert check(each, size).global_batch == 8
    assert check(weighted_classes, 2).why.count("map") >= 1


def test_texts_of_a_folder_become_numbers_after_the_batch(tmp_path):
    for number in range(20):
        path = tmp_path / f"class_{number % 2}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(" ".join(["ab", "cd", "ef", "gh"][: 1 + number % 4]))
    texts = keras.utils.text_dataset_from_directory(tmp_path, batch_size=6, seed=2, verbose=False)
    fixed = keras.layers.TextVectorization(20, output_sequence_length=5)
    fixed.adapt(texts.map(lambda x, y: x))
    longest = keras.layers.TextVectorization(20)
    longest.set_vocabulary(fixed.get_vocabulary())

    def make(layer=fixed):
        made = keras.utils.text_dataset_from_directory(
            tmp_path, batch_size=6, seed=2, verbose=False)
        return made.map(lambda x, y: (layer(x), y), num_parallel_calls=2)
    check(make, 2)
    check(make, 3)
    how = check(lambda: make(longest), 2, early=False)
    assert "may pad to the longest sample" in how.why


def test_records_of_several_files(tmp_path):
    files = [str(tmp_path / f"{number}.tfrecord") for number in range(3)]
    for number, file in enumerate(files):
        with tf.io.TFRecordWriter(file) as writer:
            for index in range(9 + number):
                feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[number, index]))
                writer.write(tf.train.Example(features=tf.train.Features(
                    feature={"x": feature})).SerializeToString())
    spec = {"x": tf.io.FixedLenFeature([2], tf.int64)}

    def make(decode=None):
        made = data.from_tensor_slices(files).shuffle(3).interleave(
            tf.data.TFRecordDataset, num_parallel_calls=2)
        made = made.map(lambda one: tf.io.parse_single_example(one, spec), num_parallel_calls=2)
        return made.map(lambda one: (one["x"], one["x"][0])).shuffle(10, seed=1).batch(7)
    for size in (1, 3):
        how = check(make, size)
        assert how.steps is None
        assert how.weighted == (size > 1)


def padded():
    made = data.range(1, 18).map(lambda x: (tf.fill([x % 5], x), x))
    return made.padded_batch(4, ([6], []), (tf.constant(-1, tf.int64), tf.constant(0, tf.int64)))


def padded_to_the_longest():
    return data.range(1, 18).map(lambda x: (tf.fill([x % 5], x), x)).padded_batch(4)


def generated():
    def samples():
        for number in range(17):
            yield {"a": np.full(number % 3, number), "b": number}
    spec = {"a": tf.TensorSpec([None], tf.int64), "b": tf.TensorSpec([], tf.int64)}
    return data.from_generator(samples, output_signature=spec).padded_batch(5)


def generated_and_mapped():
    made = data.from_generator(lambda: iter(range(17)),
                               output_signature=tf.TensorSpec([], tf.int64))
    return made.map(lambda x: {"x": x, "deep": (x + 1, [x, -x])}).batch(5)


def generated_batches():
    def batches():
        for size in (4, 4, 1, 3):
            yield np.arange(size), np.ones(size)
    return data.from_generator(batches, output_signature=(
        tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.float64)))


def ragged():
    x = tf.ragged.constant([[1, 2], [], [3], [4, 5, 6], [7]])
    made = data.from_tensor_slices((x, range(5)))
    return made.map(lambda x, y: (x * 2, y, None)).ragged_batch(3)


def ragged_after():
    return data.range(11).map(lambda x: (tf.RaggedTensor.from_tensor(tf.fill([x % 3, 2], x)), x)
                              ).batch(4)


def sparse():
    dense = np.diag(np.arange(1.0, 8.0))
    return data.from_tensor_slices((tf.sparse.from_dense(dense), np.arange(7), None)).batch(3)


def sparse_after():
    return data.range(7).map(lambda x: (tf.sparse.from_dense(tf.one_hot(x, 7)), x)).batch(3)


def with_nothing():
    return data.from_tensor_slices((np.arange(11), None, np.arange(11.0))).map(
        lambda x, y, w: (x * 2, y, w)).batch(4)


def random_batches():
    flip = keras.layers.RandomFlip(seed=3)
    images = data.range(22).map(lambda x: tf.reshape(tf.range(12.0), [2, 2, 3]) + tf.cast(
        x, tf.float32))
    return images.batch(4).map(lambda x: flip(x, training=True)).map(
        lambda x: x + tf.random.uniform([]))


def mixed_up():
    return data.range(22).map(lambda x: x * 2).batch(4).map(lambda x: x + x[::-1])


def centred():
    return data.range(22).map(lambda x: tf.cast(x, tf.float32)).batch(4).map(
        lambda x: x - tf.reduce_mean(x))


def cached_then_shuffled():
    return data.range(22).map(lambda x: x * 2).cache().shuffle(22).map(lambda x: x + 1).batch(4)


def windows():
    return data.range(22).map(lambda x: x + 1).window(3, shift=1, drop_remainder=True).flat_map(
        lambda one: one.batch(3)).batch(4)


def in_a_file():
    return data.range(22).map(lambda x: x + 1).filter(lambda x: x > 2).concatenate(
        data.range(3)).batch(4).unbatch().batch(5)


def with_options():
    options = tf.data.Options()
    options.autotune.enabled = False
    made = data.range(22).map(lambda x: x * 2, num_parallel_calls=2).with_options(options)
    return made.shard(2, 1).batch(4).map(lambda x: {"x": x}).apply(
        tf.data.experimental.assert_cardinality(3))


@pytest.mark.parametrize(("make", "early"), [
    (padded, True), (padded_to_the_longest, False), (generated, False),
    (generated_and_mapped, True), (generated_batches, False), (ragged, False), (ragged_after, True),
    (sparse, False), (sparse_after, True), (with_nothing, True), (random_batches, False),
    (mixed_up, False), (centred, False), (cached_then_shuffled, True), (windows, False),
    (in_a_file, False), (with_options, True)])
def test_any_pipeline(make, early):
    check(make, 3, early=early)


@pytest.mark.parametrize("make", [shuffled_first, in_batches, full_only, padded, 
                                  generated_and_mapped, generated_batches, ragged, sparse,
                                  with_nothing, random_batches])
def test_several_batches_are_one_global_batch(make):
    early = make in (shuffled_first, full_only, padded, generated_and_mapped, with_nothing)
    check(make, 2, per_step=2, early=early)


@pytest.mark.parametrize("make", [shuffled_first, in_batches, generated, sparse])
def test_late_division_on_request(make):
    how = check(make, 2, early=False, before_decoding=False)
    assert how.why.startswith("each whole batch is divided")


def test_batches_of_different_widths_are_padded_together():
    def make():
        return data.from_generator(lambda: (np.full([2, width], width) for width in (1, 3, 2)),
                                   output_signature=tf.TensorSpec([2, None], tf.int64))
    expected = [[[1, 0, 0], [1, 0, 0], [3, 3, 3], [3, 3, 3]], [[2, 2], [2, 2]]]
    found = [[one.numpy().tolist() for one in split(
        make, 2, rank, batches_per_step=2).dataset] for rank in range(2)]
    assert [sum(parts, []) for parts in zip(*found, strict=True)] == expected


@pytest.mark.parametrize("make", [shuffled_first, generated_and_mapped, generated_batches, sparse,
                                  in_batches, mixed_up])
def test_padding_repeats_samples_and_dropping_leaves_them_out(make):
    for size in (2, 3) if make is shuffled_first else (3,):
        expected, = whole(make, 1)[:1]
        padded = [split(make, size, rank, remainder="pad") for rank in range(size)]
        dropped = [split(make, size, rank, remainder="drop") for rank in range(size)]
        assert not any(how.weighted for how in [*padded, *dropped])
        for step, parts in enumerate(zip(*map(read, padded), strict=True)):
            joined, batch = sum((part[1] for part in parts), []), expected[step]
            assert len({len(part[1]) for part in parts}) == 1
            assert joined == (batch * 3)[:-(-len(batch) // size) * size]
        kept = [batch for batch in expected if len(batch) >= size]
        assert dropped[0].steps in (None, len(kept))
        assert dropped[0].last_batch in (None, len(kept[-1]))
        for batch, *parts in zip(kept, *map(read, dropped), strict=True):
            assert sum((part[1] for part in parts), []) == batch[:len(batch) // size * size]
        again = split(make, size, 0, remainder="drop")
        assert read(again, again.skip(2)) == read(split(make, size, 0, remainder="drop"))[2:]


def test_it_begins_later_without_decoding_what_is_before():
    decoder = Decoder()
    how = divided(shuffled_first(decoder), Part(rank=0, size=2))
    for steps in (4, tf.constant(4), tf.Variable(4)):
        decoder.seen.clear()
        assert len(list(how.skip(steps))) == 3
        assert decoder.seen.total() == 9
    begin = tf.Variable(5)
    later = how.skip(begin)
    assert len(list(later)) == 2
    begin.assign(0)
    assert len(list(later)) == 7
    cut = divided(cached(), Part(rank=0, size=2)).skip(3)
    assert [flat(one[1]) for one in cut] == [flat(one[1]) for one in cut]


def test_the_shuffles_go_on_between_what_begins_later_and_what_begins_at_once():
    tf.random.set_seed(7)
    first, second = whole(shuffled_last, 1)
    how = split(shuffled_last, 1, 0)
    assert [own for _, own in read(how, how.skip(2))] == first[2:]
    assert [own for _, own in read(how)] == second


def augmented(seed=None):
    return data.range(24).map(lambda x: (x, tf.random.uniform([], seed=seed))).batch(8)


@pytest.mark.parametrize("seed", [None, 4])
def test_random_steps_draw_other_numbers_on_each_rank(seed):
    def make():
        return augmented(seed)
    parts = [read(split(make, 2, rank)) for rank in range(2)]
    assert parts == [read(split(make, 2, rank)) for rank in range(2)]
    one = [sample for _, own in read(split(make, 1, 0)) for sample in own]
    assert one == sum(whole(make, 1)[0], [])
    drawn = [[number for _, own in part for _, number in own] for part in parts]
    assert len({*drawn[0], *drawn[1]}) == 24
    assert [[x for _, own in part for x, _ in own] for part in parts] == [
        [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19], [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]]


def test_random_steps_that_keep_their_state_in_variables_are_made_for_all_samples():
    flip = keras.layers.RandomFlip(seed=1)

    def make():
        return data.range(8).map(lambda x: flip(tf.fill([1, 2, 2, 1], tf.cast(x, tf.float32)))[0]
                                 ).batch(4)
    how = check(make, 2, early=False)
    assert "keeps a state" in how.why


def test_dividing_draws_from_no_generator():
    def drawn():
        import random
        return (random.random(), np.random.random(), float(tf.random.uniform([])),
                float(data.range(99).shuffle(99).take(1).get_single_element()),
                float(next(iter(augmented()))[1][0]))
    found = []
    for divides in (False, True):
        keras.utils.set_random_seed(5)
        pipelines = [shuffled_last(), augmented(), augmented(3), in_batches(), zipped()]
        if divides:
            for made in pipelines:
                for _ in divided(made, Part(rank=1, size=2)).dataset:
                    pass
        found.append(drawn())
    assert found[0] == found[1]


def test_samples_are_refused():
    with pytest.raises(DataError, match=r"call dataset.batch\(batch_size\) before"):
        divided(data.range(5), Part(rank=0, size=2))


def test_ranks_take_from_one_order_where_the_pipeline_asks_for_none():
    def slow_first(x):
        return tf.cond(x % 4 == 0, lambda: tf.numpy_function(
            lambda v: (time.sleep(0.01), v)[1], [x], tf.int64), lambda: x)

    def make():
        made = data.range(40).map(slow_first, num_parallel_calls=4, deterministic=False)
        options = tf.data.Options()
        options.deterministic = False
        return made.map(lambda x: tf.ensure_shape(x, [])).batch(8).with_options(options)
    parts = [read(split(make, 2, rank)) for rank in range(2)]
    assert sorted(x for part in parts for _, own in part for x, in own) == list(range(40))


def test_it_begins_later_within_a_pipeline_over_epochs():
    first, second = whole(shuffled_last, 1)
    for rank in range(2):
        how = split(shuffled_last, 2, rank)
        begins = data.from_tensor_slices(np.int64([5, 0]))
        found = [own for _, own in read(how, begins.flat_map(how.skip))]
        part = Part(rank=rank, size=2)
        assert found == [batch[part.begin(len(batch)):][:part.count(len(batch))]
                         for batch in [*first[5:], *second]]


def test_no_seed_was_ever_set(monkeypatch):
    from tensorflow.python.eager import context
    monkeypatch.setattr(context.context(), "_seed", None)
    monkeypatch.delattr(context.context(), "_rng", raising=False)
    how = divided(in_batches(), Part(rank=1, size=2))
    assert how.early, how.why
    assert len(list(how.dataset)) == how.steps == 10

"""Whole files for each rank: which, what is read of them, in which order, what is refused."""

import gzip

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.config import TrainConfig
from hvdtrain.data.by_file import deal
from hvdtrain.data.pipeline import training_dataset
from hvdtrain.data.plans import StreamPlan
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.optim.distributed import DistributedOptimizer
from hvdtrain.train.feed import SourceFeed
from hvdtrain.train.schedule import learning_rates

FEATURES = {"x": {"shape": [2]}, "y": {"dtype": "int64"}}
LENGTHS = (5, 30, 12, 1, 21)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))


def write_records(path, numbers):
    """Sample i is ([i, -i], i % 3)."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for i in numbers:
            writer.write(tf.train.Example(features=tf.train.Features(feature={
                "x": tf.train.Feature(float_list=tf.train.FloatList(value=[i, -i])),
                "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[i % 3])),
            })).SerializeToString())


@pytest.fixture
def folder(tmp_path):
    """Files `a` to `e` with the samples 0-4, 5-34, 35-46, 47, 48-68."""
    ends = np.cumsum([0, *LENGTHS])
    for name, begin, end in zip("abcde", ends, ends[1:], strict=False):
        write_records(tmp_path / f"{name}.tfrecord", range(begin, end))
    return tmp_path


def load(files):
    return hvdtrain.load_tfrecord(files, FEATURES, target="y")


def shares_of(folder, load=load):
    return hvdtrain.by_file(str(folder / "*.tfrecord"), load)


def numbers_of(batches):
    return [np.asarray(batch[0])[:, 0].astype(int).tolist() for batch in batches]


class Everyone:
    """Two ranks in turn: `gather_objects` gives what rank 1 would have sent as well."""

    rank, size = 0, 2

    def __init__(self, change):
        self.change = change

    def gather_objects(self, value):
        return [value, self.change(value)]


def test_the_largest_file_goes_to_the_rank_with_the_fewest_bytes():
    assert deal([5, 30, 12, 1, 21], 2) == [[0, 1], [2, 3, 4]]
    assert deal([7, 7, 7, 7], 3) == [[0, 3], [1], [2]]
    assert deal([0, 0, 5], 3) == [[2], [0], [1]], "each rank has a file, of whatever size"
    sizes = np.random.default_rng(0).integers(1, 1000, 500).tolist()
    shares = deal(sizes, 7)
    assert sorted(file for share in shares for file in share) == list(range(500))
    totals = [sum(sizes[file] for file in share) for share in shares]
    assert max(totals) - min(totals) < 10


def test_each_rank_opens_and_reads_its_own_files_only(folder):
    opened = []

    def noting(files):
        opened.append([file.stem for file in files])
        return hvdtrain.weighted(load(files), {1: 2.0})
    for rank, own in ((0, "ab"), (1, "cde")):
        source = shares_of(folder, noting)
        assert source.bytes_read == source.index_bytes_read == 0
        counts = (35, 34)
        assert source.count(rank, 2) == counts[rank]
        plan = StreamPlan(counts=counts, rank=rank, batch_per_rank=8, shuffle=True)
        before = source.bytes_read
        assert source.index_bytes_read == 12 * counts[rank]
        rows = plan.order(0)
        weights = source.shard(rank, 2).read(rows)[2]
        assert set(weights.tolist()) == {1.0, 2.0}
        size = sum((folder / f"{name}.tfrecord").stat().st_size for name in own)
        assert source.bytes_read - before == size
    assert opened == [["a", "b"], ["c", "d", "e"]], "each once"


def test_orders_are_of_the_seed_the_epoch_and_the_rank(folder):
    source = shares_of(folder)
    counts = tuple(source.count(rank, 2) for rank in (0, 1))
    plans = {rank: StreamPlan(counts=counts, rank=rank, batch_per_rank=8, seed=3, shuffle=True)
             for rank in (0, 1)}
    assert not np.array_equal(plans[0].order(0)[:20], plans[1].order(0)[:20])
    seen = {}
    for rank, own in ((0, range(35)), (1, range(35, 69))):
        share, plan = source.shard(rank, 2), plans[rank]
        batches = list(training_dataset(share, plan).take(2 * plan.steps).as_numpy_iterator())
        weights, seen[rank] = zip(*batches, strict=True)
        epochs = [np.concatenate(numbers_of(seen[rank][e * 5:e * 5 + 5])) for e in (0, 1)]
        for epoch in (0, 1):
            assert sorted(epochs[epoch]) == list(own)
            np.testing.assert_array_equal(epochs[epoch], own[0] + plan.order(epoch))
        assert not np.array_equal(*epochs)
        np.testing.assert_allclose(weights[:5], plan.weights())
        late = training_dataset(share, plan, first_epoch=1, first_step=3).take(3)
        resumed = [batch for _, batch in late.as_numpy_iterator()]
        assert numbers_of(resumed[:2]) == numbers_of(seen[rank][8:])
        assert np.isin(numbers_of(resumed)[2], list(own)).all(), "and then the next epoch"
    assert list(StreamPlan(counts=(3, 4), rank=1, batch_per_rank=2).order(5)) == [0, 1, 2, 3]
    np.testing.assert_array_equal(numbers_of(source.batches(1, 2, 34)), [list(range(35, 69))])


def test_a_resumed_epoch_reads_nothing_over(folder):
    source = shares_of(folder)
    plan = StreamPlan(counts=(source.count(0, 1), ), rank=0, batch_per_rank=23, shuffle=True)
    before = source.bytes_read
    options = tf.data.Options()
    options.autotune.enabled = False
    late = training_dataset(source.shard(0, 1), plan, first_step=2).with_options(options)
    next(iter(late))
    total = sum(file.stat().st_size for file in source.files)
    # The third step, and those of the next epoch that are read ahead: not 0 and 1 of this one.
    assert source.bytes_read - before < 4 * total


def test_a_share_that_has_ended_goes_on_with_one_sample_of_weight_0(folder):
    share = shares_of(folder).shard(1, 2)
    plan = StreamPlan(counts=(50, 34), rank=1, batch_per_rank=16)
    weights, batches = zip(*training_dataset(share, plan).take(5).as_numpy_iterator(), strict=True)
    assert [len(batch[0]) for batch in batches] == [16, 16, 2, 1, 16]
    np.testing.assert_allclose(weights, [1, 1, 2 / 9, 0, 1])


def test_what_cannot_be_shared_by_file(folder):
    source = shares_of(folder)
    with pytest.raises(DataError, match=r"5 files for 6 ranks.*shard = \"sample\""):
        source.count(0, 6)
    with pytest.raises(DataError, match="No file is named"):
        hvdtrain.by_file(str(folder / "*.csv"), load)
    with pytest.raises(DataError, match="own files only. Give the weights"):
        shares_of(folder, lambda files: hvdtrain.weighted(load(files), "balanced")).count(0, 1)
    assert hvdtrain.weighted(load(str(folder / "*.tfrecord")), "balanced").class_weight
    with pytest.raises(DataError, match="must return a hvdtrain.Source"):
        shares_of(folder, lambda files: hvdtrain.StreamSource(lambda r, s: iter([1]))).count(0, 1)
    with pytest.raises(DataError, match="samples that are read by number"):
        hvdtrain.weighted(source, {0: 1.0})


@pytest.mark.parametrize(("key", "value", "words"), [
    ("number of files", 4, "number of files is 5 on rank 0 and 4 on rank 1"),
    ("structure of a sample", "x", "structure of a sample")])
def test_ranks_that_see_other_files_are_refused(folder, key, value, words):
    def change(sent):
        return {**sent, key: value} if isinstance(sent, dict) else sent
    with pytest.raises(ConfigError, match=words):
        shares_of(folder).count_everywhere(Everyone(change))


def test_a_rank_that_cannot_open_its_files_is_named_everywhere(folder):
    def change(sent):
        return "c.tfrecord is damaged." if sent is None else sent
    with pytest.raises(DataError, match="Rank 1 cannot open its files. c.tfrecord is damaged"):
        shares_of(folder).count_everywhere(Everyone(change))


def test_a_damaged_record_of_a_share_is_skipped_or_named(folder):
    damaged = bytearray((folder / "c.tfrecord").read_bytes())
    damaged[-20] ^= 1
    (folder / "c.tfrecord").write_bytes(bytes(damaged))
    source = hvdtrain.by_file(str(folder / "*.tfrecord"), lambda files: hvdtrain.load_tfrecord(
        files, FEATURES, target="y", on_error="skip"))
    assert source.count(1, 2) == 34
    assert np.flatnonzero(source.shard(1, 2).read(np.arange(34))[2] == 0).tolist() == [11]
    with pytest.raises(DataError, match=r"c\.tfrecord, offset"):
        shares_of(folder).shard(1, 2).read(np.arange(34))


def compiled():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Rescaling(0.01), keras.layers.Dense(3, "softmax")])
    model.compile(DistributedOptimizer(keras.optimizers.Adam(0.01)),
                  "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    return model


def weights_of(model):
    return np.concatenate([w.ravel() for w in model.get_weights()])


def test_settings_of_the_run_decide_the_order(folder, one_rank):
    def plan(source, **config):
        return SourceFeed(source, one_rank, TrainConfig(**config)).plan(keras.Sequential())
    assert plan(shares_of(folder), seed=7).shuffle
    assert plan(shares_of(folder), seed=7).seed == 7
    assert not plan(shares_of(folder), shuffle=False).shuffle
    assert not plan(hvdtrain.StreamSource(lambda r, s: iter([1.0])), seed=7).shuffle


def test_fit_and_evaluate_in_one_process(folder, capsys):
    """In order of files one rank trains on by_file as on the files themselves."""
    config = TrainConfig(epochs=2, batch_per_rank=8, shuffle=False, remainder="join")
    ours, plain = compiled(), compiled()
    shuffled = compiled()
    result = hvdtrain.fit(
        ours, shares_of(folder), validation_data=shares_of(folder), config=config)
    expected = hvdtrain.fit(
        plain, load(str(folder / "*.tfrecord")), validation_data=load(str(folder / "*.tfrecord")),
        config=config)
    np.testing.assert_allclose(weights_of(ours), weights_of(plain), atol=1e-6)
    np.testing.assert_allclose(result.history["val_loss"], expected.history["val_loss"], rtol=1e-5)
    found, read = (hvdtrain.evaluate(ours, data, return_dict=True)["accuracy"]
                   for data in (shares_of(folder), load(str(folder / "*.tfrecord"))))
    assert found == pytest.approx(read)
    capsys.readouterr()
    hvdtrain.fit(shuffled, shares_of(folder), config=TrainConfig(epochs=2, batch_per_rank=8))
    assert "reshuffled each epoch within the files of each rank" in capsys.readouterr().out
    assert np.abs(weights_of(shuffled) - weights_of(ours)).max() > 1e-5


def test_unpacked_arrays_of_a_share_are_trained_on(folder):
    config = TrainConfig(batch_per_rank=8)
    ours, plain = compiled(), compiled()
    hvdtrain.fit(
        ours, shares_of(folder, lambda files: hvdtrain.unpacked(load(files))), config=config)
    hvdtrain.fit(plain, shares_of(folder), config=config)
    np.testing.assert_array_equal(weights_of(ours), weights_of(plain))
    samples = list(shares_of(folder).samples(1, 2).as_numpy_iterator())
    assert [int(x[0]) for x, _ in samples] == list(range(35, 69))


def test_the_learning_rate_of_a_run_by_files(folder):
    config = TrainConfig(batch_per_rank=8, lr_scaling="none")
    model = compiled()
    model.build((None, 2))
    for source, size, steps in ((shares_of(folder), 2, 5), (shares_of(folder), 5, 4),
                                (hvdtrain.StreamSource(tf.data.Dataset.range(33)), 2, 3)):
        curve = learning_rates(model, source, config, size=size, base="0.01")
        assert curve.steps_per_epoch == steps


def test_job_files_share_by_file(folder):
    from hvdtrain.entry import call, resolve
    from hvdtrain.job import Named
    from hvdtrain.zoo import DATASETS

    def splits(name, **arguments):
        named = Named(name=name, arguments=arguments)
        return call(resolve(named, DATASETS, "data set", folder), named, "[data]")
    pattern = str(folder / "*.tfrecord")
    given = {"path": pattern, "features": FEATURES, "target": "y"}
    found = splits("tfrecord", **given, shard="file", validation=pattern,
                   class_weight={"1": 2.0})
    assert found.train.count(1, 2) == 34
    assert found.train.shard(1, 2).read(np.arange(2))[2].tolist() == [1.0, 1.0]
    assert len(found.validation) == 69
    for name in "ab":
        np.savetxt(folder / f"{name}.csv", np.arange(6).reshape(3, 2), delimiter=",",
                   header="u,v", comments="")
    assert splits("csv", path=str(folder / "*.csv"), target="v", shard="file").train.count(1, 2) \
        == 3
    with pytest.raises(ConfigError, match="shard must be 'sample' or 'file'. Received: 'files'"):
        splits("tfrecord", **given, shard="files")


def test_only_the_files_of_a_rank_are_unpacked(folder):
    for file in folder.glob("*.tfrecord"):
        with gzip.open(file.with_suffix(".gz"), "wb") as stream:
            stream.write(file.read_bytes())
    source = hvdtrain.by_file(str(folder / "*.gz"), load)
    assert source.count(1, 2) < 69
    unpacked = {path.name.partition("-")[2] for path in
                (folder / "cache" / "data" / "unpacked").glob("*.gz")}
    assert unpacked == {file.name for file in source.files_of(1, 2)}

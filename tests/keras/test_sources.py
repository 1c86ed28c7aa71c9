"""Data from files: what is read, what is shared out, what is damaged, what has which weight."""

import gzip
import logging
import os
import threading
import time
import zlib
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.data.pipeline import training_dataset
from hvdtrain.data.plans import ShardPlan
from hvdtrain.data.source import as_source, check_source
from hvdtrain.errors import DataError
from hvdtrain.optim.distributed import DistributedOptimizer

FEATURES = {"x": {"shape": [3]}, "y": {"dtype": "int32"}}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def warnings_of(caplog):
    """The package's warnings, whatever a former test has set its logger to."""
    logger = logging.getLogger("hvdtrain")
    former = logger.propagate
    logger.propagate = True
    yield lambda: [record.getMessage() for record in caplog.records]
    logger.propagate = former


def example(**values):
    """A serialized `tf.train.Example`."""
    def feature(value):
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        array = np.asarray(value).reshape(-1)
        if array.dtype.kind == "f":
            return tf.train.Feature(float_list=tf.train.FloatList(value=array))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=array))
    return tf.train.Example(features=tf.train.Features(
        feature={name: feature(value) for name, value in values.items()})).SerializeToString()


def write_records(path, records, compression=""):
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)


def numbers(n=40):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 3)).astype("f4"), rng.integers(0, 4, n).astype("i4")


def write_numbers(folder, n=40, files=3):
    x, y = numbers(n)
    for number, part in enumerate(np.array_split(np.arange(n), files)):
        write_records(folder / f"{number}.tfrecord", [example(x=x[i], y=y[i]) for i in part])
    return x, y


def assert_rows(source, x, y):
    """Rows in any order, more than once, and one alone."""
    check_source(source)
    for rows in (np.arange(len(x)), np.array([len(x) - 1, 0, 7, 7, 3]), np.array([5])):
        found = source.read(rows)
        np.testing.assert_array_equal(found[0], x[rows])
        np.testing.assert_array_equal(found[1], y[rows])


def trained(source, seed=1):
    """The weights after two epochs on one rank."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile(DistributedOptimizer(keras.optimizers.Adam(0.01)),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    hvdtrain.fit(model, as_source(source, "train"),
                 config=hvdtrain.TrainConfig(epochs=2, batch_per_rank=8))
    return np.concatenate([w.ravel() for w in model.get_weights()])


# TFRecord


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_tfrecord_rows_are_those_that_were_written(tmp_path, compression):
    x, y = numbers()
    for number, part in enumerate(np.array_split(np.arange(40), 3)):
        write_records(tmp_path / f"{number}.tfrecord",
                      [example(x=x[i], y=y[i]) for i in part], compression)
    source = hvdtrain.load_tfrecord(tmp_path / "*.tfrecord", FEATURES, target="y")
    assert len(source) == 40
    assert_rows(source, x, y)
    unpacked = list((tmp_path / "cache" / "data").glob("unpacked/*.tfrecord"))
    assert len(unpacked) == (3 if compression else 0)


def test_every_format_trains_to_the_weights_of_arrays(tmp_path):
    x, y = write_numbers(tmp_path)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    write_csv(tmp_path / "a.csv", x, y)
    write_parquet(tmp_path / "a.parquet", x, y)
    expected = trained(hvdtrain.ArraySource((x, y)))
    for source in (
            hvdtrain.load_tfrecord(tmp_path / "*.tfrecord", FEATURES, target="y"),
            hvdtrain.load_npy(tmp_path / "x.npy", tmp_path / "y.npy"),
            hvdtrain.load_csv(tmp_path / "a.csv", target="y", target_dtype="int32"),
            hvdtrain.load_parquet(tmp_path / "a.parquet", target="y")):
        np.testing.assert_array_equal(trained(source), expected, err_msg=source.name)


def test_each_of_two_ranks_reads_its_half(tmp_path):
    x, y = write_numbers(tmp_path, n=400)
    total = sum(file.stat().st_size for file in tmp_path.glob("*.tfrecord"))
    seen = []
    for rank in (0, 1):
        source = hvdtrain.load_tfrecord(tmp_path / "*.tfrecord", FEATURES, target="y")
        assert source.index_bytes_read == (0 if rank else 400 * 12)
        assert source.bytes_read == 0
        plan = ShardPlan(samples=400, rank=rank, size=2, batch_per_rank=8)
        for _ in training_dataset(source, plan).take(plan.steps):
            pass
        seen.append(plan.order(0))
        # The pipeline reads a few batches ahead, of the next epoch.
        assert total / 2 * 0.95 < source.bytes_read < total / 2 * 1.5
        rows = ShardPlan(samples=400, rank=rank, size=2, batch_per_rank=8).order(1)
        before = source.bytes_read
        source.read(rows)
        assert source.bytes_read - before == pytest.approx(total / 2, rel=0.01)
    assert sorted(np.concatenate(seen)) == list(range(400))


def test_batches_are_read_at_the_same_time_and_in_order():
    together = threading.Barrier(2, timeout=20)

    class Waiting(hvdtrain.ArraySource):
        arrays = None

        def read(self, rows):
            if rows[0] < 16:  # the first two batches wait for each other, and the first longer
                together.wait()
                time.sleep(0.05 if rows[0] == 0 else 0)
            return super().read(rows)
    source = Waiting(np.arange(64))
    plan = ShardPlan(samples=64, rank=0, size=1, batch_per_rank=8, shuffle=False)
    batches = training_dataset(source, plan, epochs=1).as_numpy_iterator()
    assert np.concatenate(list(batches)).tolist() == list(range(64))


def test_tfrecord_features_of_every_kind(tmp_path):
    image = np.random.default_rng(0).integers(0, 255, (6, 5, 3), dtype="u1")
    raw = np.arange(6, dtype="<u2").reshape(2, 3)
    write_records(tmp_path / "a", [example(
        image=tf.io.encode_png(image).numpy(), raw=raw.tobytes(), word=b"yes", number=7,
        ragged=np.arange(1, 3 + i, dtype="f4"), weight=0.5) for i in range(2)])
    source = hvdtrain.load_tfrecord(tmp_path / "a", {
        "image": {"encoding": "image", "shape": [6, 5, 3]},
        "raw": {"encoding": "raw", "shape": [2, 3], "dtype": "uint16"},
        "word": {"dtype": "string"},
        "absent": {"shape": [2], "default": [1.0, 2.0]},
        "ragged": tf.io.FixedLenSequenceFeature([], tf.float32, allow_missing=True),
        "number": tf.io.FixedLenFeature([], tf.int64),
        "weight": {}}, target="number", sample_weight="weight")
    check_source(source)
    x, y, weight = source.read(np.array([1, 0]))
    np.testing.assert_array_equal(x["image"][0], image)
    np.testing.assert_array_equal(x["raw"][1], raw)
    assert x["word"].tolist() == [b"yes", b"yes"]
    assert x["absent"].tolist() == [[1, 2], [1, 2]]
    assert x["ragged"].tolist() == [[1, 2, 3], [1, 2, 0]]
    assert y.tolist() == [7, 7]
    assert weight.tolist() == [0.5, 0.5]
    plan = ShardPlan(samples=2, rank=0, size=1, batch_per_rank=2)
    batch, _, _ = next(iter(training_dataset(source, plan)))
    assert batch["word"].shape == (2,)


def test_tfrecord_with_a_function_of_the_user(tmp_path):
    write_records(tmp_path / "a", [np.float32([i, 2 * i]).tobytes() for i in range(5)])

    @tf.function
    def parse(records):
        pairs = tf.reshape(tf.io.decode_raw(records, tf.float32), [-1, 2])
        return pairs[:, :1], pairs[:, 1]
    source = hvdtrain.load_tfrecord(tmp_path / "a", parse=parse)
    x, y = source.read(np.array([4, 1]))
    assert x.tolist() == [[4], [1]]
    assert y.tolist() == [8, 2]
    plan = ShardPlan(samples=5, rank=0, size=1, batch_per_rank=5, shuffle=False)
    assert next(iter(training_dataset(source, plan)))[1].numpy().tolist() == [0, 2, 4, 6, 8]
    with pytest.raises(DataError, match="parse was given 2 records, and returned"):
        hvdtrain.load_tfrecord(tmp_path / "a", parse=lambda r: tf.zeros([1])).read(np.arange(2))


WRONG_FOR_TFRECORD = [
    ({}, "either features or parse"),
    ({"features": FEATURES, "target": "z"}, "'z' is not described. Described: x, y"),
    ({"features": {"y": {}}, "target": "y"}, "No feature is an input"),
    ({"features": FEATURES, "sample_weight": "y"}, "sample_weight needs a target"),
    ({"features": {"x": {"shapes": [3]}}}, "mapping with some of shape, dtype"),
    ({"features": {"x": {"encoding": "zip"}}}, "unknown encoding 'zip'"),
    ({"features": {"x": {"dtype": "float31"}}}, "unknown dtype 'float31'"),
    ({"features": {"x": {"encoding": "image", "shape": [3]}}}, "height, width, channels"),
    ({"features": FEATURES, "compression": "rar"}, "Unknown compression 'rar'"),
    ({"features": FEATURES, "on_error": "ignore"}, "must be 'raise' or 'skip'"),
    ({"features": FEATURES, "on_error": "skip"}, "Name a target"),
]


def test_wrong_tfrecord_arguments(tmp_path):
    write_records(tmp_path / "a", [example(x=[1.0, 2, 3], y=1)])
    for arguments, words in WRONG_FOR_TFRECORD:
        with pytest.raises(DataError, match=words):
            hvdtrain.load_tfrecord(tmp_path / "a", **arguments)


def damaged_records(tmp_path):
    """Record 2 has a wrong checksum, record 4 lacks a feature, record 6 is no example."""
    x, y = numbers(8)
    records = [example(x=x[i], y=y[i]) for i in range(8)]
    records[4] = example(x=x[4])
    records[6] = b"\xff" * 20
    path = tmp_path / "a.tfrecord"
    write_records(path, records)
    content = bytearray(path.read_bytes())
    offsets = np.cumsum([0, *(len(record) + 16 for record in records)])
    content[offsets[2] + 30] ^= 1
    path.write_bytes(content)
    return path, x, y, offsets


def test_a_damaged_record_is_named_with_its_offset(tmp_path):
    path, x, _, offsets = damaged_records(tmp_path)
    source = hvdtrain.load_tfrecord(path, FEATURES, target="y")
    np.testing.assert_array_equal(source.read(np.array([7, 0]))[0], x[[7, 0]])
    for row, words in ((2, "the checksum of the data is wrong"),
                       (4, "y.*required but could not be found"), (6, "Could not parse example")):
        with pytest.raises(DataError, match=f"a.tfrecord, offset {offsets[row]}: .*{words}"):
            source.read(np.array([0, row, 1]))
    with pytest.raises(DataError, match=r"1 more samples of this batch are bad.*on_error='skip'"):
        source.read(np.array([6, 4, 1]))


def test_damaged_records_that_are_skipped_have_no_weight(tmp_path, warnings_of):
    path, x, y, offsets = damaged_records(tmp_path)
    source = hvdtrain.load_tfrecord(path, FEATURES, target="y", on_error="skip")
    check_source(source)
    good = np.array([1, 1, 0, 1, 0, 1, 0, 1], "f4")
    for _ in range(2):
        found_x, found_y, weight = source.read(np.arange(8))
        np.testing.assert_array_equal(weight, good)
        np.testing.assert_array_equal(found_x, x * good[:, None])
        np.testing.assert_array_equal(found_y, y * good.astype("i4"))
    assert source.skipped == 3
    assert len(warnings_of()) == 3
    assert f"a.tfrecord, offset {offsets[2]}: the checksum" in warnings_of()[0]
    only_bad = source.read(np.array([4, 2]))
    assert only_bad[0].shape == (2, 3)
    assert only_bad[2].tolist() == [0, 0]
    del source
    assert warnings_of()[-1].endswith("a.tfrecord: 3 bad samples, with the sample weight 0")
    # Training on it is training without those samples, but for the size of the batch.
    without, weighted = map(hvdtrain.ArraySource, ((found_x, found_y, weight), (x, y, good)))
    np.testing.assert_allclose(trained(without), trained(weighted), atol=1e-7)


def test_a_file_without_its_end(tmp_path, warnings_of):
    write_numbers(tmp_path, n=10, files=1)
    path = tmp_path / "0.tfrecord"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DataError, match=r"0\.tfrecord, offset \d+: the record needs \d+ bytes"):
        hvdtrain.load_tfrecord(path, FEATURES, target="y")
    source = hvdtrain.load_tfrecord(path, FEATURES, target="y", on_error="skip")
    assert len(source) == 9
    assert "cannot be read" in warnings_of()[0]


def test_compressed_files_that_are_damaged(tmp_path):
    whole = b"x" * 100
    for name, content, words in (
            ("a", gzip.compress(whole)[:-9], "cannot be unpacked as gzip"),
            ("b", zlib.compress(whole)[:-3], "cannot be unpacked as zlib.*offset"),
            ("c", b"nothing that is known", r"c, offset 0: the checksum of the record's length")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=words):
            hvdtrain.load_tfrecord(tmp_path / name, FEATURES, target="y")


# image folders


def write_images(folder, classes=("cats", "dogs"), each=3):
    rng = np.random.default_rng(0)
    encoders = {"jpg": tf.io.encode_jpeg, "png": tf.io.encode_png}
    for name in classes:
        (folder / name / "deeper").mkdir(parents=True)
        for number in range(each):
            kind = ("jpg", "png")[number % 2]
            image = rng.integers(0, 255, (20 + number, 31, 3), dtype="u1")
            place = folder / name / ("deeper" if number == 2 else "") / f"{number}.{kind}"
            place.write_bytes(encoders[kind](image).numpy())
        (folder / name / "notes.txt").write_text("no image")


@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize(("channels", "color"), [(3, "rgb"), (1, "grayscale")])
def test_images_are_those_of_keras(tmp_path, crop, channels, color):
    write_images(tmp_path / "images")
    source = hvdtrain.load_images(tmp_path / "images", (16, 12), channels=channels,
                                  crop_to_aspect_ratio=crop)
    check_source(source)
    expected = keras.utils.image_dataset_from_directory(
        tmp_path / "images", shuffle=False, image_size=(16, 12), color_mode=color,
        crop_to_aspect_ratio=crop, batch_size=None, verbose=False)
    assert source.class_names == tuple(expected.class_names)
    images, labels = zip(*expected.as_numpy_iterator(), strict=True)
    before = source.bytes_read
    found = source.read(np.arange(len(source)))
    np.testing.assert_array_equal(found[1], labels)
    np.testing.assert_allclose(found[0], images, atol=1e-3)
    assert source.bytes_read - before == sum(map(os.path.getsize, source.file_paths))
    assert source.targets().tolist() == list(labels)


def test_one_hot_labels_and_chosen_classes(tmp_path):
    write_images(tmp_path, classes=("a", "b", "c"), each=1)
    source = hvdtrain.load_images(tmp_path, (8, 8), label_mode="categorical",
                                  class_names=["c", "a"])
    assert source.read(np.arange(2))[1].tolist() == [[1, 0], [0, 1]]
    assert [Path(path).parent.name for path in source.file_paths] == ["c", "a"]


def test_a_damaged_image_is_named_or_skipped(tmp_path, warnings_of):
    write_images(tmp_path)
    paths = sorted(tmp_path.glob("*/[01].*"))
    paths[0].write_bytes(paths[0].read_bytes()[:150])  # a JPEG that ends too early
    paths[1].write_bytes(b"not a PNG")
    paths[3].write_bytes(b"")
    source = hvdtrain.load_images(tmp_path, (8, 8))
    for row, path in ((0, paths[0]), (1, paths[1]), (4, paths[3])):
        with pytest.raises(DataError, match=f"{path} cannot be decoded as an image: "):
            source.read(np.array([row, 2]))
    source = hvdtrain.load_images(tmp_path, (8, 8), on_error="skip")
    images, labels, weight = source.read(np.arange(6))
    assert weight.tolist() == [0, 0, 1, 1, 0, 1]
    assert images[0].max() == 0
    assert images[5].max() > 0
    assert labels.tolist() == [0, 0, 0, 1, 0, 1]
    assert source.skipped == len(warnings_of()) == 3


WRONG_FOR_IMAGES = [
    ({"size": (0, 4)}, "at least 1 x 1"), ({"channels": 2}, "1, 3 or 4 channels"),
    ({"interpolation": "best"}, "Unknown interpolation 'best'"), ({"threads": 0}, "at least 1"),
    ({"label_mode": "binary"}, "'int' or 'categorical'"), ({"size": (4,)}, "height, width"),
    ({"class_names": ["cats", "cows"]}, "no folder 'cows'. It has: cats, dogs"),
]


def test_wrong_arguments_for_images(tmp_path):
    write_images(tmp_path)
    for arguments, words in WRONG_FOR_IMAGES:
        with pytest.raises(DataError, match=words):
            hvdtrain.load_images(tmp_path, **arguments)


def test_folders_without_images(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        hvdtrain.load_images(tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no folder in it"):
        hvdtrain.load_images(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="has no image in its 1 folders"):
        hvdtrain.load_images(tmp_path)


# CSV


def write_csv(path, x, y):
    lines = ["a,b,y,c", *(f"{p[0]!r},{p[1]!r},{label},{p[2]!r}" for p, label in zip(
        x.tolist(), y.tolist(), strict=True))]
    path.write_text("\n".join(lines) + "\n")


def test_csv_rows_are_those_that_were_written(tmp_path):
    x, y = numbers(30)
    write_csv(tmp_path / "1.csv", x[:11], y[:11])
    write_csv(tmp_path / "2.csv", x[11:], y[11:])
    source = hvdtrain.load_csv(tmp_path / "*.csv", target="y", target_dtype="int32")
    assert_rows(source, x, y)
    assert source.index_bytes_read == sum(
        path.stat().st_size for path in tmp_path.glob("*.csv"))
    before = source.bytes_read
    source.read(np.arange(30))
    assert source.bytes_read - before == 30 * (3 * 4 + 4)
    chosen = hvdtrain.load_csv(tmp_path / "1.csv", columns=["c", "a"], dtype="float64")
    np.testing.assert_allclose(chosen.read(np.array([4])), x[[4]][:, [2, 0]])


def test_csv_classes_weights_and_missing_values(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('w,kind,a\n0.5,"big\ncat",1\n\n2,dog,\n1," dog",3\n')
    source = hvdtrain.load_csv(path, target="kind", sample_weight="w", missing=-1.0,
                               classes=["big\ncat", "dog"])
    x, y, weight = source.read(np.array([1, 0]))
    assert x.tolist() == [[-1], [1]]
    assert y.tolist() == [1, 0]
    assert weight.tolist() == [2, 0.5]
    with pytest.raises(DataError, match=r"a\.csv, offset 33: column 'kind' is ' dog'; expected"):
        source.read(np.array([2]))


BAD_ROWS = [
    ("1,x,3", "column 'b' is 'x'; expected a number of type float32"),
    ("1,,3", "column 'b' is ''"), ("1,nan,3", "not finite"), ("1,2", "2 fields; expected 3"),
    ("1,2,3.5", "column 'y' is '3.5'; expected a number of type int32"),
    ("1,2,3000000000", "type int32"), ('1,"2"2,3', "the row cannot be read"),
    ("1,\xff,3", "utf-8"),
]


def test_a_bad_row_is_named_or_skipped(tmp_path):
    for number, (row, words) in enumerate(BAD_ROWS):
        path = tmp_path / f"{number}.csv"
        path.write_bytes(f"a,b,y\n1,2,3\n{row}\n4,5,6\n".encode("latin-1"))
        source = hvdtrain.load_csv(path, target="y", target_dtype="int32")
        assert source.read(np.array([2, 0]))[0].tolist() == [[4, 5], [1, 2]]
        with pytest.raises(DataError, match=f"{path}, offset 12: .*{words}"):
            source.read(np.arange(3))
        source = hvdtrain.load_csv(path, target="y", target_dtype="int32", on_error="skip")
        assert source.read(np.arange(3))[2].tolist() == [1, 0, 1]


WRONG_FOR_CSV = [
    ({"target": "z"}, "no column 'z'. It has: a, b, y, c"), ({"columns": []}, "no column for the"),
    ({"dtype": "complex64"}, "Unknown dtype 'complex64'"),
    ({"sample_weight": "y"}, "needs a target"),
]


def test_wrong_csv_arguments(tmp_path):
    write_csv(tmp_path / "a.csv", *numbers(3))
    for arguments, words in WRONG_FOR_CSV:
        with pytest.raises(DataError, match=words):
            hvdtrain.load_csv(tmp_path / "a.csv", **arguments)


def test_csv_files_that_do_not_fit(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "b.csv").write_text("b,a\n1,2\n")
    with pytest.raises(DataError, match=r"b\.csv has other columns than .*a\.csv: b, a"):
        hvdtrain.load_csv(tmp_path / "*.csv")
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="there are no rows"):
        hvdtrain.load_csv(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text("1,2\n3,4\n")
    source = hvdtrain.load_csv(tmp_path / "a.csv", header=False, target="1")
    assert source.read(np.arange(2))[1].tolist() == [2, 4]


# .npy


def test_npy_files_are_mapped_and_counted(tmp_path):
    x, y = numbers()
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    source = hvdtrain.load_npy(tmp_path / "x.npy", tmp_path / "y.npy")
    assert source.arrays is None
    assert_rows(source, x, y)
    before = source.bytes_read
    source.read(np.arange(20))
    assert source.bytes_read - before == 20 * (3 * 4 + 4)
    np.save(tmp_path / "empty.npy", x[:0])
    (tmp_path / "bad.npy").write_bytes(b"rubbish")
    for name, words in (("nowhere", "does not exist"), ("bad", "cannot be read as a .npy"),
                        ("empty", "at least one sample")):
        with pytest.raises(DataError, match=words):
            hvdtrain.load_npy(tmp_path / f"{name}.npy")
    with pytest.raises(DataError, match="sample_weight needs y"):
        hvdtrain.load_npy(tmp_path / "x.npy", sample_weight=tmp_path / "y.npy")


# Parquet


def write_parquet(path, x, y, rows=7, **more):
    import pyarrow as pa
    from pyarrow import parquet
    table = pa.table({"a": x[:, 0], "b": x[:, 1], "y": y, "c": x[:, 2]})
    parquet.write_table(table, path, row_group_size=rows, write_page_checksum=True, **more)


def test_parquet_rows_are_those_that_were_written(tmp_path):
    x, y = numbers(40)
    write_parquet(tmp_path / "1.parquet", x[:18], y[:18])
    write_parquet(tmp_path / "2.parquet", x[18:], y[18:])
    source = hvdtrain.load_parquet(tmp_path / "*.parquet", target="y")
    assert_rows(source, x, y)
    # Of eight row groups with four columns each the few are read that hold the rows.
    everything = source.bytes_read
    few = hvdtrain.load_parquet(tmp_path / "*.parquet", target="y", columns=["b"])
    np.testing.assert_array_equal(few.read(np.array([39, 38, 36]))[0], x[[39, 38, 36]][:, 1:2])
    assert 0 < few.bytes_read < everything / 4


def test_parquet_lists_and_missing_values(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet
    table = pa.table({"image": [[1.0, 2, 3, 4], [5.0, 6, 7, 8], None, [1.0, None, 3, 4]],
                      "y": pa.array([1, None, 3, 4], pa.int64())})
    parquet.write_table(table, tmp_path / "a.parquet")
    source = hvdtrain.load_parquet(tmp_path / "a.parquet", target="y", shape=[2, 2],
                                   target_dtype="int32")
    assert source.read(np.array([0]))[0].tolist() == [[[1, 2], [3, 4]]]
    for row, name in ((1, "y"), (2, "image"), (3, "image")):
        with pytest.raises(DataError, match=f"row group 0, row {row} of it: column '{name}' has"):
            source.read(np.array([0, row]))
    source = hvdtrain.load_parquet(tmp_path / "a.parquet", target="y", on_error="skip")
    assert source.read(np.array([3, 0, 1, 2]))[2].tolist() == [0, 1, 0, 0]


def test_a_damaged_row_group_is_named_or_skipped(tmp_path):
    x, y = numbers(20)
    path = tmp_path / "a.parquet"
    write_parquet(path, x, y, rows=10, compression="none", use_dictionary=False)
    from pyarrow import parquet
    place = parquet.read_metadata(path).row_group(1).column(1)
    content = bytearray(path.read_bytes())
    content[place.data_page_offset + place.total_compressed_size - 5] ^= 1
    path.write_bytes(content)
    source = hvdtrain.load_parquet(path, target="y")
    np.testing.assert_array_equal(source.read(np.arange(10))[0], x[:10])
    with pytest.raises(DataError, match=r"a\.parquet, row group 1: it cannot be read"):
        source.read(np.array([3, 15]))
    source = hvdtrain.load_parquet(path, target="y", on_error="skip")
    assert source.read(np.array([15, 3]))[2].tolist() == [0, 1]


def test_what_is_no_parquet_file_of_numbers(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet
    (tmp_path / "bad").write_bytes(b"rubbish")
    with pytest.raises(DataError, match="bad cannot be read as a Parquet file"):
        hvdtrain.load_parquet(tmp_path / "bad")
    parquet.write_table(pa.table({"a": ["x"], "b": [[1, 2]], "c": [3]}), tmp_path / "a")
    for columns, words in ((["a"], "holds string; expected numbers"), (["z"], "no column 'z'"),
                           (["b", "c"], "must be the only input")):
        with pytest.raises(DataError, match=words):
            hvdtrain.load_parquet(tmp_path / "a", columns=columns)
    parquet.write_table(pa.table({"b": [[1, 2], [1]]}), tmp_path / "a")
    with pytest.raises(DataError, match="lists of different lengths"):
        hvdtrain.load_parquet(tmp_path / "a")


# arrays made once


def test_unpacked_samples_are_made_once_and_mapped(tmp_path):
    x, y = numbers(30)
    write_csv(tmp_path / "a.csv", x, y)
    first = hvdtrain.load_csv(tmp_path / "a.csv", target="y", target_dtype="int32")
    source = hvdtrain.unpacked(first)
    assert first.bytes_read > 0
    assert source.arrays is None
    assert_rows(source, x, y)
    again = hvdtrain.load_csv(tmp_path / "a.csv", target="y", target_dtype="int32")
    assert_rows(hvdtrain.unpacked(again), x, y)
    assert again.bytes_read == 0
    other = hvdtrain.load_csv(tmp_path / "a.csv", target="y", columns=["a"])
    assert hvdtrain.unpacked(other).read(np.array([0]))[0].shape == (1, 1)
    with pytest.raises(DataError, match="Give a key="):
        hvdtrain.unpacked(hvdtrain.ArraySource((x, y)))
    assert_rows(hvdtrain.unpacked(hvdtrain.ArraySource((x, y)), key="mine"), x, y)
    words = hvdtrain.ArraySource(np.array([b"a", b"b"]))
    with pytest.raises(DataError, match="cannot be unpacked"):
        hvdtrain.unpacked(words, key="words")


# tf.data, generators, PyDataset


def test_a_data_set_is_read_into_arrays():
    x, y = numbers()
    samples = tf.data.Dataset.from_tensor_slices((x, y))
    for given, batched in ((samples, False), (samples.batch(7), True),
                           (zip(x, y, strict=True), False),
                           (lambda: ([a, b] for a, b in zip(x, y, strict=True)), False)):
        assert_rows(hvdtrain.load_dataset(given, batched=batched), x, y)


def test_data_sets_that_cannot_be_read_into_arrays():
    for given, words in (
            (tf.data.Dataset.range(3).repeat(), "no end"), (iter([]), "empty"),
            (3, "expected a tf.data"), (iter([(1, 2), (1,)]), "element 1 has another structure"),
            (iter([np.zeros(2), np.zeros(3)]), "cannot be put into one array"),
            (iter([np.zeros(200)] * 3), "2 elements take 3200 bytes, more than max_bytes=2000")):
        with pytest.raises(DataError, match=words):
            hvdtrain.load_dataset(given, max_bytes=2000)


def test_other_data_is_refused_with_what_to_do():
    with pytest.raises(DataError, match=r"hvdtrain\.load_dataset"):
        as_source((i for i in range(3)), "train")
    assert isinstance(as_source(tf.data.Dataset.range(3), "train"), hvdtrain.StreamSource)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, size):
        super().__init__()
        self.x, self.y, self.size, self.asked = x, y, size, []

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __getitem__(self, index):
        self.asked.append(index)
        rows = slice(index * self.size, (index + 1) * self.size)
        return [self.x[rows], self.y[rows]]


def test_a_pydataset_is_a_source_of_its_samples():
    x, y = numbers()
    batches = Batches(x, y, 7)
    source = as_source(batches, "train")
    assert len(source) == 40
    assert_rows(source, x, y)
    batches.asked.clear()
    source.read(np.arange(7, 21))
    assert set(batches.asked) <= {1, 2}
    np.testing.assert_array_equal(trained(batches), trained(hvdtrain.ArraySource((x, y))))


def test_pydatasets_without_known_samples():
    x, y = numbers(10)

    class Endless(Batches):
        num_batches = None

    class Uneven(Batches):
        def __getitem__(self, index):
            return self.x[:4 - index % 2], self.y[:4 - index % 2]

    class Changing(Batches):
        def __getitem__(self, index):
            return self.x[:4, :3 - index], self.y[:4]
    for dataset, words in ((Endless(x, y, 4), "has no end"), (Batches(x[:0], y, 4), "no batches"),
                           (Changing(x, y, 5), r"batch 1 has samples of float32 \(2,\)")):
        with pytest.raises(DataError, match=words):
            as_source(dataset, "train")
    with pytest.raises(DataError, match="batch 1 has 3 samples; expected 4"):
        as_source(Uneven(x, y, 3), "train").read(np.arange(8))


# class weights


@pytest.mark.parametrize("in_memory", [True, False])
def test_class_weights_are_those_of_keras(tmp_path, in_memory):
    x, y = write_numbers(tmp_path)
    plain = hvdtrain.ArraySource((x, y)) if in_memory else hvdtrain.load_tfrecord(
        tmp_path / "*.tfrecord", FEATURES, target="y")
    source = hvdtrain.weighted(plain, {0: 2.0, 2: 0.5})
    check_source(source)
    assert source.read(np.arange(40))[2].tolist() == [{0: 2.0, 2: 0.5}.get(c, 1.0) for c in y]
    assert source.class_weight == {0: 2.0, 2: 0.5}
    balanced = hvdtrain.weighted(plain, "balanced")
    weights = balanced.read(np.arange(40))[2]
    sums = [weights[y == c].sum() for c in range(4)]
    np.testing.assert_allclose(sums, [10.0] * 4, rtol=1e-6)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="softmax")])
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    start = model.get_weights()
    model.fit(x, y, class_weight={0: 2.0, 2: 0.5}, batch_size=40, verbose=0, shuffle=False)
    expected = model.get_weights()
    model.set_weights(start)
    model.fit(*source.read(np.arange(40))[:2], sample_weight=source.read(np.arange(40))[2],
              batch_size=40, verbose=0, shuffle=False)
    for ours, theirs in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-7)


def test_class_and_sample_weights_are_multiplied():
    x, y = numbers(4)
    given = np.array([1, 2, 3, 0], "f4")
    source = hvdtrain.weighted(hvdtrain.ArraySource((x, y, given)), {str(c): 2 for c in range(4)})
    assert source.read(np.arange(4))[2].tolist() == [2, 4, 6, 0]


def test_targets_that_are_no_classes():
    x, y = numbers(4)
    for data, words in ((x, "one target per sample"), ((x, x), "integer targets"),
                        ((x, np.eye(4, dtype="i4")), "integer targets")):
        with pytest.raises(DataError, match=words):
            hvdtrain.weighted(hvdtrain.ArraySource(data), {0: 1.0})
    source = hvdtrain.ArraySource((x, y))
    for weights, words in (({0: -1.0}, "at least 0"), ({"a": 1.0}, "whole numbers to numbers"),
                           ("even", "a mapping from classes to weights or 'balanced'")):
        with pytest.raises(DataError, match=words):
            hvdtrain.weighted(source, weights)


# job files


def test_job_files_name_data_in_files(tmp_path):
    from hvdtrain.entry import call, resolve
    from hvdtrain.job import Named
    from hvdtrain.zoo import DATASETS
    x, y = write_numbers(tmp_path)
    write_csv(tmp_path / "a.csv", x, y)
    write_parquet(tmp_path / "a.parquet", x, y)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    write_images(tmp_path / "images")

    def splits(name, **arguments):
        named = Named(name=name, arguments=arguments)
        return call(resolve(named, DATASETS, "data set", tmp_path), named, "[data]")
    records = str(tmp_path / "*.tfrecord")
    found = splits("tfrecord", path=records, features=FEATURES, target="y", validation=[records],
                   class_weight={"1": 2.0})
    assert_rows(found.validation, x, y)
    assert found.train.read(np.arange(40))[2].tolist() == [2.0 if c == 1 else 1.0 for c in y]
    table = str(tmp_path / "a.csv")
    for unpack in (False, True):
        assert_rows(splits("csv", path=table, target="y", target_dtype="int32",
                           unpack=unpack).train, x, y)
    assert_rows(splits("parquet", path=str(tmp_path / "a.parquet"), target="y").train, x, y)
    files = str(tmp_path / "x.npy"), str(tmp_path / "y.npy")
    found = splits("npy", x=files[0], y=files[1], validation_x=files[0], validation_y=files[1])
    assert_rows(found.validation, x, y)
    found = splits("images", path=str(tmp_path / "images"), size=[8, 8],
                   validation=str(tmp_path / "images"), on_error="skip")
    assert found.train.class_names == found.validation.class_names == ("cats", "dogs")

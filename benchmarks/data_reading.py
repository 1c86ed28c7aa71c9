"""Rows per second of processor time of the data sources: in the order of the files and shuffled.

    python benchmarks/data_reading.py [--rows 20000] [--batch 64] [--seconds 3] [--folder FOLDER]

Writes the same random samples in every format (64 float32 and a class; images of 64 x 64 pixels
as JPEG, a tenth as many), then reads batches through `Source.read` for so many seconds, first in
the order of the files, then as a shuffled epoch asks for them. The files are in the page cache,
since they were just written. What is measured is the time of the processor, of all threads
together: what a machine waits for is not in it, and neither is what else runs on it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pyarrow as pa
import tensorflow as tf
from pyarrow import parquet

import hvdtrain
from hvdtrain.data.source import Source

FEATURES = 64
ROW_GROUP = 2000
PIXELS = 64


def write(folder: Path, rows: int) -> None:
    """The same samples in every format."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, FEATURES)).astype("f4")
    y = rng.integers(0, 10, rows).astype("i8")
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    names = [f"f{number}" for number in range(FEATURES)]
    with (folder / "a.csv").open("w") as stream:
        stream.write(",".join([*names, "y"]) + "\n")
        for values, label in zip(x.tolist(), y.tolist(), strict=True):
            stream.write(",".join(map(repr, values)) + f",{label}\n")
    for kind in ("", "GZIP"):
        with tf.io.TFRecordWriter(str(folder / f"a{kind}.tfrecord"), kind) as writer:
            for values, label in zip(x, y, strict=True):
                writer.write(_example(values, label))
    table = pa.table({**dict(zip(names, x.T, strict=True)), "y": y})
    parquet.write_table(table, folder / "a.parquet", row_group_size=ROW_GROUP)
    for number in range(rows // 10):
        place = folder / "images" / str(number % 10)
        place.mkdir(parents=True, exist_ok=True)
        image = rng.integers(0, 255, (PIXELS, PIXELS, 3), dtype="u1")
        (place / f"{number}.jpg").write_bytes(tf.io.encode_jpeg(image).numpy())


def _example(values: np.ndarray, label: int) -> bytes:
    return tf.train.Example(features=tf.train.Features(feature={
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=values)),
        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))})).SerializeToString()


def sources(folder: Path) -> Iterator[tuple[str, Source, float]]:
    """Name, source, and seconds of the processor to open it the first time."""
    cache = folder / "cache"
    features = {"x": {"shape": [FEATURES]}, "y": {"dtype": "int64"}}
    makers = {
        "npy": lambda: hvdtrain.load_npy(folder / "x.npy", folder / "y.npy"),
        "tfrecord": lambda: hvdtrain.load_tfrecord(
            folder / "a.tfrecord", features, target="y", cache=cache),
        "tfrecord, gzip": lambda: hvdtrain.load_tfrecord(
            folder / "aGZIP.tfrecord", features, target="y", cache=cache),
        "csv": lambda: hvdtrain.load_csv(
            folder / "a.csv", target="y", target_dtype="int64", cache=cache),
        "csv, unpacked": lambda: hvdtrain.unpacked(hvdtrain.load_csv(
            folder / "a.csv", target="y", target_dtype="int64", cache=cache), cache=cache),
        "parquet": lambda: hvdtrain.load_parquet(folder / "a.parquet", target="y"),
        "parquet, unpacked": lambda: hvdtrain.unpacked(
            hvdtrain.load_parquet(folder / "a.parquet", target="y"), cache=cache),
        "images": lambda: hvdtrain.load_images(folder / "images", (PIXELS, PIXELS)),
        "images, unpacked": lambda: hvdtrain.unpacked(
            hvdtrain.load_images(folder / "images", (PIXELS, PIXELS)), cache=cache),
    }
    for name, make in makers.items():
        begin = time.process_time()
        source = make()
        yield name, source, time.process_time() - begin


def rate(source: Source, order: np.ndarray, batch: int, seconds: float) -> float:
    """Rows per second over whole batches, for about so many seconds of the processor."""
    done, begin = 0, time.process_time()
    while (passed := time.process_time() - begin) < seconds:
        first = done % (len(order) - batch + 1)
        done += len(source.read(order[first:first + batch])[1])
    return done / passed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write(folder, options.rows)
        print("source                 open, s   in order, rows/s   shuffled, rows/s")
        for title, source, opening in sources(folder):
            shuffled = np.random.default_rng(1).permutation(len(source))
            source.read(shuffled[:options.batch])
            figures = [rate(source, order, options.batch, options.seconds)
                       for order in (np.arange(len(source)), shuffled)]
            print(f"{title:22} {opening:8.2f} {figures[0]:18.0f} {figures[1]:18.0f}", flush=True)


if __name__ == "__main__":
    main()

"""Where records are; what of a damaged file is found."""

import gc
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hvdtrain.data import tfrecord
from hvdtrain.data.tfrecord import RecordFiles, masked_crc
from hvdtrain.errors import DataError


def framed(data):
    length = struct.pack("<Q", len(data))
    return (length + struct.pack("<I", masked_crc(length)) + data
            + struct.pack("<I", masked_crc(data)))


def write(path, records):
    path.write_bytes(b"".join(map(framed, records)))
    return path


def records_of(number, size=20):
    rng = np.random.default_rng(number)
    return [rng.bytes(int(rng.integers(0, size))) for _ in range(number)]


def opened(files, cache):
    return RecordFiles(files, cache)


def test_the_checksum_is_that_of_the_format():
    """CRC-32C of RFC 3720 for 32 zero bytes is 0x8a9136aa."""
    crc = 0x8a9136aa
    assert masked_crc(bytes(32)) == (((crc >> 15 | crc << 17) & 0xffffffff) + 0xa282ead8) % 2**32


def test_records_are_read_by_number_through_all_files(tmp_path):
    contents = [records_of(5), [], records_of(7)]
    files = [write(tmp_path / f"{n}.tfrecord", c) for n, c in enumerate(contents)]
    reader = opened(files, tmp_path / "cache")
    everything = contents[0] + contents[2]
    assert len(reader) == 12
    assert not list(reader.damages())
    assert reader.index_bytes == 12 * 12
    for rows in ([3], [0, 1, 2], [4, 5], [0, 4, 6, 7, 11], list(range(12))):
        records, problems, _ = reader.read(np.asarray(rows))
        assert records == [everything[row] for row in rows]
        assert not problems
    total = sum(file.stat().st_size for file in files)
    assert reader.read(np.arange(12))[2] == total
    again = opened(files, tmp_path / "cache")
    assert again.read(np.arange(12)) == reader.read(np.arange(12))
    assert again.index_bytes == 0  # it was in the cache


def test_the_index_follows_a_file_that_changes(tmp_path):
    file = write(tmp_path / "a.tfrecord", [b"one"])
    assert len(opened([file], tmp_path / "cache")) == 1
    write(file, [b"one", b"two"])
    assert len(opened([file], tmp_path / "cache")) == 2


def test_damaged_data_is_found_by_its_checksum(tmp_path):
    file = write(tmp_path / "a.tfrecord", [b"zero", b"one", b"two"])
    content = bytearray(file.read_bytes())
    content[20 + 12] ^= 1  # the first byte of the data of record 1
    file.write_bytes(content)
    reader = opened([file], tmp_path / "cache")
    records, problems, _ = reader.read(np.arange(3))
    assert records == [b"zero", b"", b"two"]
    assert problems == {1: f"{file}, offset 20: the checksum of the data is wrong."}
    assert reader.place_of(2) == f"{file}, offset 39"


@pytest.mark.parametrize(("spoil", "end", "words"), [
    (lambda c: c[:-5], 39, "the record needs 19 bytes, and the file has 14 left"),
    (lambda c: c[:42], 39, "the file ends after 3 bytes of a record's first 12"),
    (lambda c: c[:20] + b"\x09" + c[21:], 20, "the checksum of the record's length is wrong")])
def test_the_index_ends_where_no_record_begins(tmp_path, spoil, end, words):
    whole = write(tmp_path / "a.tfrecord", [b"zero", b"one", b"two"])
    whole.write_bytes(spoil(whole.read_bytes()))
    other = write(tmp_path / "b.tfrecord", [b"three"])
    reader = opened([whole, other], tmp_path / "cache")
    damage, = reader.damages()
    assert damage.startswith(f"{whole}, offset {end}: {words}.")
    rows = np.arange(len(reader))
    assert reader.read(rows)[:2] == ([b"zero", b"one"][:len(reader) - 1] + [b"three"], {})


def test_a_file_that_changes_behind_the_index_is_noticed(tmp_path):
    file = write(tmp_path / "a.tfrecord", [b"zero", b"one"])
    reader = opened([file], tmp_path / "cache")
    write(file, [b"zero and more", b"one"])
    _, problems, _ = reader.read(np.arange(2))
    assert "has changed since the index was made" in problems[0]
    assert 1 in problems
    write(file, [b"zero"])
    assert "has become shorter" in reader.read(np.asarray([1]))[1][0]


def test_few_files_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecord, "OPEN_FILES", 2)
    files = [write(tmp_path / f"{n}.tfrecord", [bytes([n])] * 3) for n in range(5)]
    reader = opened(files, tmp_path / "cache")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for number in (0, 1, 2, 3, 4, 0, 4):
        assert reader.read(np.asarray([3 * number]))[0] == [bytes([number])]
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    del reader
    assert len(os.listdir("/proc/self/fd")) <= before


def test_threads_read_at_the_same_time(tmp_path, monkeypatch):
    """Also files that another thread drops from those that stay open."""
    monkeypatch.setattr(tfrecord, "OPEN_FILES", 1)
    files = [write(tmp_path / f"{n}.tfrecord", [bytes([n])]) for n in range(4)]
    reader = opened(files, tmp_path / "cache")
    together, pread = threading.Barrier(4, timeout=10), os.pread

    def waiting(*arguments):
        if not together.broken and together.n_waiting < 4:
            together.wait()
        return pread(*arguments)
    monkeypatch.setattr(os, "pread", waiting)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: reader.read(np.asarray([n]))[0], range(4)))
    assert found == [[bytes([n])] for n in range(4)]


def test_a_file_that_is_gone_is_named(tmp_path):
    file = write(tmp_path / "a.tfrecord", [b"zero"])
    reader = opened([file], tmp_path / "cache")
    file.unlink()
    with pytest.raises(DataError, match=r"a\.tfrecord cannot be read: No such file"):
        reader.read(np.asarray([0]))

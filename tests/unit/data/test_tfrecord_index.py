"""Where records are; what of a damaged file is found."""

import struct

import numpy as np
import pytest

from hvdtrain.data.files import ByteCount
from hvdtrain.data.tfrecord_index import RecordReader, damage, index_records, masked_crc
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
    headers, count = ByteCount(), ByteCount()
    index = index_records(files, cache, headers)
    return index, RecordReader(files, index, count), headers, count


def test_the_checksum_is_that_of_the_format():
    """CRC-32C of RFC 3720 for 32 zero bytes is 0x8a9136aa."""
    crc = 0x8a9136aa
    assert masked_crc(bytes(32)) == (((crc >> 15 | crc << 17) & 0xffffffff) + 0xa282ead8) % 2**32


def test_records_are_read_by_number_through_all_files(tmp_path):
    contents = [records_of(5), [], records_of(7)]
    files = [write(tmp_path / f"{n}.tfrecord", c) for n, c in enumerate(contents)]
    index, reader, headers, count = opened(files, tmp_path / "cache")
    everything = contents[0] + contents[2]
    assert len(index) == 12
    assert index.starts.tolist() == [0, 5, 5, 12]
    assert not index.damaged.any()
    assert headers.value == 12 * 12
    for rows in ([3], [0, 1, 2], [4, 5], [0, 4, 6, 7, 11], list(range(12))):
        records, problems = reader.read(np.asarray(rows))
        assert records == [everything[row] for row in rows]
        assert not problems
    total = sum(file.stat().st_size for file in files)
    before = count.value
    reader.read(np.arange(12))
    assert count.value - before == total
    again, _, headers, _ = opened(files, tmp_path / "cache")
    assert again.offsets.tolist() == index.offsets.tolist()
    assert headers.value == 0  # it was in the cache


def test_the_index_follows_a_file_that_changes(tmp_path):
    file = write(tmp_path / "a.tfrecord", [b"one"])
    assert len(opened([file], tmp_path / "cache")[0]) == 1
    write(file, [b"one", b"two"])
    assert len(opened([file], tmp_path / "cache")[0]) == 2


def test_damaged_data_is_found_by_its_checksum(tmp_path):
    file = write(tmp_path / "a.tfrecord", [b"zero", b"one", b"two"])
    content = bytearray(file.read_bytes())
    content[20 + 12] ^= 1  # the first byte of the data of record 1
    file.write_bytes(content)
    _, reader, _, _ = opened([file], tmp_path / "cache")
    records, problems = reader.read(np.arange(3))
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
    index, reader, _, _ = opened([whole, other], tmp_path / "cache")
    assert index.damaged.tolist() == [True, False]
    assert index.ends[0] == end
    assert damage(whole, end).startswith(f"{whole}, offset {end}: {words}.")
    rows = np.arange(len(index))
    assert reader.read(rows) == ([b"zero", b"one"][:len(index) - 1] + [b"three"], {})


def test_a_file_that_changes_behind_the_index_is_noticed(tmp_path):
    file = write(tmp_path / "a.tfrecord", [b"zero", b"one"])
    _, reader, _, _ = opened([file], tmp_path / "cache")
    write(file, [b"zero and more", b"one"])
    _, problems = reader.read(np.arange(2))
    assert "has changed since the index was made" in problems[0]
    assert 1 in problems
    write(file, [b"zero"])
    assert "has become shorter" in reader.read(np.asarray([1]))[1][0]


def test_a_file_that_is_gone_is_named(tmp_path):
    file = write(tmp_path / "a.tfrecord", [b"zero"])
    _, reader, _, _ = opened([file], tmp_path / "cache")
    file.unlink()
    with pytest.raises(DataError, match=r"a\.tfrecord cannot be read: No such file"):
        reader.read(np.asarray([0]))

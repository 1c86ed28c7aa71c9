"""Files by name and pattern; parts of them; fingerprints."""

import os
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.data import files
from hvdtrain.data.files import ByteCount, PartReader, cached_index, find_files, fingerprint
from hvdtrain.errors import DataError


def test_patterns_are_sorted_and_lists_keep_their_order(tmp_path):
    for name in ("b.csv", "a.csv", "c[1].csv", "d.txt"):
        (tmp_path / name).write_text(name)
    assert [f.name for f in find_files(tmp_path / "*.csv")] == ["a.csv", "b.csv", "c[1].csv"]
    listed = find_files([tmp_path / "d.txt", str(tmp_path / "[ab].csv")])
    assert [f.name for f in listed] == ["d.txt", "a.csv", "b.csv"]
    assert find_files(tmp_path / "c[1].csv") == (tmp_path / "c[1].csv",)


@pytest.mark.parametrize(("paths", "words"), [
    ("nowhere.csv", "nowhere.csv does not exist"), ("*.nothing", "No file is named"),
    (".", "is a folder; expected files"), ([], "No data files were given")])
def test_what_is_no_file_is_refused(tmp_path, paths, words):
    given = tmp_path / paths if isinstance(paths, str) else paths
    with pytest.raises(DataError, match=words):
        find_files(given)


def test_parts_are_read_and_counted_with_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "OPEN_FILES", 2)
    paths = [tmp_path / str(number) for number in range(5)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 100)
    count = ByteCount()
    reader = PartReader(paths, count)
    before = len(os.listdir("/proc/self/fd"))
    for number in (0, 1, 2, 3, 4, 0, 4):
        assert reader.read(number, 90, 7) == bytes([number]) * 7
    assert len(os.listdir("/proc/self/fd")) == before + 2
    assert count.value == 49
    assert reader.read(3, 95, 100) == b"\3" * 5
    assert reader.read(3, 200, 100) == b""
    assert count.value == 54
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        PartReader([tmp_path / "nowhere"], count).read(0, 0, 1)


def test_a_fingerprint_tells_files_and_settings_apart(tmp_path):
    path = tmp_path / "a"
    path.write_text("one")
    before = fingerprint([path], "x")
    assert fingerprint([path], "x") == before
    assert fingerprint([path], "y") != before
    os.utime(path, ns=(1, 1))
    assert fingerprint([path], "x") != before


def test_an_index_is_made_once_and_mended_by_deleting_it(tmp_path):
    made = []

    def make():
        made.append(1)
        return np.arange(5)
    for _ in range(2):
        assert cached_index(tmp_path, "i", make).tolist() == [0, 1, 2, 3, 4]
    assert len(made) == 1
    (tmp_path / "i.npy").write_bytes(b"rubbish")
    with pytest.raises(DataError, match=r"i\.npy cannot be read .*Delete it"):
        cached_index(tmp_path, "i", make)


def test_the_folder_for_what_is_made_of_files(monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", "/c")
    assert files.cache_folder(None) == Path("/c/data")
    assert files.cache_folder("/given") == Path("/given")

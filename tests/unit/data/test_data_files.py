"""Files by name and pattern; parts of them; fingerprints."""

import os
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.data.build_once import cache_folder, cached_array, fingerprint
from hvdtrain.data.files import find_files
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
        assert cached_array(tmp_path / "i.npy", make).tolist() == [0, 1, 2, 3, 4]
    assert len(made) == 1
    (tmp_path / "i.npy").write_bytes(b"rubbish")
    with pytest.raises(DataError, match=r"i\.npy cannot be read .*Delete it"):
        cached_array(tmp_path / "i.npy", make)


def test_the_folder_for_what_is_made_of_files(monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", "/c")
    assert cache_folder(None) == Path("/c/data")
    assert cache_folder("/given") == Path("/given")

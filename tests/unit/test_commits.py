"""Commits of elastic training: whole or as before, in memory that is used again, read with care."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.commit_names import CHANGE, SPARE, commit_name, commits_in, refuse_engine
from hvdtrain.errors import CheckpointError, ConfigError, NotWrittenError
from hvdtrain.train.commits import CommitStore

ARRAYS = [("a/kernel", np.arange(12, dtype="f4").reshape(3, 4)), ("b", np.array(5, "i8")),
          ("empty", np.zeros((0, 3))), ("flags", np.array([True, False]))]


def filled(folder, *steps):
    store = CommitStore(folder)
    for number in steps:
        store.write(number, {"step": number}, [(n, a + number if a.dtype != bool else a)
                                               for n, a in ARRAYS])
    return store


def test_what_is_written_is_read(tmp_path):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    store, more = CommitStore(tmp_path), np.array([1.5, -2.0], bfloat16)
    assert store.newest() is None
    store.write(7, {"nested": [1, None, (2.5, np.arange(3))]}, [*ARRAYS, ("half", more)])
    assert store.newest() == 7
    assert list(store.about(7)["nested"][2][1]) == [0, 1, 2]
    for (name, wanted), (found_name, found) in zip(
            [*ARRAYS, ("half", more)], store.arrays(7), strict=True):
        assert (found_name, found.dtype, found.shape) == (name, wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(found, wanted)


def test_only_the_newest_is_kept_and_memory_is_used_again(tmp_path):
    filled(tmp_path, 1)
    first = (tmp_path / commit_name(1)).stat().st_ino
    spare = (tmp_path / SPARE).stat()
    assert spare.st_blocks * 512 >= spare.st_size > 0  # no later commit finds the memory full
    filled(tmp_path, 2)
    assert (tmp_path / commit_name(2)).stat().st_ino == spare.st_ino
    store = filled(tmp_path, 3)
    assert (tmp_path / commit_name(3)).stat().st_ino == first
    assert sorted(os.listdir(tmp_path)) == [commit_name(3), SPARE]
    np.testing.assert_array_equal(store.arrays(3)[0][1], ARRAYS[0][1] + 3)


def test_a_commit_after_the_same_step_takes_its_place(tmp_path):
    store = filled(tmp_path, 4, 4)
    assert commits_in(tmp_path) == [4]
    assert store.about(4) == {"step": 4}
    filled(tmp_path, 5)
    assert sorted(os.listdir(tmp_path)) == [commit_name(5), SPARE]


def test_a_shorter_commit_in_the_memory_of_a_longer_one(tmp_path):
    store = filled(tmp_path, 1, 2)
    store.write(3, {}, ARRAYS[:1])
    assert [name for name, _ in store.arrays(3)] == ["a/kernel"]


KILLED = """
import os, signal, sys
import numpy as np
from pathlib import Path
from hvdtrain.train.commits import CommitStore

def arrays():
    yield "a", np.full(1000, 9.0)
    os.kill(os.getpid(), signal.SIGKILL)

def killed(*args):
    os.kill(os.getpid(), signal.SIGKILL)
store, where = CommitStore(Path(sys.argv[1])), sys.argv[2]
if where == "before its name":
    os.rename = killed
elif where == "before the former is put away":
    rename, done = os.rename, []
    os.rename = lambda *names: killed() if done else done.append(rename(*names))
store.write(9, {"step": 9}, arrays() if where == "within an array" else [("a", np.zeros(3))])
"""


@pytest.mark.parametrize(("where", "newest"), [
    ("within an array", 8), ("before its name", 8), ("before the former is put away", 9)])
def test_a_kill_leaves_a_whole_commit(where, newest, tmp_path):
    filled(tmp_path, 7, 8)
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, where], check=False)
    assert done.returncode == -signal.SIGKILL
    store = CommitStore(tmp_path)
    assert store.newest() == newest
    assert store.about(newest) == {"step": newest}
    filled(tmp_path, 10)
    assert sorted(os.listdir(tmp_path)) == [commit_name(10), SPARE]


@pytest.mark.parametrize("damage", ["shorter", "longer", "mark", "description", "empty"])
def test_damage_is_told(damage, tmp_path):
    store, path = filled(tmp_path, 6), tmp_path / commit_name(6)
    content = path.read_bytes()
    path.write_bytes({
        "shorter": content[:-1], "longer": content + b"x", "mark": b"x" + content[1:],
        "description": content[:-20] + b"x" * 20, "empty": b""}[damage])
    with pytest.raises(CheckpointError, match=rf"The commit {path} is damaged \("):
        store.about(6)
    with pytest.raises(CheckpointError, match="is damaged"):
        store.arrays(6)


def test_full_memory_is_told(tmp_path, monkeypatch):
    store = filled(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NotWrittenError, match=r"No space left .* keeps two commits"):
        filled(tmp_path, 2)
    assert store.newest() == 1
    assert store.about(1) == {"step": 1}


def test_other_names_are_no_commits(tmp_path):
    for name in ("commit-1", "commit-0000000000010", "commit-000000000001.tmp", CHANGE, SPARE):
        (tmp_path / name).touch()
    assert commits_in(tmp_path) == []
    assert commits_in(Path("no/such/folder")) == []


def test_engines_without_it_refuse_it():
    refuse_engine("ps", {})
    refuse_engine("allreduce", {"HVDTRAIN_COMMITS": "x"})
    for engine, instead in (("ps", "--max-restarts"), ("tf", "--resume")):
        with pytest.raises(ConfigError, match=rf"needs engine 'allreduce'.*{instead}"):
            refuse_engine(engine, {"HVDTRAIN_COMMITS": "x"})

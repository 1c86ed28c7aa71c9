"""Files that are whole or not there, and what killed writers leave."""

import os
import subprocess
import sys
import time

import pytest

from hvdtrain.whole_file import remove_leftovers, whole_file

#: Begins to write, says so, and waits to be killed.
WRITER = """
import sys, time
from pathlib import Path
from hvdtrain.whole_file import whole_file
with whole_file(Path(sys.argv[1])) as temporary:
    if sys.argv[2] == "folder":
        temporary.mkdir()
    else:
        temporary.write_text("half")
    print("began", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def writer():
    started = []

    def start(path, kind="file"):
        process = subprocess.Popen([sys.executable, "-c", WRITER, path, kind],
                                   stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "began\n"
        return process
    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_file_is_there_when_it_is_whole(tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("former")
    with whole_file(path) as temporary:
        assert temporary.suffix == ".keras"  # by which Keras tells formats apart
        temporary.write_text("whole")
        assert path.read_text() == "former"
    assert path.read_text() == "whole"
    assert os.listdir(tmp_path) == ["model.keras"]


def test_an_error_leaves_the_former_file_and_nothing_else(tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("former")

    def fail():
        with whole_file(path) as temporary:
            temporary.write_text("half")
            raise MemoryError
    with pytest.raises(MemoryError):
        fail()
    assert path.read_text() == "former"
    assert os.listdir(tmp_path) == ["model.keras"]


def test_the_file_and_then_its_name_are_synchronized(tmp_path, monkeypatch):
    """After a power cut the name leads to the whole file."""
    done = []
    really, rename = os.fsync, os.replace

    def fsync(descriptor):
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).split(".tmp")[0])
        really(descriptor)

    def replace(*names):
        done.append("renamed")
        rename(*names)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    with whole_file(tmp_path / "a.txt") as temporary:
        temporary.write_text("whole")
    assert done == [".a.txt", "renamed", tmp_path.name]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_writer_left_is_removed_and_a_living_one_is_left_alone(tmp_path, writer,
                                                                             kind):
    dead, alive = writer(tmp_path / "dead.txt", kind), writer(tmp_path / "alive.txt", kind)
    dead.kill()  # and not waited for, as where its parent is busy
    time.sleep(0.1)
    remove_leftovers(tmp_path)
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".alive.txt.tmp-")
    assert left.endswith(f"-{alive.pid}.txt")


def test_what_this_host_left_is_removed_by_who_holds_the_lock(tmp_path, writer):
    """The writer need not have ended to the last: its lock is let go of before."""
    writer(tmp_path / "a.txt")
    remove_leftovers(tmp_path, locked=True)
    assert os.listdir(tmp_path) == []


def test_what_another_host_writes_is_left_alone_until_it_is_old(tmp_path, writer):
    process = writer(tmp_path / "a.txt")
    process.kill()
    process.wait()
    (name,) = os.listdir(tmp_path)
    elsewhere = tmp_path / name.replace(os.uname().nodename, "elsewhere")
    (tmp_path / name).rename(elsewhere)
    remove_leftovers(tmp_path, "b.txt")
    remove_leftovers(tmp_path, "a.txt")
    assert elsewhere.exists()
    os.utime(elsewhere, (time.time() - 7200,) * 2)
    remove_leftovers(tmp_path, "a.txt")
    assert not elsewhere.exists()


def test_what_former_versions_left_is_removed_when_it_is_old(tmp_path):
    left = tmp_path / ".epoch-00001.tmp-123.keras"
    left.write_text("half")
    remove_leftovers(tmp_path)
    assert left.exists()
    os.utime(left, (time.time() - 7200,) * 2)
    remove_leftovers(tmp_path)
    assert not left.exists()

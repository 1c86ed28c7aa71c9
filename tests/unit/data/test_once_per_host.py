"""One of several real processes does the work; the others see what came of it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hvdtrain.data.build_once import once_per_host
from hvdtrain.errors import DataError

#: Works as told by files in its folder: says that it began, waits for "go", fails where "fail" is.
WORKER = """
import os, sys, time
from pathlib import Path
from hvdtrain import log
from hvdtrain.data.build_once import once_per_host
from hvdtrain.errors import DataError

log.configure("worker")
folder = Path(sys.argv[1])

def work(path):
    with (folder / "began").open("a") as stream:
        stream.write(f"{os.getpid()}\\n")
    path.write_text("half")
    while not (folder / "go").exists():
        time.sleep(0.01)
    if (folder / "fail").exists():
        raise DataError("shard-7 is damaged")
    path.write_text("whole")

try:
    print(once_per_host(folder / "cache" / "result", work).read_text())
except DataError as error:
    print(f"error: {error}")
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def start():
        process = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(process)
        return process
    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} has not come"
        time.sleep(0.01)


def first_and_waiting(start, tmp_path, waiting):
    """A process that works, and others that have said that they wait for it."""
    first = start()
    wait_for(tmp_path / "began")
    others = [start() for _ in range(waiting)]
    for process in others:
        assert "another process of this host is making" in process.stderr.readline()
    return first, others


def answers(processes):
    return [process.stdout.read().strip() for process in processes]


def test_one_works_and_the_others_wait(start, tmp_path):
    first, others = first_and_waiting(start, tmp_path, 2)
    assert not (tmp_path / "cache" / "result").exists()
    (tmp_path / "go").touch()
    assert answers([first, *others]) == ["whole"] * 3
    assert (tmp_path / "began").read_text().split() == [str(first.pid)]
    assert sorted(os.listdir(tmp_path / "cache")) == [".result.lock", "result"]


def test_the_others_see_the_error(start, tmp_path):
    (tmp_path / "fail").touch()
    first, others = first_and_waiting(start, tmp_path, 2)
    (tmp_path / "go").touch()
    assert answers([first, *others]) == ["error: shard-7 is damaged"] * 3
    assert (tmp_path / "began").read_text().split() == [str(first.pid)]
    (tmp_path / "fail").unlink()
    assert answers([start()]) == ["whole"]  # a later process tries again


def test_another_process_takes_over_from_one_that_is_killed(start, tmp_path):
    first, (other,) = first_and_waiting(start, tmp_path, 1)
    first.send_signal(signal.SIGKILL)
    (tmp_path / "go").touch()
    assert answers([other]) == ["whole"]
    assert (tmp_path / "began").read_text().split() == [str(first.pid), str(other.pid)]
    assert sorted(os.listdir(tmp_path / "cache")) == [".result.lock", "result"]


def test_a_folder_can_be_made(tmp_path):
    def work(path):
        path.mkdir()
        (path / "a").write_text("x")
    result = once_per_host(tmp_path / "made", work)
    assert (result / "a").read_text() == "x"
    assert once_per_host(result, lambda path: pytest.fail("it is there")) == result


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/result cannot be made: .*HVDTRAIN_CACHE"):
        once_per_host(tmp_path / "file" / "result", lambda path: None)

    def full(path):
        path.write_text("part")
        raise OSError(28, "No space left on device")
    with pytest.raises(DataError, match=r"No space left on device\. Free space"):
        once_per_host(tmp_path / "result", full)
    assert sorted(os.listdir(tmp_path)) == [".result.lock", "file"]


def test_other_errors_keep_their_type(tmp_path):
    with pytest.raises(ZeroDivisionError):
        once_per_host(tmp_path / "result", lambda path: 1 / 0)


def test_what_another_host_is_making_of_it_is_left_alone(tmp_path):
    """Where locks end at the host, as on Lustre with `localflock`."""
    elsewhere = tmp_path / f".result.tmp-elsewhere-1-{os.getpid()}"
    elsewhere.write_text("half")
    assert once_per_host(tmp_path / "result", lambda path: path.write_text("whole")).read_text() \
        == "whole"
    assert elsewhere.read_text() == "half"

"""A function in a fork: what it has, what it has not, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.fork import Fork, can_fork

LIMIT_S = 10.0


def said(fork: Fork) -> tuple[bytes, bytes]:
    """What a captured fork has written, and its end."""
    assert fork.stdout is not None
    assert fork.stderr is not None
    with fork.stdin, fork.stdout, fork.stderr:
        fork.stdin.close()
        told = fork.stdout.read(), fork.stderr.read()
        fork.wait(LIMIT_S)
    return told


def test_it_has_its_streams_and_what_it_keeps_and_nothing_else() -> None:
    kept, other = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)

    def run() -> None:
        held = {int(name) for name in os.listdir("/proc/self/fd")}
        names = {Path("/proc/self/comm").read_text().strip(),
                 Path("/proc/self/cmdline").read_text().strip("\0")}
        has_all = {0, 1, 2, kept} < held
        os.write(1, f"{has_all} {len(held)} {names} {os.getsid(0) == os.getpid()} "
                    f"{os.read(0, 9)!r}".encode())

    fork = Fork(run, name="hvdtrain-test", keep=(kept,), captured=True)
    out, err = said(fork)
    os.close(kept)
    os.close(other)
    # One more is the folder that is being read.
    assert out.decode() == "True 5 {'hvdtrain-test'} True b''"
    assert err == b""
    assert fork.returncode == 0


def test_it_ends_with_the_code_of_its_function() -> None:
    for run, code in ((lambda: sys.exit(7), 7), (lambda: sys.exit(), 0), (lambda: 1 / 0, 1)):
        fork = Fork(run, name="hvdtrain-test", captured=True)
        _, err = said(fork)
        assert fork.returncode == code
        assert (b"ZeroDivisionError" in err) == (code == 1)


def test_it_handles_no_signal_of_its_parent_and_can_be_killed() -> None:
    former = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        fork = Fork(lambda: time.sleep(60), name="hvdtrain-test", captured=True)
        assert fork.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            fork.wait(0.05)
        os.kill(fork.pid, signal.SIGUSR1)
        assert fork.wait(LIMIT_S) == -signal.SIGUSR1
        fork.kill()  # it is gone, and its number may be another's
        said(fork)
        fork = Fork(lambda: time.sleep(60), name="hvdtrain-test", captured=True)
        fork.kill()
        assert fork.wait(LIMIT_S) == -signal.SIGKILL
        said(fork)
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_it_works_in_a_process_without_standard_streams() -> None:
    """Then the pipes get the numbers 0 to 2."""
    program = ("import os, sys\nfrom hvdtrain.fork import Fork\nout = os.dup(1)\n"
               "for number in range(3): os.close(number)\n"
               "fork = Fork(lambda: os.write(1, os.read(0, 9)), name='t', captured=True)\n"
               "fork.stdin.write(b'heard'); fork.stdin.close()\n"
               "os.write(out, fork.stdout.read()); fork.wait()\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False,
                          timeout=LIMIT_S)
    assert done.stdout == b"heard"


def test_a_process_with_threads_is_not_forked() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert not can_fork()
    end.set()
    thread.join()

"""What the launcher says while nothing happens, and whether a rank is seen to run."""

import os
import signal
import subprocess
import time
from pathlib import Path

from hvdtrain.launch.waiting import WaitingWords, runs_below


def test_words_come_after_a_while_and_ever_more_seldom() -> None:
    said: list[str] = []
    waiting = WaitingWords(said.append, first_s=0.1)
    waiting.tick(lambda: "too early")
    began = time.monotonic()
    while time.monotonic() - began < 0.6:
        waiting.tick(lambda: "hostb")
        time.sleep(0.01)
    assert said == ["waiting for hostb: 0 s so far"] * 3  # after 0.1, 0.2 and 0.4 s


def test_no_words_are_no_line() -> None:
    said: list[str] = []
    WaitingWords(said.append, first_s=0.0).tick(lambda: "")
    assert said == []


def test_a_program_is_seen_below_the_processes_between() -> None:
    command = ["/bin/sleep", "54.321"]
    with subprocess.Popen(["/bin/sh", "-c", f"{' '.join(command)}; true"]) as shell:
        deadline = time.monotonic() + 5.0
        while not runs_below(os.getpid(), command) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert runs_below(os.getpid(), command)
        assert runs_below(shell.pid, command)
        assert not runs_below(os.getpid(), ["/bin/sleep", "54"])
        child, = Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
    assert not runs_below(os.getpid(), command)

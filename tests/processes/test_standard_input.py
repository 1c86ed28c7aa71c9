"""Standard input of a single rank: prompts, debuggers and pipes, in a real terminal."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import preload

LIMIT_S = 60.0  # for a rank that loads TensorFlow on a loaded machine
ROOT = Path(__file__).resolve().parents[2]
LAUNCH = (sys.executable, "-m", "hvdtrain", "launch")
SCRIPT = """
secret = 40 + 2
breakpoint()
print("hello", input("name? "))
"""
JOB = """
import keras
import numpy as np
import hvdtrain

def model():
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made

def data():
    secret = 40 + 2
    breakpoint()
    return hvdtrain.ArraySource((np.ones((8, 2)), np.ones((8, 1))))

def job():
    config = hvdtrain.TrainConfig(epochs=1, batch_per_rank=4)
    return hvdtrain.Job(name="asks", model=model, data=data, config=config)
"""


class Terminal:
    """A program in a terminal of its own, with someone who answers its prompts."""

    def __init__(self, command: Sequence[object], folder: Path, **environ: str) -> None:
        self.text = ""
        self._pid, self.descriptor = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            words = [str(word) for word in command]
            os.execvpe(words[0], words, os.environ | {"PYTHONPATH": str(ROOT)} | environ)

    def wait_for(self, prompt: str) -> None:
        """Read until a prompt stands at the end of what has come."""
        deadline = time.monotonic() + LIMIT_S
        while not self.text.endswith(prompt):
            assert time.monotonic() < deadline, f"no {prompt!r} at the end of: {self.text}"
            assert self._read(), f"ended without {prompt!r}: {self.text}"

    def answer(self, prompt: str, text: str) -> None:
        """Type a line when a prompt comes."""
        self.wait_for(prompt)
        os.write(self.descriptor, f"{text}\n".encode())

    def end(self) -> int:
        """The exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self._read():
            assert time.monotonic() < deadline, self.text
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _read(self) -> bool:
        if not select.select([self.descriptor], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self.descriptor, 4096)
        except OSError:  # all of its programs have ended
            return False
        self.text += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


def write(folder: Path, text: str) -> Path:
    path = folder / "asks.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("command", [
    (sys.executable,), (*LAUNCH, "-np", "1", "--", sys.executable),
    (*LAUNCH, "-np", "1", "--preload", "--", sys.executable),
], ids=["alone", "launch", "preload"])
def test_one_rank_can_be_debugged(command: Sequence[str], tmp_path: Path) -> None:
    forked = preload.environment() if "--preload" in command else {}
    terminal = Terminal((*command, write(tmp_path, SCRIPT)), tmp_path, **forked)
    terminal.answer("(Pdb) ", "p secret")
    terminal.answer("42\n(Pdb) ", "c")
    terminal.answer("name? ", "world")
    assert terminal.end() == 0
    assert terminal.text.endswith("\nhello world\n")
    assert "[0]" not in terminal.text


@pytest.mark.parametrize("launched", [False, True], ids=["fit", "launch"])
def test_one_rank_of_fit_can_be_debugged(launched: bool, tmp_path: Path) -> None:
    fit = ("fit", write(tmp_path, JOB), "--output", tmp_path / "run")
    command = (*LAUNCH, "-np", "1", *fit) if launched else preload.forked(
        sys.executable, "-m", "hvdtrain", *fit)
    terminal = Terminal(command, tmp_path, **preload.environment())
    terminal.answer("(Pdb) ", "p secret")
    terminal.answer("42\n(Pdb) ", "c")
    assert terminal.end() == 0
    assert (tmp_path / "run/model.keras").is_file()


def test_the_end_of_input_reaches_the_rank(tmp_path: Path) -> None:
    command = (*LAUNCH, "-np", "1", "--", sys.executable, write(tmp_path, SCRIPT))
    terminal = Terminal(command, tmp_path)
    terminal.wait_for("(Pdb) ")
    terminal.answer("(Pdb) ", "\x04")
    assert terminal.end() == 1
    assert "bdb.BdbQuit" in terminal.text


def test_in_the_background_what_is_typed_is_for_the_shell(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys; print('read', repr(sys.stdin.read()))")
    text = (f"set -m; {' '.join(LAUNCH)} -np 1 -- {sys.executable} {script} & wait; "
            "read line; echo got $line")
    terminal = Terminal(("/bin/sh", "-c", text), tmp_path)
    os.write(terminal.descriptor, b"typed\n")
    assert terminal.end() == 0
    assert "read ''\n" in terminal.text
    assert terminal.text.endswith("got typed\n")


def launched(np: int, tmp_path: Path, script: str, **options: Any) -> Any:
    return subprocess.run([*LAUNCH, "-np", str(np), "--", sys.executable,
                           write(tmp_path, script)], capture_output=True, text=True, check=False,
                          timeout=LIMIT_S, env=os.environ | {"PYTHONPATH": str(ROOT)}, **options)


def test_one_rank_reads_what_is_piped(tmp_path: Path) -> None:
    done = launched(1, tmp_path, "import sys; print(len(sys.stdin.read()))", input="x" * 300000)
    assert (done.returncode, done.stdout, done.stderr) == (0, "300000\n", "")


def test_a_rank_that_does_not_read_leaves_the_input_to_others(tmp_path: Path) -> None:
    """As in `while read host; do hvdtrain launch ...; done < hosts`."""
    write(tmp_path, "print('ran')")
    (tmp_path / "lines").write_text("one\ntwo\n")
    text = f"while read line; do {' '.join(LAUNCH)} -np 1 -- {sys.executable} asks.py; done < lines"
    done = subprocess.run(["/bin/sh", "-c", text], cwd=tmp_path, capture_output=True, text=True,
                          check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (done.stdout, done.stderr) == ("ran\nran\n", "")


def test_a_closed_input_is_none(tmp_path: Path) -> None:
    write(tmp_path, "import sys; print(repr(sys.stdin.read()))")
    done = subprocess.run(["/bin/sh", "-c", f"exec {' '.join(LAUNCH)} -np 1 -- {sys.executable} "
                           "asks.py <&-"], cwd=tmp_path, capture_output=True, text=True,
                          check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "''\n", "")


@pytest.mark.parametrize(("script", "error"), [
    ("input('name? ')", "EOFError: EOF when reading a line"), (SCRIPT, "bdb.BdbQuit")])
def test_several_ranks_have_no_input_and_say_so(script: str, error: str, tmp_path: Path) -> None:
    done = launched(2, tmp_path, script, input="world\n")
    assert done.returncode == 1
    assert error in done.stderr
    assert done.stderr.splitlines()[-1] == (
        "hvdtrain launch: standard input is there with one rank only: input() and debuggers work "
        "with -np 1")

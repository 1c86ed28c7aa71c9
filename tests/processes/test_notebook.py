"""`notebook_launcher` from cells of a real Jupyter kernel."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from tests import preload

LIMIT_S = 5.0  # for what takes a moment, on a loaded machine

DEFINITIONS = """
import os, signal, subprocess, sys, threading, time
from dataclasses import dataclass
import keras
import numpy as np
import tensorflow as tf
import hvdtrain

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)

class Twice(keras.layers.Layer):
    def call(self, values):
        return 2 * values

def half(true, predicted):
    return tf.reduce_mean(tf.square(true - predicted)) / 2

def make():
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input((4,)), Twice(), keras.layers.Dense(1)])
    made.compile("sgd", half)
    return made

@dataclass
class Found:
    size: int

    def times(self):
        return factor * self.size

factor = 2
model = make()
used_before = model.predict(x, verbose=0)
"""


class Kernel(NotebookClient):
    """A notebook that is written cell by cell."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nbformat.v4.new_notebook(), timeout=120, kernel_name="python3",
                         allow_errors=True, **options)
        self.shown: list[tuple[float, str]] = []
        """What the last cell has written to standard output, and when it came."""
        self.errors = ""
        """What it has written to standard error."""
        self.on_output: Callable[[str], None] = lambda text: None

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "stream":
            text = msg["content"]["text"]
            if msg["content"]["name"] == "stdout":
                self.shown.append((time.monotonic(), text))
                self.on_output(text)
            else:
                self.errors += text
        return super().process_message(msg, cell, cell_index)

    def run(self, text: str) -> str:
        """Run a cell; gives its standard output, or its error."""
        self.shown, self.errors = [], ""
        cell = nbformat.v4.new_code_cell(text.strip())
        self.nb.cells.append(cell)
        self.execute_cell(cell, len(self.nb.cells) - 1)
        for output in cell.outputs:
            if output.output_type == "error":
                return f"{output.ename}: {output.evalue}"
        return "".join(text for _, text in self.shown)


@contextmanager
def started(folder: Path, environ: dict[str, str]) -> Iterator[Kernel]:
    """A kernel whose temporary files are below a folder."""
    kernel = Kernel(resources={"metadata": {"path": str(folder)}})
    with kernel.setup_kernel(env=os.environ | environ | {"TMPDIR": str(folder)}):
        kernel.folder = folder
        yield kernel


def processes_of(folder: Path) -> list[str]:
    """The ranks of calls whose files are below a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if f"{folder}/hvdtrain-call-" in words:
                found.append(words.replace("\0", " "))
    return found


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def eventually(check: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not check() and time.monotonic() < deadline:
        time.sleep(0.02)
    return check()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with started(tmp_path_factory.mktemp("kernel"), preload.environment()) as made:
        assert made.run(DEFINITIONS) == ""
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each cell: no rank, no agent, no file."""
    yield
    if "kernel" in request.fixturenames:
        made = request.getfixturevalue("kernel")
        pid = made.km.provisioner.pid
        assert eventually(lambda: not processes_of(made.folder) and not descendants(pid))
        assert not list(made.folder.glob("hvdtrain-*"))


def test_a_model_defined_in_a_cell_trains_on_two_ranks(kernel: Kernel) -> None:
    shown = kernel.run("""
def train(epochs, *, rate):
    session = hvdtrain.init()
    model = hvdtrain.distribute(make())
    model.optimizer.learning_rate = rate
    print("rank", session.world.rank, "of", session.world.size)
    history = model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=1)
    print("trained")
    return history, model.get_weights()

history, weights = hvdtrain.notebook_launcher(train, (3,), {"rate": 0.02}, np=2)
alone = make()
alone.optimizer.learning_rate = 0.02
expected = alone.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
print(type(history).__name__, np.allclose(history.history["loss"], expected.history["loss"]),
      all(np.allclose(*pair) for pair in zip(weights, alone.get_weights())))
""")
    lines = shown.splitlines()
    assert lines[0] == "rank 0 of 2"
    assert [line for line in lines if line.startswith("Epoch")] == [
        "Epoch 1/3", "Epoch 2/3", "Epoch 3/3"]
    assert "\r\x1b[1m4/4" in shown  # Keras' progress bar as it is
    assert lines[-2:] == ["trained", "History True True"]


def test_output_comes_as_it_is_printed_and_of_the_chief_alone(kernel: Kernel) -> None:
    shown = kernel.run("""
def speak():
    rank = os.environ["HOROVOD_RANK"]
    for text in ("one ", "\\r\\u2501 ", "\\bthree\\n"):
        sys.stdout.write(text)
        sys.stdout.flush()
        time.sleep(0.4)
    print("rank", rank)
    print("careful", rank, file=sys.stderr)

hvdtrain.notebook_launcher(speak)
print("after")
""")
    assert shown == "one \r\u2501 \bthree\nrank 0\nafter\n"
    assert kernel.errors == "careful 0\n"
    times = {text: at for at, text in kernel.shown}
    assert times["\r\u2501 "] - times["one "] > 0.2
    assert times["\bthree\n"] - times["\r\u2501 "] > 0.2


def test_verbose_shows_the_others_too(kernel: Kernel) -> None:
    shown = kernel.run("""
hvdtrain.notebook_launcher(lambda: print("here"), verbose=True)
""")
    assert sorted(shown.splitlines()) == ["[1] here", "here"]


def test_the_error_of_a_rank_is_raised_in_the_cell(kernel: Kernel) -> None:
    error = kernel.run("""
def fail(number):
    session = hvdtrain.init()
    if session.world.rank == 1:
        print("at sample", number)
        raise ValueError(f"sample {number} is bad")  # the line
    session.collective.barrier()

try:
    hvdtrain.notebook_launcher(fail, (7,))
except hvdtrain.HvdtrainError as error:
    kept = error
    raise
""")
    lines = error.splitlines()
    assert lines[0].startswith("RunFailedError: rank 1 on localhost failed ")
    assert lines[0].endswith(" after the start: exit code 1, ValueError")
    assert "  | at sample 7" in lines
    at = lines.index("Rank 1:")
    assert [line for line in lines[at + 1:] if line.strip(" ^")] == [
        "Traceback (most recent call last):",
        f"  Cell In[{len(kernel.nb.cells)}], line 5, in fail",
        "    raise ValueError(f\"sample {number} is bad\")  # the line",
        "ValueError: sample 7 is bad"]
    assert kernel.run("print(kept.rank, kept.exit_code, kept.traceback.splitlines()[-1])") == \
        "1 1 ValueError: sample 7 is bad\n"


def test_a_mistake_is_told_with_the_line_of_the_cell(kernel: Kernel) -> None:
    error = kernel.run("""
def mistaken():
    hvdtrain.init()
    hvdtrain.TrainConfig(epochs=-1)

hvdtrain.notebook_launcher(mistaken)
""")
    lines = error.splitlines()
    assert lines[0] == "RunFailedError: all 2 ranks failed alike: exit code 2, ConfigError"
    assert lines[-2] == "    hvdtrain.TrainConfig(epochs=-1)"
    assert lines[-1].startswith("hvdtrain.errors.ConfigError: epochs must be at least 1")


def test_values_come_back_as_what_they_are(kernel: Kernel) -> None:
    assert kernel.run("""
def find():
    class Local:
        size = 3
    return Found(hvdtrain.init().world.size), {"a": np.arange(3)}, Local(), lambda: 5

found, arrays, local, five = hvdtrain.notebook_launcher(find, np=3)
factor = 10
print(found, type(found) is Found, found.times(), arrays, local.size, five())
""") == "Found(size=3) True 30 {'a': array([0, 1, 2])} 3 5\n"


def test_a_model_goes_to_the_ranks_and_comes_back(kernel: Kernel) -> None:
    assert kernel.run("""
before = model.get_weights()

def go_on():
    hvdtrain.init()
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights()))
    hvdtrain.distribute(model).fit(x, y, epochs=1, verbose=0)
    return model, model.predict(x[:2], verbose=0)

trained, expected = hvdtrain.notebook_launcher(go_on)
print(type(trained.layers[0]) is Twice, type(trained.optimizer).__name__,
      np.allclose(trained.predict(x[:2], verbose=0), expected),
      not np.allclose(trained.get_weights()[0], before[0]))
""").splitlines()[-1] == "True SGD True True"


def test_custom_objects_of_keras_are_known_on_the_ranks(kernel: Kernel) -> None:
    assert kernel.run("""
@keras.saving.register_keras_serializable(package="mine")
class Thrice(keras.layers.Layer):
    def call(self, values):
        return 3 * values

keras.Sequential([keras.Input((1,)), Thrice()]).save("thrice.keras")
del Thrice

def load(path):
    hvdtrain.init()
    return keras.models.load_model(path).predict(np.ones((1, 1)), verbose=0).tolist()

print(hvdtrain.notebook_launcher(load, (os.path.abspath("thrice.keras"),)))
""") == "[[3.0]]\n"


def test_autograph_finds_the_source_of_a_cell(kernel: Kernel) -> None:
    assert kernel.run("""
def absolute():
    hvdtrain.init()

    @tf.function
    def inner(value):
        if tf.reduce_sum(value) > 0:
            return value
        else:
            return -value

    return float(inner(tf.constant(-3.0)))

print(hvdtrain.notebook_launcher(absolute))
""") == "3.0\n"


@pytest.mark.parametrize(("cell", "words"), [
    ("dataset = tf.data.Dataset.range(3)\nhvdtrain.notebook_launcher(lambda: list(dataset))",
     "LaunchError: <lambda> cannot be sent to the ranks because of the variable dataset "
     "(_RangeDataset): "),
    ("hvdtrain.notebook_launcher(print, (threading.Lock(),))",
     "LaunchError: print cannot be sent to the ranks because of argument 1 (lock): "),
    ("hvdtrain.notebook_launcher(threading.Lock)",
     "What the function returns on rank 0 (lock) cannot be sent to the notebook: "),
    ("hvdtrain.notebook_launcher(make().summary())",
     "ConfigError: notebook_launcher takes a function. Received: None."),
    ("hvdtrain.notebook_launcher(make, 'data.npz')",
     "ConfigError: args is 'data.npz'. Expected a tuple, as ('data.npz',) for one argument."),
    ("hvdtrain.notebook_launcher(make, np=0)", "ConfigError: np is 0. "),
    ("hvdtrain.notebook_launcher(lambda: sys.exit() if os.environ['HOROVOD_RANK'] == '0' else 1)",
     "RunFailedError: Rank 0 has ended without returning from the function"),
    ("hvdtrain.notebook_launcher(lambda: os.kill(os.getpid(), signal.SIGKILL), np=1)",
     "after the start: killed by SIGKILL"),
    ("hvdtrain.notebook_launcher(lambda: time.sleep(60), timeout_s=0.3)",
     "RunFailedError: The ranks were ended: the limit of 0.3 s is over."),
    ("hvdtrain.notebook_launcher(lambda: input('name? '), np=1)",
     "Ranks have no standard input. To debug the function, call it in this process, as one rank."),
    ("hvdtrain.notebook_launcher(lambda: hvdtrain.notebook_launcher(make))",
     "This process is itself one of 2"),
])
def test_what_goes_wrong_is_told(kernel: Kernel, cell: str, words: str) -> None:
    began = time.monotonic()
    assert words in kernel.run(cell)
    assert time.monotonic() - began < 30


def test_the_ranks_get_variables(kernel: Kernel) -> None:
    assert kernel.run("""
def show():
    return os.environ["NAME"], os.environ["HOROVOD_SIZE"]

print(hvdtrain.notebook_launcher(show, np=1, env={"NAME": "a b"}))
""") == "('a b', '1')\n"


@pytest.mark.parametrize("waits", ["time.sleep(60)", "session.collective.barrier()"])
def test_an_interrupt_ends_all_ranks(kernel: Kernel, waits: str) -> None:
    """As the button does it: SIGINT to the group of the kernel."""
    sent = []

    def interrupt(text: str) -> None:
        if "waiting" in text and not sent:
            sent.append(time.monotonic())
            os.killpg(kernel.km.provisioner.pid, signal.SIGINT)

    kernel.on_output = interrupt
    error = kernel.run(f"""
def wait():
    session = hvdtrain.init()
    print("waiting", flush=True)
    if session.world.rank == 0:
        {waits}
    time.sleep(60)

hvdtrain.notebook_launcher(wait)
""")
    kernel.on_output = lambda text: None
    assert time.monotonic() - sent[0] < LIMIT_S
    assert error == "KeyboardInterrupt: "
    assert not processes_of(kernel.folder)
    assert kernel.run("print(hvdtrain.notebook_launcher(lambda: 'again'))") == "again\n"


@pytest.mark.slow
def test_a_second_call_forks_from_a_process_that_ends_with_the_kernel(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "HVDTRAIN_PRELOAD"}
    with started(tmp_path, plain | {"OMP_NUM_THREADS": "1"}) as kernel:
        kernel.run("import hvdtrain, os, sys")
        kernel.run("""
def look():
    return os.getppid(), any(name.startswith("tensorf") for name in sys.modules)
""")
        calls = [kernel.run("print(hvdtrain.notebook_launcher(look))") for _ in range(2)]
        pid = kernel.km.provisioner.pid
        parent = int(calls[0].split(",")[0].strip("("))
        assert calls == [f"({parent}, True)\n"] * 2
        assert eventually(lambda: descendants(pid) == [parent])
        # Forked ranks must not be used where TensorFlow would have been loaded differently.
        other = kernel.run("os.environ['TF_ENABLE_ONEDNN_OPTS'] = '0'\n"
                           "print(hvdtrain.notebook_launcher(look))")
        assert other.endswith(", True)\n")
        assert other != calls[0]
        assert kernel.errors == ""
        assert kernel.run("print(hvdtrain.notebook_launcher(look, preload=False)[1])") == "False\n"
        left = descendants(pid)
        assert len(left) == 1
    assert eventually(lambda: not any(Path(f"/proc/{child}").exists() for child in left))
    assert not list(tmp_path.glob("hvdtrain-*"))


def test_the_cells_of_the_page_run(kernel: Kernel) -> None:
    page = Path(__file__).resolve().parents[2] / "docs/notebooks.md"
    cells = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    shown = [kernel.run(f"{cell}\nprint('ran')") for cell in cells[:3]]
    assert len(cells) == 4  # the last one is for a notebook that has not used TensorFlow
    assert all(text.endswith("ran\n") for text in shown)
    assert "Epoch 3/3" in shown[1]
    assert kernel.run("print(model.evaluate(x, y, verbose=0)[1] > 0.8, len(history['loss']))") == \
        "True 3\n"


def test_a_killed_kernel_leaves_no_rank(tmp_path: Path) -> None:
    seen = []
    with suppress(DeadKernelError), started(tmp_path, preload.environment()) as kernel:
        pid = kernel.km.provisioner.pid

        def kill(text: str) -> None:
            seen.extend(processes_of(tmp_path))
            os.kill(pid, signal.SIGKILL)

        kernel.on_output = kill
        kernel.run("""
import hvdtrain, time
def wait():
    hvdtrain.init()
    print("waiting")
    time.sleep(60)

hvdtrain.notebook_launcher(wait)
""")
    assert len(seen) == 2
    assert eventually(lambda: not processes_of(tmp_path))


SCRIPT = """
import sys
import hvdtrain

def work(number):
    if number < 0:
        raise ValueError("negative")  # in a file
    return number * factor, __name__

factor = 2
if __name__ == "__main__":
    print(hvdtrain.notebook_launcher(work, (int(sys.argv[1]),)))
"""


@pytest.mark.parametrize(("number", "code", "words"), [
    (3, 0, "(6, '__main__')"), (-1, 1, 'raise ValueError("negative")  # in a file')])
def test_a_script_may_call_it(tmp_path: Path, number: int, code: int, words: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, path, str(number)], text=True, capture_output=True,
                          check=False, env=os.environ | preload.environment())
    assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done.stderr

"""Tests that leave something behind fail: environment, threads, processes, files."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

pytest_plugins = ["tests.preload", "tests.rank_runs"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a process that a shell has put in the background; what the tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent

#: Set by TensorFlow, Keras and Horovod when they are imported or initialised.
LIBRARY_VARIABLES = ("TF_", "KERAS", "CUDA", "HOROVOD_", "PYTEST_", "OMPI_", "PMIX_", "PRTE_",
                     "OPAL_", "XLA_", "TPU_", "GRPC_", "COLUMNS", "LINES", "KMP_", "SKLEARN")
#: Pools of the libraries that live as long as the process.
LIBRARY_THREADS = ("ThreadPoolExecutor", "tf_", "asyncio")


def _children() -> set[int]:
    from tests import preload  # pytest rewrites it when it registers the plugins above
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found - preload.processes()


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if not t.name.startswith(LIBRARY_THREADS)}


def _settled(now, before, patience_s=2.0):
    """What is there beyond `before`, after giving it a moment to end."""
    deadline = time.monotonic() + patience_s
    while (extra := now() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return extra


@pytest.fixture(autouse=True)
def no_leaks():
    environment, directory = dict(os.environ), Path.cwd()
    files, children, threads = set(os.listdir(ROOT)), _children(), _threads()
    yield
    changed = {name for name in {*environment, *os.environ}
               if environment.get(name) != os.environ.get(name)
               and not name.startswith(LIBRARY_VARIABLES)}
    assert not changed, f"environment variables were changed: {sorted(changed)}"
    assert Path.cwd() == directory, "the working directory was changed"
    extra = _settled(_threads, threads)
    assert not extra, f"threads were left behind: {sorted(t.name for t in extra)}"
    assert not _settled(_children, children), "child processes were left behind"
    left = set(os.listdir(ROOT)) - files - {".mypy_cache", ".ruff_cache", ".pytest_cache"}
    assert not left, f"files were left in the checkout: {sorted(left)}"

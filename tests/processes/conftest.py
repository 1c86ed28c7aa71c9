"""What the scripts of `tests/script_runs.py` have made, for the tests that compare it."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from tests import preload, script_runs


def _run(folder, *command):
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, text=True, capture_output=True, timeout=300,
        check=False, env={**os.environ, **preload.environment(), script_runs.EXACT_VARIABLE: "1"})
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert not preload.refusals(done.stderr), done.stderr


@pytest.fixture(scope="session")
def scripts_run(tmp_path_factory):
    """Runs scripts, once, each in one process (`ranks` 0) or all in one launch; gives two folders:
    of what they have made, and in which they have run.
    """
    top = tmp_path_factory.mktemp("scripts")
    (top / "data").mkdir()
    _run(top / "data", *preload.forked(sys.executable, script_runs.__file__, "data"))

    @cache
    def run(what, ranks, names):
        place = top / str(len(list(top.iterdir())))
        folder, out = place / "work", place / "made"
        shutil.copytree(top / "data", folder)
        out.mkdir()
        program = (sys.executable, script_runs.__file__, what, out)
        if ranks:
            _run(folder, sys.executable, "-m", "hvdtrain", "launch", "-np", ranks, "--", *program,
                 *names)
            return out, folder
        half = len(names) // 2  # two processes, as there are two cores
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda some: _run(folder, *preload.forked(*program, *some)),
                             (names[:half], names[half:])))
        return out, folder
    return run

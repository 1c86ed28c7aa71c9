"""One preloaded process for the whole run of pytest, from which tests fork what needs TensorFlow.

`environment()` is added to that of a command that starts ranks: they are forks then. `forked` goes
before a Python command, which then is one itself. Tests that are about starting processes use
neither.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

from hvdtrain.preload.client import SOCKET_VARIABLE, Preloader
from hvdtrain.preload.server import DEFAULT_MODULES, server_command

STAND_IN = (sys.executable, "-IS", str(Path(__file__).with_name("stand_in.py")))
STARTERS = ("HOROVOD_", "OMPI_", "PMI", "SLURM_", "HVDTRAIN_", "TF_CONFIG")
_MODULES = (*DEFAULT_MODULES, "pytest", "sklearn.datasets", "sklearn.model_selection",
            "hvdtrain.zoo.datasets", "hvdtrain.zoo.models", "hvdtrain.optim",
            "hvdtrain.engines.parameter_server.chief", "hvdtrain.engines.tf_distribute.training")
#: They count at import, so they are those of every test that uses the preloaded process.
_SHARED = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
           "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
_running: list[Preloader] = []


@cache
def _preloader() -> Preloader:
    env = {name: value for name, value in os.environ.items() if not name.startswith(STARTERS)}
    _running.append(Preloader(server_command(_MODULES), env | _SHARED))
    return _running[0]


def processes() -> set[int]:
    """The preloaded process, if it has been needed by now."""
    return {preloader.pid for preloader in _running}


def environment() -> dict[str, str]:
    """Variables by which the ranks of a command are forks."""
    return _SHARED | {SOCKET_VARIABLE: os.environ.get(SOCKET_VARIABLE) or _preloader().path}


def forked(*command: object) -> list[str]:
    """A Python command in a fork; it needs `environment()`."""
    return [*STAND_IN, *map(str, command)]


def refusals(text: str) -> list[str]:
    """The lines of an output that tell of processes that were not forked."""
    return [line for line in text.splitlines()
            if "as new processes: " in line or "as a new process: " in line]


def pytest_unconfigure() -> None:
    """The preloaded process ends with the run."""
    for preloader in _running:
        preloader.close()

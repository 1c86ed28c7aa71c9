"""What a job consists of (asked of a process that loads TensorFlow), and what this machine is."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.preload.client import start_program

MARK = "HVDTRAIN-JOB "
"""As in `job_probe.py`, which loads TensorFlow."""
_MODULE = "hvdtrain.bench.job_probe"
_LIMIT_S = 300.0
_SHOWN_LINES = 8
_LEAST_EPOCHS = 2
_PACKAGES = ("hvdtrain", "tensorflow", "tensorflow-cpu", "keras", "horovod", "mpi4py", "numpy")


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """A job in figures."""

    parameters: int
    parameter_bytes: int
    """Of all trainable parameters as float32."""
    samples: int
    """Of the training data."""
    batch_per_rank: int
    epochs: int


def ask_job(job: str, environ: Mapping[str, str]) -> JobFacts:
    """Build a job once and count. Takes the seconds of importing TensorFlow.

    Raises:
        LaunchError: The job cannot be built; the message ends with what was printed.
    """
    command = [sys.executable, "-m", _MODULE, job]
    with tempfile.TemporaryFile() as output:
        process = start_program(command, env={"TF_CPP_MIN_LOG_LEVEL": "2", **environ},
                                stdin=subprocess.DEVNULL, stdout=output.fileno(),
                                stderr=subprocess.STDOUT)
        try:
            code = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"The job {job} was not built in {_LIMIT_S:g} s. Expected that its "
                              "model and data are made in less; train it alone first: hvdtrain "
                              f"fit {job}") from None
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    for line in lines:
        if line.startswith(MARK):
            return JobFacts(**json.loads(line.removeprefix(MARK)))
    said = "\n".join(lines[-_SHOWN_LINES:])
    raise LaunchError(f"The job {job} cannot be built (exit code {code}):\n{said}")


def check_epochs(job: str, facts: JobFacts, epochs: int | None) -> None:
    """Refuse a run of which nothing would be left to measure.

    Raises:
        ConfigError: There would be fewer than two epochs.
    """
    if epochs is None and facts.epochs < _LEAST_EPOCHS:
        raise ConfigError(f"The job {job} trains for {facts.epochs} epoch, and the first one is "
                          "not measured. Give --epochs 2 or more.")


def machine_facts() -> dict[str, Any]:
    """This machine and the versions of what runs on it, without names of host or user."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"cores": len(os.sched_getaffinity(0)), "processor": _processor(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "system": f"{platform.system()} {platform.release()}", "versions": versions}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()

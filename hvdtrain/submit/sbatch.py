"""Submits a batch script: the one module of `submit` that starts a process, without a shell."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import LaunchError, MachineError
from hvdtrain.submit.slurm_options import SlurmOptions

_TIMEOUT_S = 120


def submit(script: str, file: Path | None, options: SlurmOptions,
           environ: Mapping[str, str]) -> str:
    """Give a script to Slurm.

    Args:
        script: String, its text; sent through standard input where there is no file.
        file: Path of the script, or None.
        options: Tell which variables must be set.
        environ: The environment; sbatch hands it on to the job.

    Returns:
        The number of the job.

    Raises:
        MachineError: There is no sbatch.
        LaunchError: A variable is not set, or Slurm refuses the script.
    """
    missing = [item for item in options.env if "=" not in item and item not in environ]
    if missing:
        raise LaunchError(f"--env {missing[0]}: the variable is not set here. Expected "
                          f"{missing[0]}=VALUE, or a variable that is set.")
    sbatch = shutil.which("sbatch", path=environ.get("PATH"))
    if sbatch is None:
        raise MachineError("There is no sbatch on PATH. Submit on a login node of the cluster, or "
                           "write the script with --script FILE and submit it there.")
    command = [sbatch, "--parsable", *([str(file.absolute())] if file is not None else [])]
    try:
        done = subprocess.run(command, input=None if file is not None else script, text=True,
                              capture_output=True, timeout=_TIMEOUT_S, env=dict(environ),
                              stdin=subprocess.DEVNULL if file is not None else None, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"sbatch did not take the job: {error}. Does `sinfo` answer?") from error
    if done.returncode != 0:
        raise LaunchError(f"sbatch refused the job: {done.stderr.strip()}")
    # With several clusters it is NUMBER;CLUSTER.
    return done.stdout.strip().partition(";")[0]

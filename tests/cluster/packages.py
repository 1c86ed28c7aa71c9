"""Debian packages that the virtual hosts and the private Slurm need, and who may have them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.bench.virtual_hosts import PROGRAMS, program

REQUIRE_VARIABLE = "HVDTRAIN_REQUIRE_CLUSTER"
"""Set to 1 where a cluster test that cannot run is a failure (continuous integration)."""

HOSTS = PROGRAMS
SLURM = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client",
         "munged": "munge"}
# Without libpmix-dev's link `--mpi=pmix` says "can not load PMIx library".
SLURM_EXTRAS = ("slurm-wlm-basic-plugins", "libpmix2", "libpmix-dev")


class NotPermittedError(Exception):
    """This machine, or this user, cannot have the cluster; the message says why."""


def is_required() -> bool:
    """Whether a missing cluster fails the tests."""
    return os.environ.get(REQUIRE_VARIABLE) == "1"


def ensure(programs: Mapping[str, str], extras: tuple[str, ...] = ()) -> None:
    """Install what is missing, with apt-get.

    Daemons of a package would start by themselves under systemd; there, it is left to the user.

    Raises:
        NotPermittedError: Something is missing and may not be installed.
    """
    if os.geteuid() != 0:
        raise NotPermittedError("network namespaces and Slurm need root")
    missing = sorted({package for name, package in programs.items() if program(name) is None})
    missing += [package for package in extras if not _is_installed(package)]
    if not missing:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if program("apt-get") is None:
        raise NotPermittedError(f"missing: {', '.join(missing)}, and there is no apt-get")
    if Path("/run/systemd/system").exists() and not is_required():
        raise NotPermittedError(f"missing; run: {' '.join(command)}")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for attempt in (["apt-get", "update"], None):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if attempt is not None:
            subprocess.run(attempt, env=environ, capture_output=True, check=False)
    raise NotPermittedError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")


def _is_installed(package: str) -> bool:
    done = subprocess.run(["dpkg-query", "-W", "-f", "${Status}", package], capture_output=True,
                          text=True, check=False) if program("dpkg-query") else None
    return done is not None and "install ok installed" in done.stdout

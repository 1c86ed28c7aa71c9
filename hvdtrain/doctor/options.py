"""`DoctorOptions`: what the user asks of `hvdtrain doctor`, with the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdtrain.launch.options import HostsOptions
from hvdtrain.settings import setting


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(HostsOptions):
    """Validated when made."""

    hosts: str | None = setting(
        None, "Hosts to examine, and how many ranks each is to take.", option="-H,--hosts",
        metavar="HOST:SLOTS,...", unset="this host")
    output: Path | None = setting(
        None, "The job's output folder: is it one folder on all hosts?", option="--output,-o",
        unset="runs, if it is there")
    allreduce: bool = setting(True, "Run two ranks that reduce known values.")

"""`LaunchOptions`: what the user asks of `hvdtrain launch`, with the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from hvdtrain.config import CollectiveName
from hvdtrain.errors import ConfigError
from hvdtrain.launch.remote_shell import RemoteOptions
from hvdtrain.settings import check_finite, setting, table
from hvdtrain.world.network import check_wanted

STARTERS = ("auto", "native", "srun", "horovodrun", "mpirun")
COLLECTIVES: tuple[str, ...] = get_args(CollectiveName)


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """What `horovodrun` takes for a job whose hosts come and go; None: not given."""

    min_np: int | None = setting(None, "Ranks at least.", option="--min-np")
    max_np: int | None = setting(None, "Ranks at most.", option="--max-np")
    host_discovery_script: Path | None = setting(
        None, "A program that prints the hosts and their slots.", option="--host-discovery-script")
    slots_per_host: int | None = setting(
        None, "Ranks on each host that the program names without slots.", option="--slots-per-host")
    elastic_timeout_s: int | None = setting(
        None, "How long to wait for enough ranks.", option="--elastic-timeout")
    reset_limit: int | None = setting(
        None, "So often the job is set up anew at most.", option="--reset-limit")

    def flags(self) -> tuple[str, ...]:
        """The options as horovodrun spells them."""
        given = (("--min-np", self.min_np), ("--max-np", self.max_np),
                 ("--host-discovery-script", self.host_discovery_script),
                 ("--slots-per-host", self.slots_per_host),
                 ("--elastic-timeout", self.elastic_timeout_s), ("--reset-limit", self.reset_limit))
        return tuple(word for name, value in given if value is not None
                     for word in (name, str(value)))


@dataclass(frozen=True, kw_only=True)
class HostsOptions:
    """Which hosts, and the way to them."""

    hosts: str | None = setting(
        None, "Hosts and how many ranks each takes.", option="-H,--hosts",
        metavar="HOST:SLOTS,...", unset="the Slurm job, the MPIJob, or this host")
    hostfile: Path | None = setting(
        None, "Hosts from a file in the way of Open MPI or MPICH, in place of `--hosts`.")
    remote: RemoteOptions = table(RemoteOptions, "How other hosts are reached.")
    network_interface: tuple[str, ...] = setting(
        (), "Network of the ranks, by name of the interface or by address, looked up on each host; "
        "the first that a host has counts.", metavar="NAME|CIDR,...", commas=True,
        unset="the way to the other hosts")

    def __post_init__(self) -> None:
        if self.hosts is not None and self.hostfile is not None:
            raise ConfigError("Both -H and --hostfile are given. Expected one of them.")
        check_wanted(self.network_interface)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(HostsOptions):
    """Validated when made; unknown names are refused with the valid ones."""

    command: tuple[str, ...]
    """The program of each rank with its arguments."""
    np: int | None = setting(
        None, "Number of ranks.", option="-np,--np", unset="all slots of -H")
    start_timeout_s: float | None = setting(
        None, "How long to wait for hosts that cannot be reached.", metavar="SECONDS",
        unset="0; in an MPIJob 300")
    starter: str = setting("auto", f"What creates the processes: {', '.join(STARTERS)}.")
    collective: str = setting("auto", f"What moves the bytes: {', '.join(COLLECTIVES)}.")
    env: tuple[str, ...] = setting(
        (), "A variable for the ranks; repeatable.", option="--env,-x", metavar="VAR[=VALUE]")
    output: Path | None = setting(None, "Directory for one log file per rank.")
    timeout_s: float | None = setting(
        None, "Limit for the whole job.", option="--timeout,--timeout-s", metavar="SECONDS")
    grace_s: float = setting(
        15.0, "From SIGTERM to SIGKILL when the job is told to stop. After a failure at most 5.",
        metavar="SECONDS")
    preload: bool = setting(
        False, "Import TensorFlow once per host and fork the ranks from there.",
        option="--preload")
    verbose: bool = setting(
        False, "Show the plan, and the output of every rank.", option="--verbose,-v")
    elastic: ElasticOptions = table(
        ElasticOptions, "What horovodrun takes.", group="Elastic, with horovodrun")

    def __post_init__(self) -> None:
        """Check each value.

        Raises:
            ConfigError: A value is unknown or out of range.
        """
        super().__post_init__()
        if not self.command:
            raise ConfigError("There is nothing to start. Expected: hvdtrain launch -np N fit JOB")
        for what, value, names in (("starter", self.starter, STARTERS),
                                   ("collective", self.collective, COLLECTIVES)):
            if value not in names:
                raise ConfigError(
                    f"Unknown {what} {value!r}. Expected one of: {', '.join(names)}.")
        check_finite(self)
        for name, limit in (("--timeout", self.timeout_s), ("--grace", self.grace_s),
                            ("--start-timeout", self.start_timeout_s)):
            if limit is not None and limit < 0:
                raise ConfigError(f"{name} is {limit:g} s. Expected 0 or more.")
        for item in self.env:
            name = item.partition("=")[0]
            if not name or "\0" in item:
                raise ConfigError(f"--env is {item!r}. Expected VAR or VAR=VALUE.")

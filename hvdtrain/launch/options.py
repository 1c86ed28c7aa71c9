"""`LaunchOptions`: what the user asks of `hvdtrain launch`, with the defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from hvdtrain.config import CollectiveName
from hvdtrain.errors import ConfigError
from hvdtrain.launch.remote_shell import RemoteOptions
from hvdtrain.settings import check_finite
from hvdtrain.world.network import check_wanted

STARTERS = ("auto", "native", "srun", "horovodrun", "mpirun")
COLLECTIVES: tuple[str, ...] = get_args(CollectiveName)


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """What `horovodrun` takes for a job whose hosts come and go; None: not given."""

    min_np: int | None = None
    max_np: int | None = None
    host_discovery_script: Path | None = None
    slots_per_host: int | None = None
    elastic_timeout_s: int | None = None
    reset_limit: int | None = None

    def flags(self) -> tuple[str, ...]:
        """The options as horovodrun spells them."""
        given = (("--min-np", self.min_np), ("--max-np", self.max_np),
                 ("--host-discovery-script", self.host_discovery_script),
                 ("--slots-per-host", self.slots_per_host),
                 ("--elastic-timeout", self.elastic_timeout_s), ("--reset-limit", self.reset_limit))
        return tuple(word for name, value in given if value is not None
                     for word in (name, str(value)))


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Validated when made; unknown names are refused with the valid ones."""

    command: tuple[str, ...]
    """The program of each rank with its arguments."""
    np: int | None = None
    """Number of ranks. Default: the slots of the hosts that are named."""
    hosts: str | None = None
    """`-H`: `HOST:SLOTS,...`. Default: the Slurm allocation, the MPIJob's hosts, or this host."""
    hostfile: Path | None = None
    """In place of `hosts`."""
    starter: str = "auto"
    env: tuple[str, ...] = ()
    """`VAR` or `VAR=VALUE` for the ranks."""
    output: Path | None = None
    """Directory for one log file per rank. Default: none are written."""
    timeout_s: float | None = None
    """Limit for the whole job. Default: none."""
    grace_s: float = 15.0
    """From SIGTERM to SIGKILL for ranks that were told to stop; at most 5 after a failure."""
    verbose: bool = False
    """Show the standard output of every rank, not only of the chief."""
    collective: str = "auto"
    preload: bool = False
    """Fork the ranks of each host from one process that has imported TensorFlow."""
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    """How other hosts are reached."""
    network_interface: tuple[str, ...] = ()
    """Names or networks (CIDR) in order of preference; looked up on each host."""
    start_timeout_s: float | None = None
    """How long to try again when hosts cannot be reached. Default: not, in an MPIJob 300 s."""
    elastic: ElasticOptions = field(default_factory=ElasticOptions)

    def __post_init__(self) -> None:
        """Check each value.

        Raises:
            ConfigError: A value is unknown or out of range.
        """
        if not self.command:
            raise ConfigError("There is nothing to start. Expected: hvdtrain launch -np N fit JOB")
        for what, value, names in (("starter", self.starter, STARTERS),
                                   ("collective", self.collective, COLLECTIVES)):
            if value not in names:
                raise ConfigError(
                    f"Unknown {what} {value!r}. Expected one of: {', '.join(names)}.")
        check_finite(self)
        if self.hosts is not None and self.hostfile is not None:
            raise ConfigError("Both -H and --hostfile are given. Expected one of them.")
        for name, limit in (("--timeout", self.timeout_s), ("--grace", self.grace_s),
                            ("--start-timeout", self.start_timeout_s)):
            if limit is not None and limit < 0:
                raise ConfigError(f"{name} is {limit:g} s. Expected 0 or more.")
        for item in self.env:
            name = item.partition("=")[0]
            if not name or "\0" in item:
                raise ConfigError(f"--env is {item!r}. Expected VAR or VAR=VALUE.")
        check_wanted(self.network_interface)

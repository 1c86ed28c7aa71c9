"""`DoctorOptions`: what the user asks of `hvdtrain doctor`, with the defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.errors import ConfigError
from hvdtrain.hosts import Host, parse_hosts, read_hostfile
from hvdtrain.launch.remote_shell import RemoteOptions
from hvdtrain.world.network import check_wanted


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Validated when made."""

    hosts: str | None = None
    """`-H`: `HOST:SLOTS,...`. Default: this host alone."""
    hostfile: Path | None = None
    """In place of `hosts`."""
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    """How other hosts are reached."""
    network_interface: tuple[str, ...] = ()
    """Names or networks (CIDR) in order of preference; looked up on each host."""
    output: Path | None = None
    """The job's output folder, if it is to be checked as well."""
    allreduce: bool = True
    """Run two ranks that reduce known values."""

    def __post_init__(self) -> None:
        """Check each value.

        Raises:
            ConfigError: A value is out of range, or two contradict each other.
        """
        if self.hosts is not None and self.hostfile is not None:
            raise ConfigError("Both -H and --hostfile are given. Expected one of them.")
        check_wanted(self.network_interface)

    def read_hosts(self) -> tuple[Host, ...]:
        """The hosts that were named; empty where none were.

        Raises:
            ConfigError: They cannot be read.
        """
        if self.hostfile is not None:
            return read_hostfile(self.hostfile)
        return parse_hosts(self.hosts) if self.hosts is not None else ()

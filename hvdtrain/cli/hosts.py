"""The options by which several commands name hosts and the way to them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Hostfile = Annotated[Path | None, typer.Option(
    help="Hosts from a file in the way of Open MPI or MPICH.")]
SshPort = Annotated[int | None, typer.Option(
    help="Port of ssh on the other hosts.", show_default="ssh's own")]
SshIdentityFile = Annotated[Path | None, typer.Option(
    help="Private key for ssh.", show_default="ssh's own")]
NetworkInterface = Annotated[list[str] | None, typer.Option(
    metavar="NAME|CIDR,...", help="Network of the ranks, by name of the interface or by "
    "address, looked up on each host.", show_default="the way to the other hosts")]


def split_networks(given: list[str] | None) -> tuple[str, ...]:
    """The names and networks of `--network-interface`, which may be repeated."""
    return tuple(item.strip() for value in given or () for item in value.split(","))

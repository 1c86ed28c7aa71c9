"""Which network interface the ranks of each host use, and where they find the rendezvous."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from hvdtrain.errors import LaunchError, MachineError
from hvdtrain.launch.link import HostFacts
from hvdtrain.world.network import find_interface, is_own_address, route_to

_RETRY_S = 1.0


def choose_interface(host: str, facts: HostFacts, wanted: Sequence[str]) -> str:
    """The interface of a host for the traffic between the ranks.

    Args:
        host: String, the host, for errors.
        facts: What its agent says.
        wanted: Names or networks in order of preference; empty: the way to the other hosts.

    Raises:
        LaunchError: The host has none of `wanted`, or no way to the others is known.
    """
    has = ", ".join(f"{name} ({address})" for name, address in facts.interfaces.items())
    found = find_interface(wanted, facts.interfaces)
    if found is not None:
        return found
    if wanted:
        raise LaunchError(
            f"{host} has no network interface {' or '.join(wanted)}. It has: {has or 'none'}. "
            "Expected one of these, or a network such as 10.0.0.0/8, in --network-interface.")
    for address in (facts.own_address, facts.ssh_server):
        name = next((n for n, a in facts.interfaces.items() if a == address), None)
        if name is not None and name != "lo":
            return name
    raise LaunchError(
        f"No network interface of {host} leads to the other hosts by their names. It has: "
        f"{has or 'none'}. Name one: --network-interface NAME or NETWORK/BITS.")


def rendezvous_address(host: str, facts: HostFacts) -> str:
    """The address of this launcher as seen from another host.

    Raises:
        LaunchError: The name of the host cannot be resolved here.
    """
    if facts.ssh_client is not None and ":" not in facts.ssh_client:
        return facts.ssh_client
    try:
        return route_to(host).own_address
    except OSError as error:
        raise LaunchError(
            f"The address of {host} is not known here: {error}. Expected a name that this host "
            "can resolve, because its ranks must reach the launcher.") from error


def launcher_address(host: str, facts: HostFacts) -> str:
    """An address of this launcher at which a host reaches it, and at which it can listen.

    ssh's idea of it is that of a host between, where there is one (ProxyJump) or a translation
    of addresses; then it is the address on the way to that host.

    Raises:
        LaunchError: The name of the host cannot be resolved here.
    """
    address = rendezvous_address(host, facts)
    if is_own_address(address):
        return address
    return rendezvous_address(host, replace(facts, ssh_client=None))


def await_names(hosts: Iterable[str], limit_s: float,
                interrupted: Callable[[Sequence[str]], bool]) -> None:
    """Wait until this host can resolve the names of all others, for starters that do not.

    Args:
        hosts: Names.
        limit_s: Float, how long to wait.
        interrupted: Tells whether to give up; gets the names that are not known yet.

    Raises:
        MachineError: Names that are unknown when the time is over.
    """
    deadline = time.monotonic() + limit_s
    missing = [host for host in hosts if not _is_known(host)]
    while missing and not interrupted(missing):
        if time.monotonic() > deadline:
            raise MachineError(
                f"After {limit_s:g} s these hosts are not known here: {', '.join(missing)}. "
                "Expected names that this host can resolve. Have all pods of the job started?")
        time.sleep(_RETRY_S)
        missing = [host for host in missing if not _is_known(host)]


def _is_known(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True

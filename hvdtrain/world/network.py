"""Network interfaces of this host, and which of them leads to another host. IPv4."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.errors import ConfigError

NETWORK_VARIABLE = "HVDTRAIN_NETWORK_INTERFACE"  # `--network-interface` of ranks that bootstrap
_DISCARD_PORT = 9
_LONGEST_NAME = 15


@dataclass(frozen=True, kw_only=True)
class Route:
    """The way to another host, which has `address`."""

    own_address: str
    interface: str
    address: str


def route_to(host: str) -> Route:
    """The route to a host from the routing table; nothing is sent. OSError where there is none."""
    address = socket.getaddrinfo(host, _DISCARD_PORT, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _DISCARD_PORT))
        own_address: str = probe.getsockname()[0]
    return Route(own_address=own_address, interface=interface_of(own_address),
                 address=str(address))


def interface_of(address: str) -> str:
    """The name of the interface with an address of this host, or OSError."""
    names = ["lo"] if address.startswith("127.") else [
        name for name, own in interfaces().items() if own == address]
    if not names:
        raise OSError(f"no network interface has the address {address}")
    return names[0]


def is_own_address(address: str) -> bool:
    """Whether an IPv4 address belongs to this host."""
    return address.startswith("127.") or address in interfaces().values()


def interfaces() -> dict[str, str]:
    """The interfaces of this host with their first IPv4 address; those without are left out."""
    import psutil
    return {name: own[0] for name, addresses in psutil.net_if_addrs().items()
            if (own := [one.address for one in addresses if one.family == socket.AF_INET])}


def check_wanted(wanted: Sequence[str]) -> None:
    """ConfigError where `--network-interface` got neither a name nor a network in CIDR form."""
    for item in wanted:
        if "/" in item:
            try:
                ipaddress.IPv4Network(item, strict=False)
            except ValueError as error:
                raise ConfigError(f"--network-interface {item}: {error}. Expected a name such as "
                                  "eth0, or a network such as 10.0.0.0/8.") from error
        elif not item or len(item) > _LONGEST_NAME or any(char.isspace() for char in item):
            raise ConfigError(f"--network-interface is {item!r}. Expected a name such as eth0, "
                              "or a network such as 10.0.0.0/8; several with commas.")


def find_interface(wanted: Sequence[str], has: Mapping[str, str]) -> str | None:
    """The first of `wanted` (names, or CIDR networks) among interfaces with IPv4 addresses."""
    return next((name for item in wanted for name, address in has.items()
                 if name == item or ("/" in item and ipaddress.IPv4Address(
                     address) in ipaddress.IPv4Network(item, strict=False))), None)


def listed(has: Mapping[str, str]) -> str:
    """Interfaces with their addresses, for messages."""
    return ", ".join(f"{name} ({address})" for name, address in has.items()) or "none"


def no_interface(host: str, wanted: Sequence[str], has: Mapping[str, str], where: str) -> str:
    """The message where a host has none of `wanted`, which was given in `where`."""
    return (f"{host} has no network interface {' or '.join(wanted)}. It has: {listed(has)}. "
            f"Expected one of these, or a network such as 10.0.0.0/8, in {where}.")

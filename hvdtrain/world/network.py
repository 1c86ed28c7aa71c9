"""Network interfaces of this host, and which of them leads to another host. Linux, IPv4."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hvdtrain.errors import ConfigError

NETWORK_VARIABLE = "HVDTRAIN_NETWORK_INTERFACE"
"""Names or networks, with commas: how `--network-interface` reaches ranks that bootstrap."""

_SIOCGIFADDR = 0x8915
_DISCARD_PORT = 9
_LONGEST_NAME = 15


@dataclass(frozen=True, kw_only=True)
class Route:
    """The way to a host."""

    own_address: str
    interface: str
    address: str
    """Of the other host."""


def route_to(host: str) -> Route:
    """The way to a host, as the routing table has it; nothing is sent.

    Raises:
        OSError: The name cannot be resolved, or there is no way.
    """
    address = socket.getaddrinfo(host, _DISCARD_PORT, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _DISCARD_PORT))
        own_address: str = probe.getsockname()[0]
    return Route(own_address=own_address, interface=interface_of(own_address),
                 address=str(address))


def interface_of(address: str) -> str:
    """The name of the interface with an address of this host.

    Raises:
        OSError: No interface has it.
    """
    if address.startswith("127."):
        return "lo"
    for name, own in interfaces().items():
        if own == address:
            return name
    raise OSError(f"no network interface has the address {address}")


def is_own_address(address: str) -> bool:
    """Whether an IPv4 address belongs to this host."""
    return address.startswith("127.") or address in interfaces().values()


def interfaces() -> dict[str, str]:
    """The interfaces of this host with their IPv4 addresses; those without one are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_LONGEST_NAME])
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def check_wanted(wanted: Sequence[str]) -> None:
    """Check names and networks as given to `--network-interface`.

    Raises:
        ConfigError: One is neither a name nor a network in CIDR form.
    """
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
    """The first of `wanted` that is among the interfaces of a host.

    Args:
        wanted: Names, or networks in CIDR form, which fit by the address of the interface.
        has: The interfaces of the host with their IPv4 addresses.
    """
    for item in wanted:
        if "/" not in item:
            if item in has:
                return item
            continue
        network = ipaddress.IPv4Network(item, strict=False)
        for name, address in has.items():
            if ipaddress.IPv4Address(address) in network:
                return name
    return None

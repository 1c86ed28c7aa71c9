"""Which address and interface of this host lead to another one. Linux, IPv4."""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass

_SIOCGIFADDR = 0x8915
_DISCARD_PORT = 9


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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise OSError(f"no network interface has the address {address}")

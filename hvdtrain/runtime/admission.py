"""Keeps strangers from a server of another library that listens on all interfaces. Linux, IPv4.

TensorFlow's gRPC servers cannot be told where to listen nor whom to trust. The kernel can: a filter
on the listening socket (SO_ATTACH_FILTER of socket(7), which needs no privilege) drops every packet
whose source is none of the given addresses, before a connection comes about.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from hvdtrain.log import get_logger

_SO_ATTACH_FILTER = 26
_LISTEN = "0A"
_NETWORK_HEADER = 0xFFF00000
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_VERSION, _IPV4, _SOURCE = 0, 0x40, 12
_WHOLE = 0xFFFFFFFF
_BLOCK = 200
"""A jump leads at most 255 instructions on."""


def admit_only(port: int, addresses: Collection[str]) -> bool:
    """Let the sockets of this process that listen at a port hear some addresses only.

    Args:
        port: Integer; TensorFlow may listen at it with several sockets.
        addresses: IPv4 addresses of the job's hosts; the loopback address is added.

    Returns:
        Whether it is so; where the kernel cannot, a warning says so.
    """
    program = _program(sorted({"127.0.0.1", *addresses}))
    buffer = ctypes.create_string_buffer(program)
    packed = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    found = _listening(port)
    try:
        for descriptor in found:
            with socket.socket(fileno=os.dup(descriptor)) as listener:
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, packed)
    except OSError as error:
        get_logger().warning("Connections of strangers to port %d cannot be refused: %s. Let a "
                             "firewall keep them out.", port, error)
        return False
    return bool(found)


def _program(addresses: Collection[str]) -> bytes:
    """Classic BPF: the whole packet where its source is one of the addresses, else nothing."""
    refuse, accept = (_RETURN, 0, 0, 0), (_RETURN, 0, 0, _WHOLE)
    code = [(_LOAD_BYTE, 0, 0, _NETWORK_HEADER + _VERSION), (_AND, 0, 0, 0xF0),
            (_JUMP_IF_EQUAL, 1, 0, _IPV4), refuse,
            (_LOAD_WORD, 0, 0, _NETWORK_HEADER + _SOURCE)]
    numbers = [int.from_bytes(socket.inet_aton(address), "big") for address in addresses]
    for start in range(0, len(numbers), _BLOCK):
        block = numbers[start:start + _BLOCK]
        # To the end of the block; its last comparison leaps over `accept` where it fails.
        code += [(_JUMP_IF_EQUAL, len(block) - 1 - place, int(place == len(block) - 1), number)
                 for place, number in enumerate(block)]
        code.append(accept)
    return b"".join(struct.pack("HBBI", *one) for one in [*code, refuse])


def _listening(port: int) -> list[int]:
    """The descriptors of this process that listen at a port."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{words[9]}]")
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") in inodes:
                found.append(int(name))
    return found

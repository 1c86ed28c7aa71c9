"""Restricts who can connect to another library's server on all interfaces. Linux, IPv4.

TensorFlow's gRPC servers have no option for where to listen or whom to trust. A kernel filter on
the listening socket (SO_ATTACH_FILTER of socket(7), which needs no privilege) drops every packet
whose source is none of the given addresses, before a connection is made.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Collection

import psutil

from hvdtrain.log import get_logger

_SO_ATTACH_FILTER = 26
_NETWORK_HEADER = 0xFFF00000
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_VERSION, _IPV4, _SOURCE = 0, 0x40, 12
_WHOLE = 0xFFFFFFFF
_BLOCK = 200  # a jump reaches at most 255 instructions


def admit_only(port: int, addresses: Collection[str]) -> bool:
    """Let this process' sockets listening at a port receive from some IPv4 addresses only."""
    # The loopback address is added. TensorFlow may have several sockets at a port. Where the kernel
    # cannot: False, and a warning.
    program = _program(sorted({"127.0.0.1", *addresses}))
    buffer = ctypes.create_string_buffer(program)
    packed = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    found = [one.fd for one in psutil.Process().net_connections("tcp")
             if one.status == psutil.CONN_LISTEN and one.laddr.port == port]
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

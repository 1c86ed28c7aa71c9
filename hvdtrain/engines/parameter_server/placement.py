"""Which server holds what: how parameters are cut and placed. Pure values.

Cut as by `tf.distribute.experimental.partitioners`: along the first axis, the first pieces a row
longer if uneven. TensorFlow's round robin puts all kernels on one of two servers and all biases on
the other; `greedy` places the largest piece first, on the server with the fewest bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.engine_config import Placement

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some rows of a parameter (its number, from row `start`), or all of it, on one server."""

    parameter: int
    start: int
    shape: Shape
    server: int
    bytes: int

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


def cut(shape: Shape, item_bytes: int, partitioner: str) -> list[tuple[int, int]]:
    """Start and length of pieces along the first axis, (0, 0) of a scalar. See `PsConfig`."""
    if not shape:
        return [(0, 0)]
    kind, *numbers = partitioner.split(":")
    values = [int(number) for number in numbers]
    rows, row_bytes = shape[0], math.prod(shape[1:]) * item_bytes
    if kind in ("none", "fixed"):
        shards = values[0] if values else 1
    elif kind == "min_size":
        shards = rows * row_bytes // max(1, values[0])
    else:
        shards = math.ceil(rows / max(1, values[0] // max(1, row_bytes)))
    shards = max(1, min(rows, shards, *values[1:]))
    length, longer = divmod(rows, shards)
    return [(n * length + min(n, longer), length + (n < longer)) for n in range(shards)]


def place(parameters: Sequence[tuple[Shape, int]], *, servers: int, policy: Placement,
          partitioner: str = "none") -> tuple[Piece, ...]:
    """Cut parameters (shape, bytes per number) and place the pieces, in the order of rows."""
    pieces = []
    for number, (whole, item_bytes) in enumerate(parameters):
        for start, rows in cut(whole, item_bytes, partitioner):
            shape = (rows, *whole[1:]) if whole else ()
            pieces.append((number, start, shape, math.prod(shape) * item_bytes))
    chosen, load = [n % servers for n in range(len(pieces))], [0] * servers
    if policy == "greedy":
        for n in sorted(range(len(pieces)), key=lambda n: -pieces[n][-1]):
            chosen[n] = load.index(min(load))
            load[chosen[n]] += pieces[n][-1]
    return tuple(Piece(parameter=number, start=start, shape=shape, server=server, bytes=size)
                 for (number, start, shape, size), server in zip(pieces, chosen, strict=True))


def render(pieces: Sequence[Piece], servers: int) -> list[str]:
    """A line per server: bytes, share, number of pieces and parameters."""
    total, parameters = sum(p.bytes for p in pieces), len({p.parameter for p in pieces})
    lines = []
    for server in range(servers):
        own = [piece for piece in pieces if piece.server == server]
        size = sum(piece.bytes for piece in own)
        lines.append(f"server {server}: {size:,} bytes ({size / max(1, total):.0%}), "
                     f"{len(own)} piece{'s' if len(own) != 1 else ''} of "
                     f"{len({piece.parameter for piece in own})} of {parameters} parameters")
    return lines

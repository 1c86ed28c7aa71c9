"""Which server holds what: how parameters are cut and placed. Pure values.

Cutting follows the partitioners of `tf.distribute.experimental.partitioners`: along the first
axis, the first pieces one row longer where it does not divide. TensorFlow's own round robin puts
every kernel on one of two servers and every bias on the other; `greedy` places the largest piece
first, each on the server with the fewest bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdtrain.engine_config import Placement

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A trainable variable, as far as its place is concerned."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int = 4

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.item_bytes


def parameters_of(variables: Iterable[tuple[str, tuple[int, ...], str]]) -> tuple[Parameter, ...]:
    """The parameters of variables, given by path, shape and dtype."""
    return tuple(Parameter(name=path, shape=shape, item_bytes=_BYTES.get(dtype, 4))
                 for path, shape, dtype in variables)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some rows of a parameter, or all of it, on one server."""

    parameter: int
    """Number of the parameter."""
    start: int
    """The first row."""
    shape: tuple[int, ...]
    server: int
    bytes: int

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


def cut(parameter: Parameter, partitioner: str) -> list[tuple[int, int]]:
    """Start and length of each piece of a parameter along its first axis.

    Args:
        parameter: The parameter; a scalar has one piece of length 0.
        partitioner: `none`, `fixed:SHARDS`, `min_size:BYTES[:MAX]` or `max_size:BYTES[:MAX]`.
    """
    if not parameter.shape:
        return [(0, 0)]
    rows = parameter.shape[0]
    shards = max(1, min(rows, _shards(parameter, partitioner)))
    length, longer = divmod(rows, shards)
    pieces, start = [], 0
    for number in range(shards):
        count = length + (number < longer)
        pieces.append((start, count))
        start += count
    return pieces


def _shards(parameter: Parameter, partitioner: str) -> int:
    kind, *numbers = partitioner.split(":")
    values = [int(number) for number in numbers]
    if kind == "none":
        return 1
    if kind == "fixed":
        return values[0]
    limit = values[1] if len(values) > 1 else parameter.shape[0]
    if kind == "min_size":
        return min(limit, parameter.bytes // max(1, values[0]))
    row_bytes = parameter.bytes // max(1, parameter.shape[0])
    rows_per_shard = max(1, values[0] // max(1, row_bytes))
    return min(limit, math.ceil(parameter.shape[0] / rows_per_shard))


def place(parameters: Sequence[Parameter], *, servers: int, policy: Placement,
          partitioner: str = "none") -> tuple[Piece, ...]:
    """Cut parameters and give each piece a server.

    Args:
        parameters: The trainable variables in the order of the model.
        servers: Integer, at least 1.
        policy: `greedy` by bytes, or `round_robin`.
        partitioner: As for `cut`.

    Returns:
        The pieces, in the order of the parameters and their rows.
    """
    pieces = []
    for number, parameter in enumerate(parameters):
        for start, rows in cut(parameter, partitioner):
            shape = (rows, *parameter.shape[1:]) if parameter.shape else ()
            pieces.append((number, start, shape, math.prod(shape) * parameter.item_bytes))
    chosen = _choose([size for *_, size in pieces], servers, policy)
    return tuple(Piece(parameter=number, start=start, shape=shape, server=server, bytes=size)
                 for (number, start, shape, size), server in zip(pieces, chosen, strict=True))


def _choose(sizes: Sequence[int], servers: int, policy: Placement) -> list[int]:
    if policy == "round_robin":
        return [number % servers for number in range(len(sizes))]
    load, chosen = [0] * servers, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        chosen[number] = load.index(min(load))
        load[chosen[number]] += sizes[number]
    return chosen


def render(parameters: Sequence[Parameter], pieces: Sequence[Piece], servers: int) -> list[str]:
    """One line per server: bytes, share and how many pieces of how many parameters."""
    total = sum(piece.bytes for piece in pieces)
    lines = []
    for server in range(servers):
        own = [piece for piece in pieces if piece.server == server]
        size = sum(piece.bytes for piece in own)
        whole = len({piece.parameter for piece in own})
        lines.append(f"server {server}: {size:,} bytes ({size / max(1, total):.0%}), "
                     f"{len(own)} piece{'s' if len(own) != 1 else ''} of {whole} of "
                     f"{len(parameters)} parameters")
    return lines

"""Gradients in half the bytes; and which gradient takes which wire.

Which wire a gradient takes depends on its dtype and static shape only, so it is the same on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.optim.kept_back import KeptBack, VariableKey
from hvdtrain.optim.low_rank import LowRankWire
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.optim.topk import TopKWire
from hvdtrain.optim.wire import (
    HALF_BYTES,
    NATIVE,
    PlainWire,
    Wire,
    apart,
    joined,
    number_bytes,
    pack_bfloat16,
    size_of,
    unpack_bfloat16,
)

TOPK_SMALLEST = 512
"""Tensors of fewer elements travel whole: they are few bytes."""


class TwoShotWire(Wire):
    """bfloat16 on the wire, sums in float32: as many bytes as an allreduce in half precision.

    Each rank gets the same part of the tensors of all ranks, sums it in float32, and sends the
    sum to all. So each number is rounded twice, however many ranks there are.
    """

    def average(self, tensors: Sequence[Any], keys: Sequence[VariableKey], *,
                name: str) -> list[Any]:
        """See `Wire.average`."""
        del keys
        ranks, size = self._collective.size, sum(size_of(t) for t in tensors)
        part = -(-size // ranks)
        flat = tf.pad(joined(tensors), [[0, part * ranks - size]])
        received = self._collective.alltoall(pack_bfloat16(flat), name=f"{name}.parts")
        parts = unpack_bfloat16(tf.reshape(received, [ranks, part]))
        # Multiplied first: a sum of N could overflow where their mean does not.
        total = tf.reduce_sum(parts * self.factor, axis=0)
        sums = self._collective.allgather(pack_bfloat16(total), name=f"{name}.sums")
        return apart(unpack_bfloat16(sums)[:size], tensors)

    def itemsize(self, itemsize: int) -> int:
        """See `Wire.itemsize`."""
        del itemsize
        return HALF_BYTES


class Wires:
    """The wires of one reducer, and which gradient takes which.

    Args:
        collective: The collective to use.
        options: How to reduce.
        loss_scale: See `KeptBack`.
    """

    def __init__(self, collective: Collective, options: ReducerOptions,
                 loss_scale: Callable[[], Any] | None = None) -> None:
        self._collective = collective
        self._compression = options.compression
        self.kept_back = KeptBack(loss_scale)
        self._plain = PlainWire(collective, options)
        made: dict[str, Callable[[], Wire]] = {
            "none": lambda: self._plain,
            "fp16": lambda: PlainWire(collective, options, half=True),
            "bf16": lambda: TwoShotWire(collective, options),
            "topk": lambda: TopKWire(collective, options, self.kept_back),
            "lowrank": lambda: LowRankWire(collective, options, self.kept_back),
        }
        self._short = made[options.compression]()

    def of(self, dtype: Any, shape: Sequence[int | None]) -> Wire:
        """The wire of a dense gradient."""
        if dtype == tf.float16 and self._compression in ("fp16", "bf16"):
            return self._plain
        least = TOPK_SMALLEST if self._compression == "topk" else 1
        if prod(n or 0 for n in shape) < least:
            return self._plain
        return self._short

    def value_bytes(self, dtype: Any) -> int:
        """Bytes of one number of a gathered row."""
        return number_bytes(dtype) if self._compression == "none" else HALF_BYTES

    @property
    def factor(self) -> float:
        """What a sum over all ranks is multiplied by."""
        return self._plain.factor

    def gather_values(self, values: Any, *, name: str) -> Any:
        """The rows of all ranks, one below the other, with what the wire keeps of each number.

        `topk` and `lowrank` send all rows, as bfloat16: of a sparse gradient most is left out
        already.
        """
        dtype = values.dtype
        if self._compression == "none":
            wire = values if dtype in NATIVE else tf.cast(values, tf.float32)
            return tf.cast(self._collective.allgather(wire, name=name), dtype)
        half = tf.float16 if self._compression == "fp16" else tf.bfloat16
        packed = tf.bitcast(tf.cast(values, half), tf.uint16)
        received = self._collective.allgather(packed, name=name)
        return tf.cast(tf.bitcast(received, half), dtype)

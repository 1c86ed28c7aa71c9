"""`Collective`: the one interface behind which Horovod, mpi4py and a lone process look alike.

Two kinds of operation. Tensor operations (`reduce`, `allgather`) work eagerly and inside a
`tf.function`. Host operations (`broadcast_array`, `gather_objects`, `barrier`) take numpy arrays
or picklable objects, run at once and block. **All ranks must call each operation, in the same
order, with the same names, shapes and types**, unless it says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

ReduceOp = Literal["average", "sum", "min", "max"]
Array = np.ndarray[Any, Any]
Tensor = Any
"""A `tf.Tensor`. TensorFlow has no types of its own that mypy could read."""


class Collective(ABC):
    """Moves bytes between the ranks.

    Attributes:
        name: String, e.g. `"horovod-gloo"`, `"horovod-mpi"`, `"mpi4py"`, `"single"`.
        rank: Integer, this process.
        size: Integer, number of processes.
    """

    name: str
    rank: int
    size: int

    @abstractmethod
    def reduce(self, tensors: Sequence[Tensor], *, name: str, op: ReduceOp) -> list[Tensor]:
        """Reduce each tensor over all ranks, element by element.

        Args:
            tensors: Sequence of dense tensors of one dtype (float16, float32, float64, int32
                or int64), shapes equal on all ranks.
            name: String, unique among the operations in flight, equal on all ranks.
            op: `"average"` (floats only: sum divided by `size`), `"sum"`, `"min"` or `"max"`.

        Returns:
            A list of tensors of the same shapes and dtype, bitwise equal on all ranks.
        """

    @abstractmethod
    def allgather(self, tensor: Tensor, *, name: str) -> Tensor:
        """Concatenate the tensors of all ranks in rank order along the first axis.

        Args:
            tensor: Tensor of shape `(n, ...)`; only `n` may differ between ranks.
            name: String, as in `reduce`.
        """

    @abstractmethod
    def broadcast_array(self, array: Array, *, root: int = 0) -> Array:
        """Return rank `root`'s array on every rank (host memory, any dtype, equal shapes)."""

    @abstractmethod
    def gather_objects(self, value: object) -> list[Any]:
        """Return the picklable `value` of every rank, in rank order, on every rank."""

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.gather_objects(None)

    def close(self) -> None:  # noqa: B027 - most collectives have nothing to close
        """Release what the collective holds. Collective on all ranks; the object is dead after."""

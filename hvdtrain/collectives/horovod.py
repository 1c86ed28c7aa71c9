"""Horovod's TensorFlow operations over Gloo, MPI or NCCL.

Only its collectives are used, never its optimizer wrapper, callbacks or launcher. `HOROVOD_*` are
set by the starter or `rendezvous.bootstrap`.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping, Sequence
from typing import Any, Self

import numpy as np

from hvdtrain.collectives.base import (
    MPI_OF_STARTER,
    Array,
    Collective,
    ReduceOp,
    Tensor,
    refuse_without_mpi,
)
from hvdtrain.collectives.real_horovod import real_horovod
from hvdtrain.errors import CollectiveError
from hvdtrain.horovod_check import HorovodCheck
from hvdtrain.optional import require
from hvdtrain.process import allow_open_files
from hvdtrain.rendezvous.relay import relayed
from hvdtrain.world import World

_SIZE_BYTES = 8
_LARGE = 1 << 14
"""From this size a tensor is not copied only to tie it."""
_FILES, _FILES_OF_PEER = 512, 4
"""Gloo connects each rank with each other one in up to four groups; and what a training opens."""


class HorovodCollective(Collective):
    """All ranks must create it together: the constructor calls `hvd.init()`, with these sets."""
    # `HOROVOD_CONTROLLER` and `HOROVOD_CPU_OPERATIONS` decide what sends CPU tensors; GPU tensors
    # go through NCCL where Horovod was built with it.

    def __init__(self, process_sets: Sequence[Sequence[int]] = ()) -> None:
        self._tf = require("tensorflow", "training")
        self._hvd, self._ops, kinds = real_horovod()
        sets = {tuple(sorted(ranks)): kinds.ProcessSet(list(ranks)) for ranks in process_sets}
        self._hvd.init(process_sets=list(sets.values()))
        self.rank = int(self._hvd.rank())
        self.size = int(self._hvd.size())
        self._op = {op: getattr(self._hvd, op.capitalize())
                    for op in ("average", "sum", "min", "max", "adasum")}
        self._zeros: dict[str, Any] = {}
        # Gloo's own reduce-scatter takes twice as long as its allreduce.
        self._own_scatter = self.name == "horovod-mpi" or bool(self._hvd.nccl_built())
        self._process_set = self._ops.global_process_set
        self._process_sets: dict[tuple[int, ...], Any] = sets
        self._members = list(range(self.size))
        """Horovod's ranks, by rank of this collective; they differ in a subset."""
        # Made here: a function that makes variables in its first trace is traced twice.
        for dtype in ("float32", "float64", "int32", "int64"):
            self._zero(self._tf.dtypes.as_dtype(dtype))

    @classmethod
    def start(cls, world: World, environ: MutableMapping[str, str],
              process_sets: Sequence[Sequence[int]] = ()) -> Self:
        del world, environ
        return cls(process_sets)

    @property
    def _how(self) -> dict[str, Any]:
        return {"ignore_name_scope": True, "process_set": self._process_set}

    @property
    def module(self) -> Any:
        """The real `horovod.tensorflow`."""
        return self._hvd

    @property
    def operations(self) -> Any:
        """The real `horovod.tensorflow.mpi_ops`."""
        return self._ops

    def _fused(self, what: str, tensors: Sequence[Tensor], name: str,
               op: ReduceOp) -> list[Tensor]:
        how = {"name": name, "op": self._op[op], **self._how}
        if len(tensors) == 1:
            return [getattr(self._ops, f"_{what}")(tensors[0], **how)]
        return list(getattr(self._ops, f"_grouped_{what}")(tensors, **how))

    def reduce(self, tensors: Sequence[Tensor], *, name: str, op: ReduceOp) -> list[Tensor]:
        return self._fused("allreduce", self.tie(list(tensors)), name, op)

    def refusal(self, op: ReduceOp) -> str | None:
        if op != "adasum" or self.size == 1:
            return None
        if not self._hvd.mpi_enabled():
            return ("Horovod has Adasum over MPI only, and these ranks met over Gloo. Start them "
                    "with: hvdtrain launch --starter mpirun --collective horovod-mpi ...")
        if self.size & (self.size - 1):
            return f"Horovod's Adasum needs 2, 4, 8, ... ranks; these are {self.size}."
        if self._process_set is not self._ops.global_process_set:
            return "Horovod has Adasum for all ranks together only, not for a subset."
        return None

    def allgather(self, tensor: Tensor, *, name: str) -> Tensor:
        return self._hvd.allgather(self.tie([tensor])[0], name=name, **self._how)

    def reduce_scatter(self, tensors: Sequence[Tensor], *, name: str,
                       op: ReduceOp) -> list[Tensor]:
        # Where it is no use, ranks exchange parts, as many bytes, and each sums those it gets.
        if not self._own_scatter:
            return [self._exchange_and_sum(t, f"{name}.{i}", op) for i, t in enumerate(tensors)]
        parts = self._fused("reducescatter", self.tie(list(tensors), by_sum=False), name, op)
        for part, tensor in zip(parts, tensors, strict=True):
            part.set_shape(self.part_shape(tensor))
        return parts

    def _exchange_and_sum(self, tensor: Tensor, name: str, op: ReduceOp) -> Tensor:
        received = self._tf.reshape(self.alltoall(tensor, name=name),
                                    [self.size, *self.part_shape(tensor)])
        if tensor.dtype == self._tf.float16:
            received = self._tf.cast(received, self._tf.float32)
        total = self._tf.reduce_sum(received, 0)
        return self._tf.cast(total / self.size if op == "average" else total, tensor.dtype)

    def alltoall(self, tensor: Tensor, *, name: str) -> Tensor:
        part = self._tf.fill([self.size], self._tf.shape(tensor)[0] // self.size)
        received, _ = self._hvd.alltoall(
            tensor, splits=self.tie([part])[0], name=name, **self._how)
        received.set_shape(tensor.shape)
        return received

    def _subset(self, members: list[int]) -> HorovodCollective | None:
        chosen = tuple(self._members[r] for r in members)
        if list(chosen) == self._members:
            return self
        self.process_set_id(chosen)
        if self._members[self.rank] not in chosen:
            return None
        part = copy.copy(self)
        part._process_set = self._process_sets[chosen]
        part._members = list(chosen)
        part.size = len(chosen)
        part.rank = chosen.index(self._members[self.rank])
        return part

    def process_set_id(self, ranks: Sequence[int], *, add: bool = True) -> int | None:
        """Horovod's number of the set of these ranks; None where it has none. All ranks to add."""
        chosen = tuple(sorted(ranks))
        if list(chosen) == self._members:
            return int(self._process_set.process_set_id)
        if chosen not in self._process_sets and add:
            self._process_sets[chosen] = self._add_process_set(chosen)
        known = self._process_sets.get(chosen)
        return None if known is None else int(known.process_set_id)

    def remove_process_set(self, ranks: Sequence[int]) -> bool:
        """Remove a set of ranks; False if it cannot be. All ranks."""
        known = self._process_sets.pop(tuple(sorted(ranks)), None)
        return known is not None and bool(self._hvd.remove_process_set(known))

    def _add_process_set(self, members: Sequence[int]) -> Any:
        if self._process_set is not self._ops.global_process_set:
            raise CollectiveError("A subset of a subset cannot be made: all ranks must take part. "
                                  "Call subset() of the collective of all ranks.")
        try:
            return self._hvd.add_process_set(list(members))
        except ValueError as error:
            if "HOROVOD_DYNAMIC_PROCESS_SETS" not in str(error):
                raise
            raise CollectiveError(
                "Horovod was started without dynamic process sets, which a subset of ranks "
                "needs. Set HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment of all ranks before "
                "hvdtrain.init(), or call hvd.init(process_sets=\"dynamic\") first.") from None

    def _broadcast_bytes(self, part: Array, root: int) -> Array:
        sent: Array = self._hvd.broadcast(
            self._tf.constant(part), self._members[root], name="hvdtrain.broadcast",
            **self._how).numpy()
        return sent

    def _gather_bytes(self, mine: Array) -> tuple[Array, Sequence[int]]:
        # Each part begins with its size, so that one collective is enough.
        sent = np.concatenate([np.array([mine.size], np.int64).view(np.uint8), mine])
        with self._tf.device("CPU:0"):
            joined: Array = self._hvd.allgather(
                self._tf.constant(sent), name="hvdtrain.gather", **self._how).numpy()
        parts, position = [], 0
        for _ in range(self.size):
            begin = position + _SIZE_BYTES
            position = begin + int(joined[position:begin].view(np.int64)[0])
            parts.append(joined[begin:position])
        return np.concatenate(parts), [part.size for part in parts]

    def close(self) -> None:
        if self._process_set is self._ops.global_process_set:
            self._hvd.shutdown()

    def tie(self, tensors: list[Tensor], *, by_sum: bool = True) -> list[Tensor]:
        """Inside a graph, make one tensor of a group depend on a variable."""
        # Horovod registers its operations as stateless, so TensorFlow folds a collective whose
        # inputs are all constants: it runs once and later calls return the old value or hang. A
        # variable among the inputs prevents it (a control dependency does not). The smallest tensor
        # is taken: adding a zero to it costs nothing, unless it is large.
        if self._tf.executing_eagerly():
            return tensors
        unknown = 1 << 62
        sizes = [t.shape.num_elements() or unknown for t in tensors]
        smallest = sizes.index(min(sizes)) if by_sum else 0
        tensor = tensors[smallest]
        if by_sum and not _LARGE < sizes[smallest] < unknown:
            tensors[smallest] = tensor + self._zero(tensor.dtype)
            return tensors
        with self._tf.device("CPU:0"):  # not copied: the variable is in its shape
            shape = self._tf.constant(tensor.shape.as_list()) + self._zero(self._tf.int32)
        tensors[smallest] = self._tf.reshape(tensor, shape)
        tensors[smallest].set_shape(tensor.shape)
        return tensors

    def _zero(self, dtype: Any) -> Tensor:
        if dtype.name not in self._zeros:
            # Shapes are computed on the CPU, beside a GPU too.
            where = "CPU:0" if dtype.is_integer else None
            with self._tf.init_scope(), self._tf.device(where):
                self._zeros[dtype.name] = self._tf.Variable(
                    np.zeros([], dtype.as_numpy_dtype), trainable=False, name="hvdtrain_zero")
        return self._zeros[dtype.name].read_value()


class HorovodGloo(HorovodCollective):
    """Horovod whose CPU tensors go over Gloo."""

    name = "horovod-gloo"

    @classmethod
    def automatic(cls, world: World, horovod: HorovodCheck) -> str | None:
        if world.size == 1 or world.rendezvous == "mpi":
            return None
        _need_horovod(horovod, f"{world.size} ranks started by {world.starter} reduce over Gloo")
        return f"started by {world.starter} with Gloo"

    @classmethod
    def check_start(cls, world: World, horovod: HorovodCheck) -> None:
        _need_horovod(horovod, f"`{cls.name}` was asked for")
        if world.rendezvous == "mpi":
            raise CollectiveError(
                f"`{cls.name}` was asked for, but {world.starter} prepares no Gloo rendezvous. "
                f"Start the ranks with: hvdtrain launch -np {world.size} fit ...")

    @classmethod
    def start(cls, world: World, environ: MutableMapping[str, str],
              process_sets: Sequence[Sequence[int]] = ()) -> Self:
        allow_open_files(_FILES + _FILES_OF_PEER * world.size)
        with relayed(world, environ):
            return cls(process_sets)


class HorovodMpi(HorovodCollective):
    """Horovod whose CPU tensors go over MPI."""

    name = "horovod-mpi"

    @classmethod
    def automatic(cls, world: World, horovod: HorovodCheck) -> str | None:
        kind = MPI_OF_STARTER.get(world.starter, "")
        if world.size > 1 and world.rendezvous == "mpi" and horovod.ok and (
                horovod.mpi_kind == kind):
            return f"started by {world.starter}, the MPI of Horovod"
        return None

    @classmethod
    def check_start(cls, world: World, horovod: HorovodCheck) -> None:
        _need_horovod(horovod, f"`{cls.name}` was asked for")
        if horovod.mpi_kind is None:
            raise CollectiveError(
                "`horovod-mpi` was asked for, but this Horovod was built without MPI. Use "
                "`horovod-gloo`, or rebuild it: hvdtrain build-horovod --mpi auto --install "
                "--force")
        refuse_without_mpi(cls.name, world, horovod.mpi_kind)


def _need_horovod(horovod: HorovodCheck, purpose: str) -> None:
    if not horovod.ok:
        problem = next(iter(horovod.problems), "Horovod is not installed; run: hvdtrain "
                       "build-horovod --install")
        raise CollectiveError(
            f"{purpose}, but Horovod cannot be used: {problem}\nWithout a C++ compiler use mpi4py: "
            "hvdtrain launch --starter mpirun --collective mpi4py ...")

"""`GradientReducer`: averages one list of gradients over all ranks, in buckets.

Names are our own, stable across ranks and unique among the operations in flight: they never
contain a layer's name (one layer more on one rank would hang the stock names).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.config import SENT_IN_PART
from hvdtrain.errors import OptimizerError
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_seam, sparse
from hvdtrain.optim.compression import Wires
from hvdtrain.optim.kept_back import KeptBack, VariableKey
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.optim.pattern import GradientKind, Report, refuse_differences
from hvdtrain.optim.sparse import SparseChoice, merge_rows
from hvdtrain.optim.wire import Wire, multiplied, number_bytes

__all__ = ["GradientReducer", "ReducerOptions", "merge_rows"]
Pattern = tuple[GradientKind, ...]
_INT32_END = 1 << 31
_SMALL_BYTES = 1 << 16


_calls = [0]


def calls() -> int:
    """How often this process has averaged, or traced that it will."""
    return _calls[0]


@dataclass(frozen=True, kw_only=True)
class _Dense:
    """A dense gradient on its way."""

    position: int
    gradient: Any
    key: VariableKey


class GradientReducer:
    """Averages gradients over the ranks of a collective.

    Args:
        collective: The collective to use.
        name: String, unique to the optimizer, equal on all ranks.
        options: How to reduce.
        loss_scale: Callable that gives the factor that the gradients carry, where they carry
            one; None otherwise.
        updates_rows: Boolean, the optimizer changes only the rows of a sparse gradient.
    """

    def __init__(self, collective: Collective, name: str, options: ReducerOptions,
                 loss_scale: Callable[[], Any] | None = None, *,
                 updates_rows: bool = True) -> None:
        self._updates_rows = updates_rows
        self.collective = collective
        self._name = name
        self._options = options
        self._wires = Wires(collective, options, loss_scale)
        self._calls: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
        self._agreed: dict[Pattern, dict[int, SparseChoice]] = {}

    @property
    def kept_back(self) -> KeptBack:
        """What compression has not sent yet."""
        return self._wires.kept_back

    @property
    def keeps_back(self) -> bool:
        """Whether it leaves something for later."""
        return self.collective.size > 1 and self._options.compression in SENT_IN_PART

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any],
                 indices: Sequence[int]) -> list[Any]:
        """Average `gradients` over all ranks. All ranks must call it with the same structure.

        Args:
            gradients: Sequence of tensors, `IndexedSlices` or None, in build order.
            variables: Sequence of their variables.
            indices: Sequence of integers, the build index of each variable.

        Returns:
            A list in the same order: dense tensors of the same shape and dtype, for sparse
            gradients dense tensors or `IndexedSlices`, None for None. Gradients of local
            variables are this rank's own.

        Raises:
            OptimizerError: The ranks have different gradients, or XLA compiles the step.
        """
        _calls[0] += 1
        self._refuse_xla()
        out = list(gradients)
        shared = self._shared(gradients, variables)
        for position in set(range(len(out))) - set(shared):
            out[position] = self._merged(out[position])
        if not shared:
            return out
        choices = self._agree([_kind_of(gradients[p], variables[p], indices[p]) for p in shared],
                              variables)
        name = self._call_name([indices[p] for p in shared])
        self.kept_back.begin()
        dense: list[_Dense] = []
        for position in shared:
            gradient, variable = gradients[position], variables[position]
            choice = choices.get(indices[position])
            if choice is not None and choice.way == "gather":
                out[position] = self._gather_rows(
                    gradient, variable.shape[0], choice, f"{name}.s{position}")
                continue
            if isinstance(gradient, tf.IndexedSlices):
                gradient = sparse.densify(gradient, variable.shape[0])
            gradient = tf.convert_to_tensor(gradient)
            gradient.set_shape(variable.shape)
            index = indices[position]
            key = VariableKey(keras_seam.variable_key(variable) or index, index)
            dense.append(_Dense(position=position, gradient=gradient, key=key))
        for number, (wire, bucket) in enumerate(self._buckets(dense)):
            means = wire.average([one.gradient for one in bucket], [one.key for one in bucket],
                                 name=f"{name}.b{number}")
            for one, mean in zip(bucket, means, strict=True):
                mean.set_shape(one.gradient.shape)
                out[one.position] = mean
        self.kept_back.settle([g for g in out if g is not None])
        return out

    def _shared(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[int]:
        """Positions of the gradients that are averaged over ranks."""
        if self.collective.size == 1:
            return []
        return [position for position, (gradient, variable) in enumerate(
                    zip(gradients, variables, strict=True))
                if gradient is not None and not self._options.is_local(
                    keras_seam.variable_path(variable), variable)]

    def _merged(self, gradient: Any) -> Any:
        merge = isinstance(gradient, tf.IndexedSlices) and self._options.merge == "sum"
        return merge_rows(gradient) if merge else gradient

    def _warn_of_unknown_names(self, variables: Sequence[Any]) -> None:
        unknown = self._options.unknown_names([keras_seam.variable_path(v) for v in variables])
        if unknown and self.collective.rank == 0:
            get_logger().warning(
                "local_variables names %s, but none of the %d variables of this optimizer has such "
                "a name in its path (the first one is `%s`).", ", ".join(map(repr, unknown)),
                len(variables), keras_seam.variable_path(variables[0]))

    def _agree(self, kinds: Sequence[GradientKind],
               variables: Sequence[Any]) -> dict[int, SparseChoice]:
        """How each sparse gradient travels, by index, as all ranks decided together.

        The ranks speak when this one has not met the pattern before, while the step is traced.
        A retrace on one rank alone, because of another batch size, has a pattern that is known;
        one that is not known could only hang.
        """
        pattern = tuple(kinds)
        if pattern not in self._agreed:
            self._warn_of_unknown_names(variables)
            report = Report(reducer=self._name, options=self._options.text, kinds=pattern)
            with tf.init_scope():
                reports = self.collective.gather_objects(report)
            refuse_differences(reports)
            self._agreed[pattern] = self._choose(reports)
        return self._agreed[pattern]

    def _choose(self, reports: Sequence[Report]) -> dict[int, SparseChoice]:
        chosen = {}
        for kinds in zip(*(report.kinds for report in reports), strict=True):
            kind = kinds[0]
            if kind.form == "dense":
                continue
            dtype = tf.as_dtype(kind.dtype)
            choice = sparse.choose(
                kinds, self._options, updates_rows=self._updates_rows,
                one_host=self.collective.one_host,
                value_bytes=self._wires.value_bytes(dtype),
                dense_bytes=self._wires.of(dtype, kind.shape).dense_bytes(
                    [n or 0 for n in kind.shape], number_bytes(dtype)))
            chosen[kind.index] = choice
            if self.collective.rank == 0:
                get_logger().info("Sparse gradient of `%s`, %s: %s (%s).", kind.name, kind,
                                  choice.way, choice.reason)
        return chosen

    def _buckets(self, dense: Sequence[_Dense]) -> list[tuple[Wire, list[_Dense]]]:
        """Group by wire, dtype and size, in the order in which the backward pass makes them.

        Small gradients have buckets of their own. TensorFlow computes those of biases when it has
        nothing longer to do, often last of all; large ones do not wait for them.
        """
        most = self._options.bucket_bytes
        done: list[tuple[Wire, list[_Dense]]] = []
        open_buckets: dict[Any, tuple[list[_Dense], int]] = {}
        for one in reversed(dense):
            wire = self._wires.of(one.gradient.dtype, one.gradient.shape.as_list())
            own = (one.gradient.shape.num_elements() or 0) * one.gradient.dtype.size
            key = (wire, one.gradient.dtype, own <= min(_SMALL_BYTES, most // 16))
            bucket, size = open_buckets.get(key, ([], 0))
            bucket.append(one)
            size += own
            if size >= most:
                done.append((wire, bucket))
                bucket, size = [], 0
            open_buckets[key] = (bucket, size)
        return done + [(key[0], bucket) for key, (bucket, _) in open_buckets.items() if bucket]

    def _gather_rows(self, gradient: Any, table_rows: int, choice: SparseChoice,
                     name: str) -> Any:
        """Send the rows used, average them where several ranks used the same."""
        mine = self._merged(gradient)
        values = self._wires.gather_values(mine.values, name=f"{name}.values")
        dtype = mine.indices.dtype
        sent = tf.cast(mine.indices, tf.int32 if table_rows < _INT32_END else dtype)
        rows = self.collective.allgather(sent, name=f"{name}.rows")
        gathered = tf.IndexedSlices(multiplied(values, self._wires.factor, values.dtype),
                                    tf.cast(rows, dtype), mine.dense_shape)
        if choice.form == "dense":
            return sparse.densify(gathered, table_rows)
        return self._merged(gathered)

    def _call_name(self, indices: Sequence[int]) -> str:
        """Equal on all ranks, and unique among calls that can be in flight together."""
        signature = zlib.crc32(repr(list(indices)).encode())
        call = 0
        if not tf.executing_eagerly():
            counts = self._calls.setdefault(keras_seam.outermost_graph(), {})
            call = counts.get(signature, 0)
            counts[signature] = call + 1
        return f"{self._name}.{signature:08x}.{call}"

    @staticmethod
    def _refuse_xla() -> None:
        if keras_seam.inside_xla():
            raise OptimizerError(
                "The whole train step is being compiled by XLA (jit_compile=True), but the "
                "collectives have no XLA kernel. Call model.compile(..., jit_compile=False); "
                "to keep XLA, compile only the function that computes the gradients.")


def _kind_of(gradient: Any, variable: Any, index: int) -> GradientKind:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return GradientKind(
        index=index, name=keras_seam.variable_path(variable),
        form="sparse" if is_sparse else "dense", dtype=gradient.dtype.name,
        shape=tuple(variable.shape), ids=sparse.static_ids(gradient) if is_sparse else None)

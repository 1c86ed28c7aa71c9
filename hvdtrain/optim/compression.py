"""How gradients are sent: each `Compression` is one way to average tensors over the ranks.

Results are bitwise equal on all ranks, even if rounded, and so is the choice for a gradient: it
depends on its dtype and static shape only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Array, Collective
from hvdtrain.optim.options import ReducerOptions

NATIVE = (tf.float16, tf.float32, tf.float64)
"""Dtypes that every collective can sum."""
BYTES_SHARE = 0.04
"""At most this share of the bytes of an allreduce; small tensors may take more."""
LEAST_RANK = 4
"""Small matrices are few bytes, and the last layer of a classifier suffers less."""
BLOCK = 64
"""Numbers with one common rounding unit."""
BYTES_PER_NUMBER = (BLOCK + 2) / BLOCK
"""A byte for each number, and the unit of a block as bfloat16."""
_LARGEST = 127
_TINY = 1e-30


class VariableKey(NamedTuple):
    """Identifies the variable of a gradient: in this process, and by its index in the optimizer."""

    identity: Any
    place: int


class ErrorFeedback:
    """What was not sent yet, in float32, and what is remembered between steps.

    What a rank does not send is added to its next gradient (Seide et al., 2014, "1-Bit Stochastic
    Gradient Descent"). A checkpoint holds the mean of these residuals over ranks, all that the sums
    lack, and without the factor of `loss_scale`, since it changes.

    Attributes:
        restored: Dict, what `collect` returned, by the index of the variables.
        noted: List of pairs (variable, its value after this step).
    """

    def __init__(self, collective: Collective,
                 loss_scale: Callable[[], Any] | None = None) -> None:
        self.collective = collective
        self._loss_scale = loss_scale
        self._made: dict[tuple[str, VariableKey], Any] = {}
        self.restored: dict[str, Array] = {}
        self.noted: list[tuple[Any, Any]] = []

    def factor(self) -> Any:
        """The current loss scale."""
        return 1.0 if self._loss_scale is None else tf.cast(self._loss_scale(), tf.float32)

    def variable(self, kind: Literal["residual", "basis"], key: VariableKey,
                 first: Callable[[], Array]) -> Any:
        """A variable, initially `first()`: the residual of a rank, or a basis equal on all."""
        if (kind, key) not in self._made:
            value = first()
            found = self.restored.pop(f"{kind}/{key.place}", value)
            value = found if found.shape == value.shape else value
            with tf.init_scope():
                self._made[kind, key] = tf.Variable(
                    value, trainable=False, name=f"hvdtrain_{kind}")
        return self._made[kind, key]

    def settle(self, gradients: Sequence[Any]) -> None:
        """Set what was noted, unless an average is not finite: all ranks then skip the update."""
        noted, self.noted = self.noted, []
        if noted:
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(
                g.values if isinstance(g, tf.IndexedSlices) else g)) for g in gradients])
            for variable, value in noted:
                variable.assign(tf.where(finite, value, variable))

    def collect(self) -> dict[str, Array]:
        """The state for a checkpoint, by name; sets all residuals to their mean. All ranks."""
        # A run resumed from the checkpoint, on any number of ranks, then has the same residuals as
        # the run that goes on.
        residuals = [v for (kind, _), v in self._made.items() if kind == "residual"]
        if residuals:
            means = self.collective.reduce([v.value() for v in residuals],
                                           name="hvdtrain.kept_back", op="average")
            for variable, mean in zip(residuals, means, strict=True):
                variable.assign(mean)
        return {f"{kind}/{key.place}": v.numpy() for (kind, key), v in self._made.items()}


class Compression:
    """No compression: one allreduce of a group of tensors."""

    sent_as: Any = None
    """The dtype that is sent; None: that of the gradients."""
    feedback: ErrorFeedback | None = None

    def __init__(self, collective: Collective, options: ReducerOptions,
                 loss_scale: Callable[[], Any] | None = None) -> None:
        self.collective = collective
        self.options = options

    @property
    def factor(self) -> float:
        """The factor on a sum over all ranks."""
        return 1.0 if self.options.op == "sum" else 1.0 / self.collective.size

    def suits(self, dtype: Any, shape: Sequence[int | None]) -> bool:
        """Whether it can be used for a dense gradient; others are sent uncompressed."""
        return self.sent_as is None or (dtype != tf.float16 and all(shape))

    def average(self, tensors: Sequence[Any], keys: Sequence[VariableKey], *,
                name: str) -> list[Any]:
        """Average (or sum, by `op`) dense tensors of static shapes and one dtype. All ranks."""
        dtype, op, before = tensors[0].dtype, self.options.op, self.options.predivide
        wire, size = self._wire(dtype), float(self.collective.size)
        if op == "average" and before == 1 and wire == tf.float16:
            before = size  # the sum of N could overflow
        if op != "average" or before == 1:
            out = self.collective.reduce([tf.cast(t, wire) for t in tensors], name=name, op=op)
            return [tf.cast(t, dtype) for t in out]
        sent = [multiplied(t, 1 / before, wire) for t in tensors]
        sums = self.collective.reduce(sent, name=name, op="sum")
        return [multiplied(t, before / size, dtype) for t in sums]

    def _wire(self, dtype: Any) -> Any:
        return self.sent_as or (dtype if dtype in NATIVE else tf.float32)

    def dense_bytes(self, shape: Sequence[int], dtype: Any) -> float:
        """Bytes that a rank sends for a dense tensor."""
        ranks = self.collective.size
        return 2 * (ranks - 1) / ranks * prod(shape) * self.number_bytes(dtype)

    def number_bytes(self, dtype: Any) -> int:
        """Bytes that are sent for one number."""
        return int(self._wire(dtype).size)

    def gather_values(self, values: Any, *, name: str) -> Any:
        """The rows of all ranks, concatenated in rank order, rounded as they are sent."""
        sent = tf.cast(values, self._wire(values.dtype))
        if self.sent_as is None:
            return tf.cast(self.collective.allgather(sent, name=name), values.dtype)
        received = self.collective.allgather(tf.bitcast(sent, tf.uint16), name=name)
        return tf.cast(tf.bitcast(received, self.sent_as), values.dtype)


class Float16(Compression):
    """Sums in float16."""

    sent_as = tf.float16


class Bfloat16(Compression):
    """bfloat16 is sent, sums are in float32: two roundings for any number of ranks."""
    # As many bytes as an allreduce in half precision: each rank sums one part in float32 and sends
    # it.

    sent_as = tf.bfloat16

    def average(self, tensors: Sequence[Any], keys: Sequence[VariableKey], *,
                name: str) -> list[Any]:
        """See `Compression.average`."""
        sums, _ = summed_by_parts(self.collective, joined(tensors), self.factor, pack_bfloat16,
                                  unpack_bfloat16, name=name)
        pieces = tf.split(sums, [t.shape.num_elements() for t in tensors])
        return [tf.cast(tf.reshape(piece, t.shape), t.dtype)
                for piece, t in zip(pieces, tensors, strict=True)]


def summed_by_parts(collective: Collective, rows: Any, factor: float, pack: Callable[[Any], Any],
                    unpack: Callable[[Any], Any], *, name: str) -> tuple[Any, Any]:
    """The sum over all ranks times `factor`, sent packed; each rank sums one part in float32.

    Also returns this rank's rounding errors, divided by `factor` for its part of the sum: what is
    lost there is lost once, and counts for all ranks.
    """
    count, ranks = rows.shape[0], collective.size
    part = -(-count // ranks)
    others = [[0, 0]] * (rows.shape.rank - 1)
    rows = tf.pad(rows, [[0, part * ranks - count], *others])
    sent = pack(rows)
    received = unpack(collective.alltoall(sent, name=f"{name}.parts"))
    # Multiplied first: a sum of N could overflow where their mean does not.
    own = tf.reduce_sum(tf.reshape(received, [ranks, part, *rows.shape[1:]]) * factor, axis=0)
    rounded = pack(own)
    sums = unpack(collective.allgather(rounded, name=f"{name}.sums"))
    before = collective.rank * part
    lost = tf.pad((own - unpack(rounded)) / factor,
                  [[before, (ranks - 1) * part - before], *others])
    return sums[:count], (rows - unpack(sent) + lost)[:count]


def multiplied(tensor: Any, factor: float, dtype: Any) -> Any:
    """`tensor * factor` as `dtype`, multiplied in float32 or wider."""
    if factor == 1:
        return tf.cast(tensor, dtype)
    wide = tensor.dtype if tensor.dtype in (tf.float32, tf.float64) else tf.float32
    return tf.cast(tf.cast(tensor, wide) * tf.constant(factor, wide), dtype)


def pack_bfloat16(tensor: Any) -> Any:
    """Round to bfloat16, as bits that every collective can carry."""
    return tf.bitcast(tf.cast(tensor, tf.bfloat16), tf.uint16)


def unpack_bfloat16(bits: Any) -> Any:
    """The inverse of `pack_bfloat16`, as float32."""
    return tf.cast(tf.bitcast(bits, tf.bfloat16), tf.float32)


def joined(tensors: Sequence[Any]) -> Any:
    """Flatten and concatenate, as float32."""
    return tf.concat([tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors], axis=0)


class Form(NamedTuple):
    """A tensor as a matrix, and the rank of its factors; 0 where not smaller: sent whole."""

    rows: int
    columns: int
    rank: int

    def first_basis(self) -> Array:
        """The second factor before the first step: any that all ranks share."""
        return np.random.default_rng(list(self)).normal(
            size=(self.columns, self.rank)).astype(np.float32)


class PowerSgd(Compression):
    """Each gradient as a product of two thin matrices; the rest is added to the next gradient.

    Vogels, Karimireddy, Jaggi, 2019, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", algorithms 1 and 2. With M the mean over ranks of what each has to
    send, and Q the second factor of the step before:

        P = orthonormal columns of M Q        Q = M^T P        sent: P Q^T

    M itself is on no rank: M Q and M^T P are means of local products. So the number of bytes does
    not grow with the number of ranks, as it does where each rank chooses its own elements. Unlike
    in the paper, the factors are sent with eight bits, so their rank is four times as high for the
    same bytes; rounding errors are part of the residual.
    """
    # Rows of sparse gradients are all sent, as bfloat16: most of the table is left out already.

    sent_as = tf.bfloat16

    def __init__(self, collective: Collective, options: ReducerOptions,
                 loss_scale: Callable[[], Any] | None = None) -> None:
        super().__init__(collective, options)
        self.feedback = self._kept = ErrorFeedback(collective, loss_scale)

    def suits(self, dtype: Any, shape: Sequence[int | None]) -> bool:
        """See `Compression.suits`."""
        return all(shape)

    def form(self, shape: Sequence[int]) -> Form:
        """Reshape a tensor to the matrix closest to a square, its axes kept in order."""
        cut = min(range(len(shape) + 1), key=lambda k: prod(shape[:k]) + prod(shape[k:]))
        rows, columns = prod(shape[:cut]), prod(shape[cut:])
        affordable = int(BYTES_SHARE * tf.float32.size * rows * columns / (
            (rows + columns) * BYTES_PER_NUMBER))
        rank = min(max(LEAST_RANK, affordable), self.options.approximation_rank)
        return Form(rows, columns, rank if rank * (rows + columns) < rows * columns else 0)

    def average(self, tensors: Sequence[Any], keys: Sequence[VariableKey], *,
                name: str) -> list[Any]:
        """A gradient that is not finite is so on all ranks. See `Compression.average`."""
        scale = self._kept.factor()
        forms = [self.form(t.shape.as_list()) for t in tensors]
        residuals = [self._kept.variable("residual", key, partial(
            np.zeros, t.shape.num_elements(), np.float32))
            for t, key in zip(tensors, keys, strict=True)]
        own = [tf.reshape(joined([t]) + residual * scale, [form.rows, form.columns])
               for t, residual, form in zip(tensors, residuals, forms, strict=True)]
        bases = {i: self._kept.variable("basis", keys[i], form.first_basis)
                 for i, form in enumerate(forms) if form.rank}
        left = dict(zip(bases, self._means(
            [own[i] @ _unit_columns(q) for i, q in bases.items()], f"{name}.left")[0],
            strict=True))
        # What is not finite reaches all ranks by the other factor.
        left = {i: tf.linalg.qr(tf.where(tf.math.is_finite(p), p, 0.0), full_matrices=False).q
                for i, p in left.items()}
        mine = [tf.matmul(m, left[i], transpose_a=True) if i in left else m
                for i, m in enumerate(own)]
        right, taken = self._means(mine, f"{name}.right")
        out = []
        for i, (m, q, lost) in enumerate(zip(mine, right, taken, strict=True)):
            mean, rest = q, lost
            if i in left:
                # The mean of the second over all ranks is that of `own` without the first.
                mean = tf.matmul(left[i], q, transpose_b=True)
                rest = own[i] - tf.matmul(left[i], m - lost, transpose_b=True)
            out.append(mean)
            self._kept.noted.append((residuals[i], tf.reshape(rest, [-1]) / scale))
        self._kept.noted += [(basis, right[i]) for i, basis in bases.items()]
        factor = self.factor * self.collective.size
        return [tf.cast(tf.reshape(mean * factor, t.shape), t.dtype)
                for mean, t in zip(out, tensors, strict=True)]

    def _means(self, matrices: Sequence[Any], name: str) -> tuple[list[Any], list[Any]]:
        """The means over all ranks of some matrices, sent with eight bits for a number. All ranks.

        Bitwise equal on all ranks, and NaN throughout where a number is not finite. A number is
        rounded to 1/127 of the largest of its block each time it is sent. Also returns this rank's
        rounding errors, whose means over all ranks, added to the result, give the exact means.
        """
        if not matrices:
            return [], []
        # Column by column, so that the numbers of a block are of one column.
        vectors = [tf.reshape(tf.transpose(m), [-1]) for m in matrices]
        counts = [-(-int(v.shape[0]) // BLOCK) for v in vectors]
        blocks = tf.concat([
            tf.reshape(tf.pad(v, [[0, count * BLOCK - v.shape[0]]]), [count, BLOCK])
            for v, count in zip(vectors, counts, strict=True)], axis=0)
        if self.collective.size == 2:  # noqa: PLR2004 - as many bytes as by parts
            sent = _pack(blocks)
            both = _unpack(self.collective.allgather(sent, name=f"{name}.both"))
            mean = tf.reduce_mean(tf.reshape(both, [2, *blocks.shape]), axis=0)
            lost = blocks - _unpack(sent)
        else:
            mean, lost = summed_by_parts(self.collective, blocks, 1 / self.collective.size, _pack,
                                         _unpack, name=name)
        means, errors = ([
            tf.transpose(tf.reshape(tf.reshape(part, [-1])[:v.shape[0]], m.shape[::-1]))
            for part, v, m in zip(tf.split(found, counts), vectors, matrices, strict=True)]
            for found in (mean, lost))
        return means, errors

    def dense_bytes(self, shape: Sequence[int], dtype: Any) -> float:
        """See `Compression.dense_bytes`."""
        (rows, columns, rank), ranks = self.form(shape), self.collective.size
        numbers = rank * (rows + columns) or rows * columns
        return 2 * (ranks - 1) / ranks * numbers * BYTES_PER_NUMBER


def _unit_columns(matrix: Any) -> Any:
    """Columns of length 1, so that no product of small numbers becomes zero."""
    largest = tf.reduce_max(tf.abs(matrix), axis=0, keepdims=True)
    scaled = tf.math.divide_no_nan(matrix, largest)
    return scaled * tf.math.rsqrt(tf.maximum(tf.reduce_sum(scaled ** 2, 0, keepdims=True), _TINY))


def _pack(blocks: Any) -> Any:
    """From numbers `(blocks, BLOCK)` to bytes `(blocks, BLOCK + 2)`."""
    unit = tf.reduce_max(tf.abs(blocks), axis=1, keepdims=True) / _LARGEST
    # No order finds a NaN: one number that is not finite must reach all ranks.
    finite = tf.reduce_all(tf.math.is_finite(blocks))
    bits = pack_bfloat16(tf.where(finite, unit, float("nan")))
    unit = unpack_bfloat16(bits)
    steps = tf.where(finite & (unit > 0), tf.math.round(blocks / unit), 0.0)
    steps = tf.clip_by_value(steps, -_LARGEST, _LARGEST)  # where the unit was rounded down
    return tf.concat([tf.bitcast(tf.cast(steps, tf.int8), tf.uint8),
                      tf.reshape(tf.bitcast(bits, tf.uint8), [-1, 2])], axis=1)


def _unpack(packed: Any) -> Any:
    """The inverse of `_pack`, as float32 `(blocks, BLOCK)`."""
    steps = tf.cast(tf.bitcast(packed[:, :BLOCK], tf.int8), tf.float32)
    unit = unpack_bfloat16(tf.bitcast(packed[:, BLOCK:], tf.uint16))
    return steps * unit[:, tf.newaxis]

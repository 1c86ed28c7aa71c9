"""`LowRankWire`: each gradient as a product of two thin matrices (PowerSGD).

Vogels, Karimireddy, Jaggi, 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", algorithms 1 and 2. With M the mean over ranks of what each has to send, and Q the
second factor of the step before:

    P = orthonormal columns of M Q        Q = M^T P        sent: P Q^T

M itself is on no rank: M Q and M^T P are means of what ranks compute of their own. So the bytes do
not grow with the number of ranks, as they do where each rank chooses its own elements. Unlike
there, the thin matrices travel in eight bits, so that for the same bytes their rank is four times
as high. What rounding takes is kept back with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.optim.eight_bits import BYTES_PER_NUMBER, rounded_means
from hvdtrain.optim.kept_back import KeptBack, VariableKey
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.optim.wire import BYTES_SHARE, Wire, joined, size_of

LEAST_RANK = 4
"""Of small matrices, which are few bytes, at least so much is sent: the last layer of a
classifier suffers from less."""
_TINY = 1e-30


class Form(NamedTuple):
    """A tensor as a matrix, and the rank of what is sent of it."""

    rows: int
    columns: int
    rank: int
    """0 where two factors would not be fewer numbers: it travels whole."""

    @property
    def numbers(self) -> int:
        """How many numbers travel."""
        return self.rank * (self.rows + self.columns) or self.rows * self.columns


class LowRankWire(Wire):
    """Two factors of each tensor; the rest is added to the next gradient.

    Args:
        collective: The collective to use.
        options: How to reduce.
        kept_back: Holds what was not sent, and the second factors.
    """

    def __init__(self, collective: Collective, options: ReducerOptions,
                 kept_back: KeptBack) -> None:
        super().__init__(collective, options)
        self._kept_back = kept_back

    def form(self, shape: Sequence[int]) -> Form:
        """A tensor as the matrix that is closest to a square, its axes kept in order."""
        cut = min(range(len(shape) + 1), key=lambda k: prod(shape[:k]) + prod(shape[k:]))
        rows, columns = prod(shape[:cut]), prod(shape[cut:])
        affordable = int(BYTES_SHARE * tf.float32.size * rows * columns / (
            (rows + columns) * BYTES_PER_NUMBER))
        rank = min(max(LEAST_RANK, affordable), self._options.approximation_rank)
        return Form(rows, columns, rank if rank * (rows + columns) < rows * columns else 0)

    def average(self, tensors: Sequence[Any], keys: Sequence[VariableKey], *,
                name: str) -> list[Any]:
        """See `Wire.average`. A gradient that is not finite is not finite on all ranks."""
        scale = self._kept_back.factor()
        forms = [self.form(t.shape.as_list()) for t in tensors]
        residuals = [self._kept_back.residual(key, size_of(t))
                     for t, key in zip(tensors, keys, strict=True)]
        own = [tf.reshape(joined([t]) + residual * scale, [form.rows, form.columns])
               for t, residual, form in zip(tensors, residuals, forms, strict=True)]
        bases = {i: self._basis(keys[i], form) for i, form in enumerate(forms) if form.rank}
        left = dict(zip(bases, self._means(
            [own[i] @ _unit_columns(q) for i, q in bases.items()], f"{name}.left")[0],
            strict=True))
        left = {i: _orthonormal(p) for i, p in left.items()}
        mine = [tf.matmul(m, left[i], transpose_a=True) if i in left else m
                for i, m in enumerate(own)]
        right, taken = self._means(mine, f"{name}.right")
        out, rests = [], []
        for i, (m, q, lost) in enumerate(zip(mine, right, taken, strict=True)):
            # The mean of the second over all ranks is that of `own` without the first.
            out.append(tf.matmul(left[i], q, transpose_b=True) if i in left else q)
            rests.append(own[i] - tf.matmul(left[i], m - lost, transpose_b=True)
                         if i in left else lost)
        for residual, rest in zip(residuals, rests, strict=True):
            self._kept_back.note(residual, tf.reshape(rest, [-1]) / scale)
        for i, basis in bases.items():
            self._kept_back.note(basis, right[i])
        factor = self.factor * self._collective.size
        return [tf.cast(tf.reshape(h * factor, t.shape), t.dtype)
                for h, t in zip(out, tensors, strict=True)]

    def _means(self, matrices: Sequence[Any], name: str) -> tuple[list[Any], list[Any]]:
        """The means of matrices, and what rounding has taken from this rank's."""
        if not matrices:
            return [], []
        # Column by column, so that the numbers of a block are of one column.
        found = rounded_means(self._collective, [tf.reshape(tf.transpose(m), [-1])
                                                 for m in matrices], name=name)
        means, taken = ([tf.transpose(tf.reshape(vector, m.shape[::-1]))
                         for vector, m in zip(vectors, matrices, strict=True)]
                        for vectors in found)
        return means, taken

    def _basis(self, key: VariableKey, form: Form) -> Any:
        """The second factor of the step before; in the first step, any that all ranks share."""
        return self._kept_back.basis(key, lambda: np.random.default_rng(list(form)).normal(
            size=(form.columns, form.rank)).astype(np.float32))

    def dense_bytes(self, shape: Sequence[int], itemsize: int) -> float:
        """See `Wire.dense_bytes`."""
        del itemsize
        return super().dense_bytes([self.form(shape).numbers], 1) * BYTES_PER_NUMBER


def _unit_columns(matrix: Any) -> Any:
    """Columns of length 1, so that no product of small numbers becomes zero."""
    largest = tf.reduce_max(tf.abs(matrix), axis=0, keepdims=True)
    scaled = tf.math.divide_no_nan(matrix, largest)
    return scaled * tf.math.rsqrt(tf.maximum(tf.reduce_sum(scaled ** 2, 0, keepdims=True), _TINY))


def _orthonormal(matrix: Any) -> Any:
    """An orthonormal basis of the columns, filled up where they depend on each other."""
    # What is not finite reaches all ranks by the other factor.
    finite = tf.where(tf.math.is_finite(matrix), matrix, 0.0)
    return tf.linalg.qr(finite, full_matrices=False).q

"""The parts of variables and gradients that one rank works on: between layout and optimizer.

Both classes answer the same calls. `parameters` are what the Keras optimizer of this rank is
built for: it sees nothing else. In a step, `scatter` turns gradients into those of the parts,
averaged over ranks; `refresh` brings the parameters up to date; the optimizer updates them;
`publish` gives all ranks the result, and `release` the memory back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.optim.zero_layout import Bucket, Span, choose_owners


class Parts(Protocol):
    """What one rank works on."""

    whole: bool
    """Each part is one whole variable."""
    parameters: list[Any]
    """Keras variables, one for each part of this rank."""

    def scatter(self, gradients: Sequence[Any], name: str) -> list[Any]:
        """The averaged gradients of `parameters`. All ranks."""

    def refresh(self) -> None:
        """Set `parameters` to what the model's variables hold."""

    def publish(self, name: str) -> None:
        """Set the model's variables to what the parameters of all ranks hold. All ranks."""

    def release(self) -> None:
        """Free what is not needed until the next step."""

    def squared_norms(self, gradients: Sequence[Any]) -> Any:
        """Of parts of gradients, for each variable of the model: this rank's share, float64."""

    def scaled(self, gradients: Sequence[Any], factors: Any) -> list[Any]:
        """Parts of gradients times the factor of their variable."""

    def spans(self, rank: int) -> list[tuple[Span, ...]]:
        """For each part of a rank, what it consists of."""

    def shape(self, variable: int) -> tuple[int, ...]:
        """The shape of a variable of the model, by its number."""


class BucketParts:
    """Equal parts of buckets, for optimizers that treat each element alike.

    Args:
        variables: Sequence of Keras variables, in the order of building.
        buckets: Sequence of buckets of them.
        collective: The collective to use.
    """

    whole = False

    def __init__(self, variables: Sequence[Any], buckets: Sequence[Bucket],
                 collective: Collective) -> None:
        self._variables = list(variables)
        self._buckets = list(buckets)
        self._sizes = [int(np.prod(v.shape)) for v in variables]
        self._collective = collective
        self._nothing = tf.Variable(0, dtype=tf.int32, trainable=False, name="hvdtrain_nothing")
        self.parameters = [
            keras.Variable(np.zeros(bucket.part, bucket.dtype), dtype=bucket.dtype,
                           trainable=False, name=f"hvdtrain_part_{number}")
            for number, bucket in enumerate(buckets)]
        self.release()

    def scatter(self, gradients: Sequence[Any], name: str) -> list[Any]:
        """See `Parts.scatter`: one collective for each bucket."""
        flat = [tf.reshape(g, [size]) for g, size in zip(gradients, self._sizes, strict=True)]
        out = []
        for number, bucket in enumerate(self._buckets):
            vector = _joined([self._slice(flat, span) for span in bucket.spans], bucket.padding)
            part = self._collective.reduce_scatter(
                [vector], name=f"{name}.s{number}", op="average")[0]
            part.set_shape([bucket.part])
            out.append(part)
        return out

    def refresh(self) -> None:
        """See `Parts.refresh`."""
        flat = [tf.reshape(tf.convert_to_tensor(v), [size])
                for v, size in zip(self._variables, self._sizes, strict=True)]
        rank = self._collective.rank
        for parameter, bucket in zip(self.parameters, self._buckets, strict=True):
            _put(parameter, _joined([self._slice(flat, span) for span in bucket.spans_of(rank)],
                                    bucket.padding_of(rank), bucket.dtype))

    def _slice(self, flat: Sequence[Any], span: Span) -> Any:
        vector = flat[span.variable]
        return vector if len(span) == self._sizes[span.variable] else vector[span.start:span.stop]

    def publish(self, name: str) -> None:
        """See `Parts.publish`: one collective for each bucket."""
        pieces: dict[int, list[tuple[int, Any]]] = {}
        for number, (parameter, bucket) in enumerate(
                zip(self.parameters, self._buckets, strict=True)):
            vector = self._collective.allgather(
                tf.convert_to_tensor(parameter), name=f"{name}.p{number}")
            vector.set_shape([bucket.part * bucket.ranks])
            sizes = [len(span) for span in bucket.spans]
            if bucket.padding:
                sizes.append(bucket.padding)
            cut = tf.split(vector, sizes) if len(sizes) > 1 else [vector]
            for span, piece in zip(bucket.spans, cut, strict=False):
                pieces.setdefault(span.variable, []).append((span.start, piece))
        for number, found in pieces.items():
            ordered = [piece for _, piece in sorted(found, key=lambda entry: entry[0])]
            variable = self._variables[number]
            variable.assign(tf.reshape(_joined(ordered, 0), variable.shape))

    def release(self) -> None:
        """See `Parts.release`: the model's variables hold the same values."""
        for parameter in self.parameters:
            length = tf.reshape(self._nothing.read_value(), [1])
            _put(parameter, tf.zeros(length, parameter.value.dtype))

    def squared_norms(self, gradients: Sequence[Any]) -> Any:
        """See `Parts.squared_norms`."""
        where, values = [], []
        for gradient, bucket in zip(gradients, self._buckets, strict=True):
            position = 0
            for span in bucket.spans_of(self._collective.rank):
                piece = gradient[position:position + len(span)]
                where.append(span.variable)
                values.append(_squared(piece))
                position += len(span)
        return _scattered(where, values, len(self._variables))

    def scaled(self, gradients: Sequence[Any], factors: Any) -> list[Any]:
        """See `Parts.scaled`."""
        rank, out = self._collective.rank, []
        for gradient, bucket in zip(gradients, self._buckets, strict=True):
            spans = bucket.spans_of(rank)
            numbers = [*(span.variable for span in spans), 0]  # padding is zero by any factor
            lengths = [*map(len, spans), bucket.padding_of(rank)]
            factor = tf.repeat(tf.gather(tf.cast(factors, gradient.dtype), numbers), lengths)
            out.append(gradient * tf.reshape(factor, [bucket.part]))
        return out

    def spans(self, rank: int) -> list[tuple[Span, ...]]:
        """See `Parts.spans`."""
        return [bucket.spans_of(rank) for bucket in self._buckets]

    def shape(self, variable: int) -> tuple[int, ...]:
        """See `Parts.shape`."""
        return tuple(self._variables[variable].shape)


class WholeParts:
    """Whole variables, for optimizers that look at all elements of one together.

    Args:
        variables: Sequence of Keras variables, in the order of building.
        collective: The collective to use.
    """

    whole = True

    def __init__(self, variables: Sequence[Any], collective: Collective) -> None:
        self._variables = list(variables)
        self._collective = collective
        self._sizes = [int(np.prod(v.shape)) for v in variables]
        owners = choose_owners(self._sizes, collective.size)
        self._owned = [[i for i, owner in enumerate(owners) if owner == rank]
                       for rank in range(collective.size)]
        self._own = self._owned[collective.rank]
        self.parameters = [self._variables[i] for i in self._own]
        self._dtypes = sorted({keras.backend.standardize_dtype(v.dtype) for v in variables})

    def _of(self, dtype: str) -> tuple[list[list[int]], int]:
        """Variables of a dtype for each rank, and the most elements that one rank has of it."""
        owned = [[i for i in numbers if keras.backend.standardize_dtype(
            self._variables[i].dtype) == dtype] for numbers in self._owned]
        return owned, max(sum(self._sizes[i] for i in numbers) for numbers in owned)

    def scatter(self, gradients: Sequence[Any], name: str) -> list[Any]:
        """See `Parts.scatter`: one collective for each dtype."""
        found: dict[int, Any] = {}
        for dtype in self._dtypes:
            owned, most = self._of(dtype)
            vector = tf.concat([self._flat(gradients, numbers, most, dtype)
                                for numbers in owned], 0)
            part = self._collective.reduce_scatter(
                [vector], name=f"{name}.s{dtype}", op="average")[0]
            found.update(self._cut(part, owned[self._collective.rank]))
        return [found[i] for i in self._own]

    def refresh(self) -> None:
        """See `Parts.refresh`: they are the model's variables."""

    def publish(self, name: str) -> None:
        """See `Parts.publish`: one collective for each dtype."""
        for dtype in self._dtypes:
            owned, most = self._of(dtype)
            mine = self._flat(self._variables, owned[self._collective.rank], most, dtype)
            vector = self._collective.allgather(mine, name=f"{name}.p{dtype}")
            for rank, numbers in enumerate(owned):
                if rank != self._collective.rank:
                    part = vector[rank * most:(rank + 1) * most]
                    for number, value in self._cut(part, numbers).items():
                        self._variables[number].assign(value)

    def release(self) -> None:
        """See `Parts.release`: nothing."""

    def _flat(self, tensors: Sequence[Any], numbers: Sequence[int], most: int,
              dtype: str) -> Any:
        """Some tensors one after the other, filled up to `most` elements."""
        return _joined([tf.reshape(tf.convert_to_tensor(tensors[i]), [self._sizes[i]])
                        for i in numbers],
                       most - sum(self._sizes[i] for i in numbers), dtype)

    def _cut(self, part: Any, numbers: Sequence[int]) -> dict[int, Any]:
        """What `_flat` has joined, by number of the variable."""
        found, position = {}, 0
        for i in numbers:
            found[i] = tf.reshape(part[position:position + self._sizes[i]],
                                  self._variables[i].shape)
            position += self._sizes[i]
        return found

    def squared_norms(self, gradients: Sequence[Any]) -> Any:
        """See `Parts.squared_norms`."""
        return _scattered(self._own, [_squared(g) for g in gradients], len(self._variables))

    def scaled(self, gradients: Sequence[Any], factors: Any) -> list[Any]:
        """See `Parts.scaled`."""
        return [g * tf.cast(factors[i], g.dtype)
                for i, g in zip(self._own, gradients, strict=True)]

    def spans(self, rank: int) -> list[tuple[Span, ...]]:
        """See `Parts.spans`."""
        return [(Span(variable=i, start=0, stop=self._sizes[i]),) for i in self._owned[rank]]

    def shape(self, variable: int) -> tuple[int, ...]:
        """See `Parts.shape`."""
        return tuple(self._variables[variable].shape)


def _joined(pieces: list[Any], padding: int, dtype: str | None = None) -> Any:
    """Vectors one after the other, and zeros; the same tensor where there is only one."""
    if padding:
        pieces = [*pieces, tf.zeros([padding], dtype or pieces[0].dtype)]
    if not pieces:
        return tf.zeros([0], dtype)
    return pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)


def _squared(tensor: Any) -> Any:
    return tf.cast(tf.reduce_sum(tf.square(tensor)), tf.float64)


def _scattered(where: Sequence[int], values: Sequence[Any], count: int) -> Any:
    """A vector of `count` numbers with the given ones at their places, and zeros."""
    if not where:
        return tf.zeros([count], tf.float64)
    return tf.scatter_nd([[i] for i in where], tf.stack(values), [count])


def _put(parameter: Any, value: Any) -> None:
    """Set a variable to a vector of another length."""
    tf.raw_ops.AssignVariableOp(
        resource=parameter.value.handle, value=value, validate_shape=False)

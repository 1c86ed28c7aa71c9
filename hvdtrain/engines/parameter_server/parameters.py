"""`ServerParameters`: the parameters on the servers, and every way between them and the model.

What lies on a server is a *holder*: one variable with one piece of a parameter in its own shape,
or with many pieces end to end (a fused vector). Fused vectors make one transfer of many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.engine_config import PsConfig
from hvdtrain.engines.parameter_server import tf_seam
from hvdtrain.engines.parameter_server.placement import Piece, parameters_of, place
from hvdtrain.engines.parameter_server.probe import ModelParts
from hvdtrain.optim import keras_seam

Array = np.ndarray[Any, Any]
_ALIGNED = 16
"""Numbers of 4 bytes between the addresses from which TensorFlow reads without copying."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Holder:
    """A variable on a server."""

    variable: Any
    """A Keras variable."""
    pieces: tuple[Piece, ...]
    flat: bool
    """Whether the pieces stand end to end in a vector."""
    is_table: bool = False

    @property
    def device(self) -> str:
        """Of its server."""
        return str(self.variable.value.device)


class ServerParameters:
    """The trained parameters of a model on the servers. On the chief.

    Args:
        strategy: A `ParameterServerStrategy`.
        parts: The variables of the model.
        config: Placement, partitioner, number format on the wire.
        fused: Boolean, join the pieces of each server.
        partitioner: String; `none` where the optimizer does not allow cutting.
    """

    def __init__(self, strategy: Any, parts: ModelParts, config: PsConfig, *, fused: bool,
                 partitioner: str) -> None:
        self.parts = parts
        self.servers = strategy.extended._num_ps
        self.parameters = parameters_of(
            (v.path, tuple(v.shape), keras.backend.standardize_dtype(v.dtype))
            for v in parts.trained)
        self.pieces = place(self.parameters, servers=self.servers, policy=config.placement,
                            partitioner=partitioner)
        self._wire = tf.as_dtype(config.wire_dtype)
        values = [np.asarray(v.numpy()) for v in parts.trained]
        self.holders = tuple(self._make(strategy, flat, pieces, values)
                             for flat, pieces in self._group(fused))

    @property
    def variables(self) -> list[Any]:
        """The Keras variables on the servers."""
        return [holder.variable for holder in self.holders]

    @property
    def dense(self) -> list[int]:
        """The numbers of the parameters that are read whole."""
        return [i for i, v in enumerate(self.parts.trained) if not self.parts.is_table(v)]

    def _group(self, fused: bool) -> list[tuple[bool, tuple[Piece, ...]]]:
        if not fused:
            return [(False, (piece,)) for piece in self.pieces]
        groups: dict[tuple[int, str], list[Piece]] = {}
        tables = []
        for piece in self.pieces:
            variable = self.parts.trained[piece.parameter]
            if self.parts.is_table(variable):
                tables.append((False, (piece,)))
            else:
                groups.setdefault((piece.server, str(variable.dtype)), []).append(piece)
        return [*((True, tuple(sorted(group, key=_is_ragged)))
                  for _, group in sorted(groups.items())), *tables]

    def _make(self, strategy: Any, flat: bool, pieces: tuple[Piece, ...],
              values: Sequence[Array]) -> Holder:
        trained = self.parts.trained[pieces[0].parameter]
        value = _join([_cut_out(values[p.parameter], p) for p in pieces], flat=flat)
        name = f"fused_{pieces[0].server}" if flat else (
            f"{trained.path.replace('/', '_')}_from_{pieces[0].start}")
        with tf_seam.on_server(strategy, pieces[0].server):
            variable = keras.Variable(
                value, dtype=keras.backend.standardize_dtype(trained.dtype), name=name)
        if not flat and pieces[0].shape == tuple(trained.shape):
            variable.constraint = trained.constraint
            # Muon tells by the name of a layer how it treats a variable.
            keras_seam.set_on_instance(variable, "_path", trained.path)
        return Holder(variable=variable, pieces=pieces, flat=flat,
                      is_table=self.parts.is_table(trained))

    def read(self) -> list[tuple[Any, Any]]:
        """Pairs of a dense variable of the model and its value, fetched from the servers.

        In a function that a worker runs.
        """
        found: dict[int, list[Any]] = {}
        for holder in self.holders:
            if holder.is_table:
                continue
            value = self._fetch(holder, holder.variable.value.read_value)
            parts = _cut_flat(value, holder.pieces) if holder.flat else [value]
            for piece, part in zip(holder.pieces, parts, strict=True):
                found.setdefault(piece.parameter, []).append(
                    (piece.start, tf.reshape(part, piece.shape)))
        return [(self.parts.trained[number], _concat([part for _, part in sorted(
            found[number], key=lambda pair: pair[0])])) for number in self.dense]

    def read_rows(self, layer: Any, rows: Any) -> Any:
        """Some rows of a table. In a function that a worker runs.

        Args:
            layer: The embedding.
            rows: int64 tensor `(n,)`.

        Returns:
            Tensor `(n, output_dim)`.
        """
        shards = self._shards(layer)
        if len(shards) == 1:
            return self._fetch(shards[0], lambda: shards[0].variable.value.sparse_read(rows))
        owner = self._owner(shards, rows)
        wanted = tf.dynamic_partition(rows, owner, len(shards))
        places = tf.dynamic_partition(tf.range(tf.size(rows)), owner, len(shards))
        read = [self._fetch(shard, lambda s=shard, w=wanted[i]: s.variable.value.sparse_read(
            w - s.pieces[0].start)) for i, shard in enumerate(shards)]
        return tf.reshape(tf.dynamic_stitch(places, read), [-1, layer.output_dim])

    def send(self, dense: Sequence[Any]) -> dict[int, Any]:
        """Gradients of the dense parameters as gradients of the holders.

        In a function that a worker runs.

        Args:
            dense: Gradients in the order of `dense`.

        Returns:
            From the number of a holder to its gradient, in the type that travels.
        """
        by_parameter = dict(zip(self.dense, dense, strict=True))
        sent = {}
        for number, holder in enumerate(self.holders):
            if not holder.is_table:
                parts = [_slice(tf.convert_to_tensor(by_parameter[p.parameter]), p)
                         for p in holder.pieces]
                value = (tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
                         if holder.flat else parts[0])
                sent[number] = tf.cast(value, self._wire)
        return sent

    def send_rows(self, layer: Any, rows: Any, values: Any) -> dict[int, Any]:
        """The gradient of a table as gradients of its holders.

        Args:
            layer: The embedding.
            rows: int64 tensor `(n,)`, without duplicates.
            values: Tensor `(n, output_dim)`.

        Returns:
            From the number of a holder to `tf.IndexedSlices`.
        """
        shards = self._shards(layer)
        owner = self._owner(shards, rows)
        rows_of = tf.dynamic_partition(rows, owner, len(shards))
        values_of = tf.dynamic_partition(values, owner, len(shards))
        return {self.holders.index(shard): tf.IndexedSlices(
            tf.cast(values_of[i], self._wire), rows_of[i] - shard.pieces[0].start,
            tf.constant(tuple(shard.variable.shape), tf.int64)) for i, shard in enumerate(shards)}

    def received(self, number: int, gradient: Any) -> Any:
        """A gradient from `send` or `send_rows`, on its server in the type of the parameter."""
        holder = self.holders[number]
        if self._wire == tf.as_dtype(keras.backend.standardize_dtype(holder.variable.dtype)):
            return gradient
        with tf.device(holder.device):
            return tf.cast(gradient, holder.variable.value.dtype)

    def assemble(self, values: Sequence[Array]) -> list[Array]:
        """Arrays like the holders, as arrays like the parameters."""
        found: dict[int, list[tuple[int, Array]]] = {}
        for holder, value in zip(self.holders, values, strict=True):
            start = 0
            for piece in holder.pieces:
                part = value.reshape(-1)[start:start + piece.size].reshape(piece.shape)
                found.setdefault(piece.parameter, []).append((piece.start, part))
                start += piece.size
        return [_concat_arrays([part for _, part in sorted(
            found[number], key=lambda pair: pair[0])]) for number in range(len(self.parameters))]

    def take_apart(self, values: Sequence[Array]) -> list[Array]:
        """Arrays like the parameters, as arrays like the holders."""
        return [_join([_cut_out(values[p.parameter], p) for p in holder.pieces],
                      flat=holder.flat) for holder in self.holders]

    def pull(self) -> None:
        """Copy the parameters from the servers into the model."""
        arrays = [np.asarray(variable.value.numpy()) for variable in self.variables]
        for variable, value in zip(self.parts.trained, self.assemble(arrays), strict=True):
            variable.assign(value)

    def _fetch(self, holder: Holder, read: Any) -> Any:
        with tf.device(holder.device):
            value = read()
            if self._wire.size < value.dtype.size:
                value = tf.cast(value, self._wire)
        value = tf.identity(value)
        return tf.cast(value, holder.variable.value.dtype)

    def _shards(self, layer: Any) -> list[Holder]:
        table = next(i for i, v in enumerate(self.parts.trained) if v is layer._embeddings)
        return [h for h in self.holders if h.is_table and h.pieces[0].parameter == table]

    @staticmethod
    def _owner(shards: Sequence[Holder], rows: Any) -> Any:
        starts = tf.constant([shard.pieces[0].start for shard in shards], tf.int64)
        return tf.searchsorted(starts, rows, side="right") - 1


def _is_ragged(piece: Piece) -> bool:
    """Whether what stands behind the piece in a vector begins at no boundary of 64 bytes."""
    return piece.size % _ALIGNED != 0


def _cut_flat(value: Any, pieces: Sequence[Piece]) -> list[Any]:
    """The pieces of a vector. TensorFlow copies only those that are not aligned."""
    parts, start = [], 0
    for piece in pieces:
        begin, size = (tf.constant([number], tf.int64) for number in (start, piece.size))
        parts.append(tf.slice(value, begin, size))
        start += piece.size
    return parts


def _cut_out(value: Array, piece: Piece) -> Array:
    if not piece.shape:
        return value
    return value[piece.start:piece.start + piece.shape[0]]


def _join(parts: Sequence[Array], *, flat: bool) -> Array:
    return np.concatenate([np.reshape(part, -1) for part in parts]) if flat else parts[0]


def _slice(value: Any, piece: Piece) -> Any:
    if not piece.shape or piece.shape[0] == value.shape[0]:
        return value
    return value[piece.start:piece.start + piece.shape[0]]


def _concat(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tf.concat(list(parts), 0)


def _concat_arrays(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

"""`ServerParameters`: the parameters on the servers, and every transfer to and from the model.

A *holder* is one variable on a server: one piece of a parameter in its shape, or many pieces end to
end (a fused vector), which makes one transfer of many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.engine_config import PsConfig
from hvdtrain.engines.parameter_server import tf_seam
from hvdtrain.engines.parameter_server.keras_parts import ModelParts, Pairs, is_elementwise
from hvdtrain.engines.parameter_server.placement import Piece, place
from hvdtrain.errors import ConfigError
from hvdtrain.optim import keras_seam

Array = np.ndarray[Any, Any]
_ALIGNED = 16  # numbers of 4 bytes, at whose multiples TensorFlow reads without a copy


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which server holds what, and whether its pieces are joined."""

    pieces: tuple[Piece, ...]
    fused: bool


def make_layout(model: Any, parts: ModelParts, config: PsConfig, servers: int) -> Layout:
    """Decide how parameters lie on servers; ConfigError where results would differ from Keras."""
    optimizer, why = model.optimizer, ""
    constrained = [v.path for v in model.trainable_variables if v.constraint is not None]
    if constrained and config.mode == "async":
        raise ConfigError(
            f"{constrained[0]} has a constraint, which needs the variable to itself between an "
            "update and the next. In mode async workers would undo each other's updates. Use "
            "--ps-mode sync.")
    if not is_elementwise(optimizer):
        why = (f"{type(optimizer).__name__} with these settings, which does not treat every "
               "number of a variable alike")
    elif config.mode == "sync" and optimizer.clipnorm is not None:
        why = "clipnorm, which takes the norm of each variable"
    elif constrained:
        why = f"the constraint of {constrained[0]}, which needs the whole variable"
    if why and (config.fused or config.partitioner != "none"):
        what = "--ps-fused" if config.fused else f"--ps-partitioner {config.partitioner}"
        raise ConfigError(f"{what} does not go with {why}. Leave it out: each variable then lies "
                          "whole on one server.")
    parameters = [(tuple(v.shape), tf.as_dtype(_dtype(v)).size) for v in parts.trained]
    return Layout(fused=not why if config.fused is None else config.fused, pieces=place(
        parameters, servers=servers, policy=config.placement, partitioner=config.partitioner))


@dataclass(frozen=True, kw_only=True, eq=False)
class Holder:
    """A Keras variable on a server; `flat` if it is a vector of pieces end to end."""

    variable: Any
    pieces: tuple[Piece, ...]
    flat: bool
    is_table: bool

    @property
    def device(self) -> str:
        """The device of its server."""
        return str(self.variable.value.device)


class ServerParameters:
    """The trained parameters of a model on the servers. On the chief."""

    def __init__(self, strategy: Any, parts: ModelParts, layout: Layout, wire_dtype: str) -> None:
        self.parts, self._layout = parts, layout
        self._wire = tf.as_dtype(wire_dtype)
        values = {i: np.asarray(v.numpy()) for i, v in enumerate(parts.trained)}
        self.holders = tuple(self._make(strategy, flat, pieces, values)
                             for flat, pieces in self._group())
        self.variables = [holder.variable for holder in self.holders]
        self._dense = [i for i, v in enumerate(parts.trained) if not parts.is_table(v)]

    def _group(self) -> list[tuple[bool, tuple[Piece, ...]]]:
        groups: dict[tuple[int, str], list[Piece]] = {}
        alone = []
        for piece in self._layout.pieces:
            variable = self.parts.trained[piece.parameter]
            if self._layout.fused and not self.parts.is_table(variable):
                groups.setdefault((piece.server, str(variable.dtype)), []).append(piece)
            else:
                alone.append((False, (piece,)))
        # Last come those behind which another piece would begin at no boundary of 64 bytes.
        return [*((True, tuple(sorted(group, key=lambda piece: piece.size % _ALIGNED != 0)))
                  for _, group in sorted(groups.items())), *alone]

    def _make(self, strategy: Any, flat: bool, pieces: tuple[Piece, ...],
              values: Mapping[int, Array]) -> Holder:
        first = pieces[0]
        trained = self.parts.trained[first.parameter]
        name = (f"fused_{first.server}" if flat else
                f"{trained.path.replace('/', '_')}_from_{first.start}")
        with tf_seam.on_server(strategy, first.server):
            variable = keras.Variable(_join(values, pieces, flat), dtype=_dtype(trained), name=name)
        if not flat and first.shape == tuple(trained.shape):
            variable.constraint = trained.constraint
            # Muon tells by the name of a layer how it treats a variable.
            keras_seam.set_on_instance(variable, "_path", trained.path)
        return Holder(variable=variable, pieces=pieces, flat=flat,
                      is_table=self.parts.is_table(trained))

    # What a worker does, in a function that it runs.

    def read(self) -> Pairs:
        """Pairs of a dense variable and its value, fetched from the servers."""
        found = []
        for holder in (holder for holder in self.holders if not holder.is_table):
            value, start = self._fetch(holder, holder.variable.value.read_value), 0
            for piece in holder.pieces:
                part = value
                if holder.flat:  # TensorFlow copies only parts that are not aligned
                    begin, size = (tf.constant([n], tf.int64) for n in (start, piece.size))
                    part = tf.slice(value, begin, size)
                found.append((piece, tf.reshape(part, piece.shape)))
                start += piece.size
        whole = _by_parameter(found, lambda some: tf.concat(some, 0))
        return [(self.parts.trained[number], whole[number]) for number in self._dense]

    def read_rows(self, layer: Any, rows: Any) -> Any:
        """Rows of the table of an embedding, `(n, output_dim)` for int64 numbers `(n,)`."""
        shards = self._shards(layer)
        if len(shards) == 1:
            return self._fetch(shards[0], partial(shards[0].variable.value.sparse_read, rows))
        owner = self._owner(shards, rows)
        wanted = tf.dynamic_partition(rows, owner, len(shards))
        places = tf.dynamic_partition(tf.range(tf.size(rows)), owner, len(shards))
        read = [self._fetch(shard, partial(shard.variable.value.sparse_read,
                                           some - shard.pieces[0].start))
                for shard, some in zip(shards, wanted, strict=True)]
        return tf.reshape(tf.dynamic_stitch(places, read), [-1, layer.output_dim])

    def send(self, dense: Sequence[Any]) -> dict[int, Any]:
        """Gradients by the number of their holder; `dense` is in the order of `read`."""
        by_parameter = dict(zip(self._dense, map(tf.convert_to_tensor, dense), strict=True))
        sent = {}
        for number, holder in enumerate(self.holders):
            if not holder.is_table:
                parts = [_cut_out(by_parameter[p.parameter], p) for p in holder.pieces]
                value = (tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
                         if holder.flat else parts[0])
                sent[number] = tf.cast(value, self._wire)
        return sent

    def send_rows(self, layer: Any, rows: Any, values: Any) -> dict[int, Any]:
        """As `send`, for a table: `tf.IndexedSlices` of distinct rows `(n,)` and their values."""
        shards = self._shards(layer)
        owner = self._owner(shards, rows)
        rows_of = tf.dynamic_partition(rows, owner, len(shards))
        values_of = tf.dynamic_partition(values, owner, len(shards))
        return {self.holders.index(shard): tf.IndexedSlices(
            tf.cast(values_of[i], self._wire), rows_of[i] - shard.pieces[0].start,
            tf.constant(tuple(shard.variable.shape), tf.int64)) for i, shard in enumerate(shards)}

    def received(self, number: int, gradient: Any) -> Any:
        """A sent gradient, on its server, in the parameter's type."""
        holder = self.holders[number]
        if self._wire == tf.as_dtype(_dtype(holder.variable)):
            return gradient
        with tf.device(holder.device):
            return tf.cast(gradient, holder.variable.value.dtype)

    def _fetch(self, holder: Holder, read: Callable[[], Any]) -> Any:
        with tf.device(holder.device):
            value = read()
            if self._wire.size < value.dtype.size:
                value = tf.cast(value, self._wire)
        return tf.cast(tf.identity(value), holder.variable.value.dtype)

    def _shards(self, layer: Any) -> list[Holder]:
        return [holder for holder in self.holders
                if self.parts.trained[holder.pieces[0].parameter] is layer._embeddings]

    @staticmethod
    def _owner(shards: Sequence[Holder], rows: Any) -> Any:
        starts = tf.constant([shard.pieces[0].start for shard in shards], tf.int64)
        return tf.searchsorted(starts, rows, side="right") - 1

    # What the chief does.

    def copy_out(self, held: Mapping[int, Any], whole: Mapping[int, Any]) -> None:
        """Copy variables like the holders, by number, into variables like the parameters."""
        parts: list[tuple[Piece, Array]] = []
        for number, variable in held.items():
            pieces, value = self.holders[number].pieces, np.asarray(variable.value.numpy())
            ends = np.cumsum([piece.size for piece in pieces])[:-1]
            parts += [(piece, part.reshape(piece.shape)) for piece, part in zip(
                pieces, np.split(value.reshape(-1), ends), strict=True)]
        for number, value in _by_parameter(parts, np.concatenate).items():
            whole[number].assign(value)

    def copy_in(self, whole: Mapping[int, Any], held: Mapping[int, Any]) -> None:
        """The inverse of `copy_out`."""
        values = {number: np.asarray(variable.numpy()) for number, variable in whole.items()}
        for number, variable in held.items():
            holder = self.holders[number]
            variable.value.assign(_join(values, holder.pieces, holder.flat))

    def pull(self) -> None:
        """Copy the parameters from the servers into the model."""
        self.copy_out(dict(enumerate(self.variables)), dict(enumerate(self.parts.trained)))

    def push(self) -> None:
        """Copy the parameters of the model to the servers."""
        self.copy_in(dict(enumerate(self.parts.trained)), dict(enumerate(self.variables)))


def _dtype(variable: Any) -> str:
    return str(keras.backend.standardize_dtype(variable.dtype))


def _cut_out(value: Any, piece: Piece) -> Any:
    if not piece.shape or piece.shape[0] == value.shape[0]:
        return value
    return value[piece.start:piece.start + piece.shape[0]]


def _join(values: Mapping[int, Array], pieces: Sequence[Piece], flat: bool) -> Array:
    parts = [_cut_out(values[piece.parameter], piece) for piece in pieces]
    return np.concatenate([np.reshape(part, -1) for part in parts]) if flat else parts[0]


def _by_parameter(parts: Iterable[tuple[Piece, Any]],
                  concat: Callable[[list[Any]], Any]) -> dict[int, Any]:
    whole = {}
    in_order = sorted(parts, key=lambda pair: (pair[0].parameter, pair[0].start))
    for number, pairs in groupby(in_order, key=lambda pair: pair[0].parameter):
        some = [part for _, part in pairs]
        whole[number] = some[0] if len(some) == 1 else concat(some)
    return whole

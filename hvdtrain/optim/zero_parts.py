"""The parts of variables, gradients and state that one rank works on, for `zero`.

Variables are concatenated in buckets, of which each rank holds one part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Array, Collective
from hvdtrain.collectives.plain import carried
from hvdtrain.errors import OptimizerError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.state import Described, described, send_arrays

ALONE_BYTES = 1 << 20
"""A variable of at least this size has its own bucket, which saves copying it."""
ALIGNED = 64
"""Large variables are cut at multiples of this many elements per rank, to avoid copies."""

Slot = tuple[str, int]
"""A variable of a plain optimizer: the list that holds it, and its number (in build order)."""
Structure = list[Slot | None]
"""The list of variables that a Keras optimizer for a whole model saves: the slot of each, or None
where it belongs to no variable (iterations, learning rate)."""


@dataclass(frozen=True, kw_only=True)
class VariableFacts:
    """Input of the layout. `decays`: weight decay applies to the variable."""

    size: int
    dtype: str
    item_bytes: int
    decays: bool


@carried
@dataclass(frozen=True, kw_only=True)
class Span:
    """Elements `start` to `stop` of one variable, by its index, in memory order."""

    variable: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def pieces_of(vector: Any, spans: Sequence[Span]) -> Iterator[tuple[Span, Any]]:
    """Each span with its elements, of a vector that holds them one after the other."""
    position = 0
    for span in spans:
        yield span, vector[position:position + len(span)]
        position += len(span)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A vector made of variables; rank r holds the spans `owned[r]`, padded to `part` elements."""

    owned: tuple[tuple[Span, ...], ...]
    part: int
    dtype: str
    decays: bool = True

    def padding_of(self, rank: int) -> int:
        """Elements at the end of a rank's part that belong to no variable."""
        return self.part - sum(map(len, self.owned[rank]))

    def layout(self) -> list[tuple[Span | None, int]]:
        """The whole vector in order, each piece with its length; None for padding."""
        # Adjacent spans of two ranks are one piece: it need not be cut to be joined.
        found: list[tuple[Span | None, int]] = []
        for rank in range(len(self.owned)):
            for span, length in self.pieces(rank):
                before = found[-1][0] if found else None
                if before and span and before.variable == span.variable:
                    found.pop()
                    span = replace(span, start=before.start)
                    length = len(span)
                found.append((span, length))
        return found

    def pieces(self, rank: int) -> list[tuple[Span | None, int]]:
        """As `layout`, of one rank."""
        own = [(span, len(span)) for span in self.owned[rank]]
        padding = self.padding_of(rank)
        return [*own, (None, padding)] if padding else [*own]


def plan_buckets(variables: Sequence[VariableFacts], *, ranks: int,
                 bucket_bytes: int) -> tuple[Bucket, ...]:
    """Divide variables into buckets, last variables (whose gradients come first) first."""
    # For optimizers that treat each element alike: each rank has an equal part of every bucket,
    # which may cut a variable. A bucket holds about `bucket_bytes` at most.
    done: list[Bucket] = []
    kinds: dict[tuple[str, bool], list[Span]] = {}
    for number in reversed(range(len(variables))):
        facts = variables[number]
        kind = (facts.dtype, facts.decays)
        most = max(1, bucket_bytes // facts.item_bytes)
        if facts.size * facts.item_bytes >= ALONE_BYTES or facts.size >= most:
            length = -(-most // (ALIGNED * ranks)) * ALIGNED * ranks
            done += [_bucket([Span(variable=number, start=start,
                                   stop=min(facts.size, start + length))], *kind, ranks)
                     for start in range(0, facts.size, length)]
        elif facts.size:
            if sum(map(len, kinds.get(kind, []))) + facts.size > most:
                done.append(_bucket(kinds.pop(kind), *kind, ranks))
            kinds.setdefault(kind, []).append(Span(variable=number, start=0, stop=facts.size))
    return (*done, *(_bucket(spans, *kind, ranks) for kind, spans in kinds.items()))


def _bucket(spans: Sequence[Span], dtype: str, decays: bool, ranks: int) -> Bucket:
    part = -(-sum(map(len, spans)) // ranks)
    owned: list[list[Span]] = [[] for _ in range(ranks)]
    position = 0
    for span in spans:
        end = position + len(span)
        for rank in range(position // part, -(-end // part)):
            start, stop = max(position, rank * part), min(end, (rank + 1) * part)
            owned[rank].append(Span(variable=span.variable, start=span.start + start - position,
                                    stop=span.start + stop - position))
        position = end
    return Bucket(owned=tuple(map(tuple, owned)), part=part, dtype=dtype, decays=decays)


def plan_owners(variables: Sequence[VariableFacts], *, ranks: int) -> tuple[Bucket, ...]:
    """Give each whole variable to one rank: the largest first, to the least loaded rank."""
    # For optimizers that use all elements of a variable together. A bucket for each dtype.
    loads = [0] * ranks
    owners = [0] * len(variables)
    for number in sorted(range(len(variables)), key=lambda i: (-variables[i].size, i)):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += variables[number].size
    buckets = []
    for dtype in sorted({facts.dtype for facts in variables}):
        owned = tuple(tuple(
            Span(variable=number, start=0, stop=facts.size)
            for number, facts in enumerate(variables)
            if facts.dtype == dtype and owners[number] == rank) for rank in range(ranks))
        part = max(sum(map(len, spans)) for spans in owned)
        buckets.append(Bucket(owned=owned, part=part, dtype=dtype))
    return tuple(buckets)


class Parts:
    """What one rank works on: `parameters`, for which the Keras optimizer is built.

    They are one variable for each part of this rank: that of a bucket, or one `whole` variable,
    with `plan_owners`. A step calls `scatter` (gradients), `refresh` (parameters), the optimizer,
    `publish` and `release` (memory).
    """

    def __init__(self, variables: Sequence[Any], buckets: Sequence[Bucket],
                 collective: Collective, *, whole: bool) -> None:
        self.whole = whole
        self._variables = list(variables)
        self._sizes = [prod(v.shape) for v in variables]
        self._buckets = list(buckets)
        self._collective = collective
        self._nothing = tf.Variable(0, dtype=tf.int32, trainable=False, name="hvdtrain_nothing")
        self.parameters = [self._variables[span.variable]
                           for spans in self.spans(collective.rank) for span in spans
                           ] if whole else [
            keras.Variable(np.zeros(bucket.part, bucket.dtype), dtype=bucket.dtype,
                           trainable=False, name=f"hvdtrain_part_{number}")
            for number, bucket in enumerate(buckets)]
        self.release()

    def spans(self, rank: int) -> list[tuple[Span, ...]]:
        """The spans of each part of a rank."""
        owned = [bucket.owned[rank] for bucket in self._buckets]
        return [(span,) for spans in owned for span in spans] if self.whole else owned

    def shape(self, variable: int) -> tuple[int, ...]:
        """The shape of a variable of the model, by its index."""
        return tuple(self._variables[variable].shape)

    def scatter(self, gradients: Sequence[Any], name: str) -> list[Any]:
        """The averaged gradients of `parameters`, one collective for each bucket. All ranks."""
        out = []
        for number, bucket in enumerate(self._buckets):
            part = self._collective.reduce_scatter(
                [self._vector(gradients, bucket.layout(), bucket.dtype)],
                name=f"{name}.s{number}", op="average")[0]
            part.set_shape([bucket.part])
            out += [part] if not self.whole else [
                tf.reshape(piece, self.shape(span.variable))
                for span, piece in pieces_of(part, bucket.owned[self._collective.rank])]
        return out

    def _own(self, bucket: Bucket) -> Any:
        return self._vector(self._variables, bucket.pieces(self._collective.rank), bucket.dtype)

    def _vector(self, tensors: Sequence[Any], pieces: Sequence[tuple[Span | None, int]],
                dtype: str) -> Any:
        """Pieces of variables, or of their gradients, one after the other."""
        found = [tf.zeros([0], dtype)] if not pieces else []
        for span, length in pieces:
            if span is None:
                found.append(tf.zeros([length], dtype))
                continue
            size = self._sizes[span.variable]
            vector = tf.reshape(tf.convert_to_tensor(tensors[span.variable]), [size])
            found.append(vector if length == size else vector[span.start:span.stop])
        return tf.concat(found, 0)

    def refresh(self) -> None:
        """Set `parameters` from the model's variables."""
        if not self.whole:
            for parameter, bucket in zip(self.parameters, self._buckets, strict=True):
                _put(parameter, self._own(bucket))

    def publish(self, name: str) -> Any:
        """Set the model's variables from the parameters of all ranks. All ranks."""
        pieces: dict[int, list[tuple[int, Any]]] = {}
        for number, bucket in enumerate(self._buckets):
            mine = self._own(bucket) if self.whole else tf.convert_to_tensor(
                self.parameters[number])
            vector = self._collective.allgather(mine, name=f"{name}.p{number}")
            vector.set_shape([bucket.part * self._collective.size])
            layout = bucket.layout()
            cut = tf.split(vector, [length for _, length in layout]) if len(layout) > 1 else [
                vector]
            for (span, _), piece in zip(layout, cut, strict=True):
                if span is not None:
                    pieces.setdefault(span.variable, []).append((span.start, piece))
        mine = {id(parameter) for parameter in self.parameters}
        for number, found in pieces.items():
            variable = self._variables[number]
            if id(variable) not in mine:
                ordered = [piece for _, piece in sorted(found, key=lambda entry: entry[0])]
                variable.assign(tf.reshape(tf.concat(ordered, 0), variable.shape))
        return tf.no_op()

    def release(self) -> None:
        """Free memory until the next step: the model's variables hold the same."""
        for parameter in [] if self.whole else self.parameters:
            length = tf.reshape(self._nothing.read_value(), [1])
            _put(parameter, tf.zeros(length, parameter.value.dtype))

    def squared_norms(self, gradients: Sequence[Any]) -> Any:
        """This rank's share of the squared norm of each variable's gradient, float64."""
        norms = [tf.zeros([], tf.float64) for _ in self._variables]
        for gradient, spans in zip(gradients, self.spans(self._collective.rank), strict=True):
            for span, piece in pieces_of(tf.reshape(gradient, [-1]), spans):
                norms[span.variable] += tf.cast(tf.reduce_sum(tf.square(piece)), tf.float64)
        return tf.stack(norms)

    def scaled(self, gradients: Sequence[Any], factors: Any) -> list[Any]:
        """Parts of gradients times their variable's factor; padding stays zero."""
        out = []
        for gradient, spans in zip(gradients, self.spans(self._collective.rank), strict=True):
            factor = tf.gather(tf.cast(factors, gradient.dtype),
                               [span.variable for span in spans] or [0])
            if len(spans) > 1:
                lengths = [*map(len, spans)]
                lengths[-1] += int(gradient.shape[0]) - sum(lengths)
                factor = tf.repeat(factor, lengths)
            out.append(gradient * (factor if len(spans) > 1 else factor[0]))
        return out


def _put(parameter: Any, value: Any) -> None:
    tf.raw_ops.AssignVariableOp(
        resource=parameter.value.handle, value=value, validate_shape=False)


class StateExchange:
    """Moves the state of one optimizer, which was built for this rank's parts, between ranks.

    `loaded`: the values of a plain optimizer that were loaded, until they are shared or a step is
    made.
    """

    def __init__(self, collective: Collective, leaf: Any, parts: Parts,
                 structure: Structure) -> None:
        self._collective = collective
        self._leaf = leaf
        self._parts = parts
        self._structure = structure
        self._entry = {slot: k for k, slot in enumerate(structure) if slot is not None}
        self._gathered: dict[Slot, list[tuple[int, Array]]] | None = None
        self.loaded: Sequence[Array] | None = None

    @property
    def count(self) -> int:
        """How many variables a plain optimizer would have."""
        return len(self._structure)

    def slots(self) -> list[tuple[str, tuple[Span, ...], Any]]:
        """The variables of this rank that hold parts of state: kind, spans, variable."""
        spans = self._parts.spans(self._collective.rank)
        found = keras_seam.slots(self._leaf, len(spans))
        return [(kind, where, slot) for kind in sorted(found)
                for where, slot in zip(spans, found[kind], strict=True) if slot is not None]

    def _undivided(self) -> list[Any]:
        divided = {id(slot) for _, _, slot in self.slots()}
        return [v for v in self._leaf.variables if id(v) not in divided]

    def _everyone(self) -> list[list[tuple[str, tuple[Span, ...], Described]]]:
        """The slots of each rank, with their shapes and dtypes. All ranks."""
        return self._collective.gather_objects(
            [(kind, where, described(slot)) for kind, where, slot in self.slots()])

    def gather(self, *, keeps: bool | None = None) -> None:
        """Collect the state of all ranks until `forget`, where `keeps`. All ranks.

        None: on the chief, which then need not send its own.
        """
        rank, mine = self._collective.rank, [slot for _, _, slot in self.slots()]
        here = rank == 0 if keeps is None else keeps
        found: dict[Slot, list[tuple[int, Array]]] = defaultdict(list)
        for root, theirs in enumerate(self._everyone()):
            own = [np.asarray(slot.numpy()) for slot in mine] if root == rank else []
            arrays: Iterable[Array] = own if root == 0 and keeps is None else list(send_arrays(
                self._collective, [form for _, _, form in theirs], own.__getitem__, root=root,
                keep=here))
            for (kind, where, _), array in zip(theirs, arrays if here else (), strict=False):
                pieces = [(where[0], array)] if self._parts.whole else pieces_of(array, where)
                for span, piece in pieces:
                    found[kind, span.variable].append((span.start, piece))
        self._gathered = found if here else None

    def forget(self) -> None:
        """Free what `gather` has collected."""
        self._gathered = None

    def values(self) -> Iterator[Array]:
        """The variables of a plain optimizer, in order. Where `gather` has kept them."""
        if self._gathered is None:
            raise OptimizerError(
                f"The state of the optimizer `{self._leaf.name}` is divided over "
                f"{self._collective.size} ranks (zero), so one rank alone cannot save it. Save "
                "on the chief within `with hvdtrain.consolidated(model.optimizer):`, which all "
                "ranks enter, as fit does for its own checkpoints. Keras' callbacks "
                "ModelCheckpoint and BackupAndRestore do not.")
        found = self._gathered
        own = iter([np.asarray(v.numpy()) for v in self._undivided()])
        return (next(own) if slot is None else self._whole(slot, found.get(slot, []))
                for slot in self._structure)

    def _whole(self, slot: Slot, pieces: list[tuple[int, Array]]) -> Array:
        shape = self._parts.shape(slot[1])
        ordered = [piece for _, piece in sorted(pieces, key=lambda entry: entry[0])]
        if self._parts.whole and ordered:
            return ordered[0]
        return np.concatenate(ordered).reshape(shape) if ordered else np.zeros(shape, "f4")

    def take(self, values: Sequence[Array]) -> None:
        """Take this rank's part of the values of a plain optimizer."""
        for kind, where, slot in self.slots():
            slot.assign(self._part(kind, where, values, np.asarray(slot.numpy())))
        own = [values[k] for k, slot in enumerate(self._structure) if slot is None]
        for variable, value in zip(self._undivided(), own, strict=True):
            variable.assign(value)

    def share_loaded(self) -> None:
        """Give each rank its part of the values that the chief has loaded, if any. All ranks."""
        values, self.loaded = self.loaded, None
        if not self._collective.gather_objects(values is not None)[0]:
            return
        for rank, theirs in enumerate(self._everyone()):
            if rank == 0:
                continue  # the chief has taken its part when it loaded

            def part(i: int, theirs: Any = theirs) -> Array:
                kind, where, form = theirs[i]
                return self._part(kind, where, values or (), np.zeros(*form))
            received = send_arrays(self._collective, [form for _, _, form in theirs],
                                   part, root=0, keep=rank == self._collective.rank)
            for array, (_, where, slot) in zip(received, self.slots(), strict=False):
                value = np.asarray(slot.numpy()).copy()
                count = value.size if self._parts.whole else sum(map(len, where))
                value.reshape(-1)[:count] = array.reshape(-1)[:count]
                slot.assign(value)

    def _part(self, kind: str, spans: tuple[Span, ...], values: Sequence[Array],
              old: Array) -> Array:
        """One slot of one part, cut from the values of a plain optimizer; `old` where padded."""
        if self._parts.whole:
            return values[self._entry[kind, spans[0].variable]].reshape(old.shape)
        cut = old.copy()
        for span, piece in pieces_of(cut, spans):
            value = values[self._entry[kind, span.variable]]
            piece[:] = value.reshape(-1)[span.start:span.stop]
        return cut

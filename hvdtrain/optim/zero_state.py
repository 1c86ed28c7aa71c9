"""The optimizer's state as a plain optimizer would hold it, and the parts that ranks hold of it.

A Keras optimizer saves its variables as a list. A `Structure` is that list for a whole model:
for each entry the slot of a variable that it is, or None where it belongs to no variable
(iterations, learning rate). Values of it are arrays in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.base import Collective
from hvdtrain.optim import keras_seam
from hvdtrain.optim.zero_layout import Span
from hvdtrain.optim.zero_parts import Parts

Array = np.ndarray[Any, Any]
Spans = tuple[Span, ...]
CHUNK_BYTES = 1 << 26
"""While state moves, a rank that does not keep it has so much of it in memory."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A variable of a plain optimizer that belongs to a variable of the model."""

    kind: str
    """The optimizer's attribute, a list with one entry per variable."""
    variable: int
    """Number of the variable in the order of building."""


Structure = list[Slot | None]
_Described = dict[str, list[tuple[tuple[int, ...], str] | None]]


def structure_of(leaf: Any, build: Callable[[list[Any]], None],
                 variables: Sequence[Any]) -> Structure:
    """What a plain optimizer like `leaf`, which is not built, would hold for `variables`.

    It is built for stand-ins without elements, which take no memory, and unbuilt again.
    """
    build([_stand_in(v) for v in variables])
    found = read_structure(leaf, len(variables))
    keras_seam.unbuild(leaf)
    return found


def read_structure(leaf: Any, count: int) -> Structure:
    """The structure of an optimizer that was built for `count` variables."""
    where = {id(slot): Slot(kind=kind, variable=number)
             for kind, slots in keras_seam.slots(leaf, count).items()
             for number, slot in enumerate(slots) if slot is not None}
    return [where.get(id(variable)) for variable in leaf.variables]


def _stand_in(variable: Any) -> Any:
    """A variable without elements, of the same name, path, dtype and number of axes."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    made = keras.Variable(np.zeros((0,) * len(variable.shape), dtype), dtype=dtype,
                          name=variable.name, trainable=False)
    made._path = variable.path
    return made


class StateExchange:
    """Moves the state of one optimizer between the ranks.

    Args:
        collective: The collective to use.
        leaf: A Keras optimizer that was built for the parts of this rank.
        parts: What each rank works on.
        structure: What a plain optimizer holds.
    """

    def __init__(self, collective: Collective, leaf: Any, parts: Parts,
                 structure: Structure) -> None:
        self._collective = collective
        self._leaf = leaf
        self._parts = parts
        self._structure = structure
        self._entry = {slot: k for k, slot in enumerate(structure) if slot is not None}

    @property
    def slots(self) -> dict[str, list[Any]]:
        """The slots of this rank: for each kind a variable (or None) per part."""
        return keras_seam.slots(self._leaf, len(self._parts.parameters))

    @property
    def own(self) -> list[Any]:
        """The optimizer's variables that are equal on all ranks, in order."""
        divided = {id(slot) for slots in self.slots.values() for slot in slots}
        return [v for v in self._leaf.variables if id(v) not in divided]

    def gather(self) -> Gathered | None:
        """Bring the state of all ranks to the chief. All ranks; None on the others."""
        is_chief = self._collective.rank == 0
        mine = {kind: [None if s is None else np.asarray(s.numpy()) for s in slots]
                for kind, slots in self.slots.items()}
        held: list[dict[str, list[Array | None]]] = []
        for rank, described in enumerate(self._described()):
            held.append({})
            if rank == 0:
                held[0] = mine if is_chief else {}
                continue
            for kind in sorted(described):
                there = [d for d in described[kind] if d is not None]
                arrays = [a for a in mine[kind] if a is not None] if (
                    rank == self._collective.rank) else None
                got = iter(exchange(self._collective, arrays, there, root=rank, keep=is_chief))
                if is_chief:
                    held[rank][kind] = [None if d is None else next(got)
                                        for d in described[kind]]
        if not is_chief:
            return None
        return Gathered(structure=self._structure, own=[np.asarray(v.numpy()) for v in self.own],
                        held=held, parts=self._parts)

    def load(self, values: Sequence[Array]) -> None:
        """Take this rank's part of the values of a plain optimizer."""
        spans = self._parts.spans(self._collective.rank)
        for kind, slots in self.slots.items():
            for slot, where in zip(slots, spans, strict=True):
                if slot is not None:
                    slot.assign(self._part(kind, where, values, np.asarray(slot.numpy())))
        own = [values[k] for k, slot in enumerate(self._structure) if slot is None]
        for variable, value in zip(self.own, own, strict=True):
            variable.assign(value)

    def share(self, values: Sequence[Array] | None) -> None:
        """Give each rank its part of the values that the chief has loaded. All ranks."""
        for rank, described in enumerate(self._described()):
            if rank == 0:
                continue  # the chief has taken its part when it loaded
            spans = self._parts.spans(rank)
            for kind in sorted(described):
                there = [(d, s) for d, s in zip(described[kind], spans, strict=True)
                         if d is not None]
                arrays = None if values is None else [
                    self._part(kind, s, values, np.zeros(*d)) for d, s in there]
                mine = rank == self._collective.rank
                got = exchange(self._collective, arrays, [d for d, _ in there], root=0,
                               keep=mine)
                if mine:
                    self._take(kind, got)

    def _take(self, kind: str, arrays: list[Array]) -> None:
        slots = [s for s in self.slots[kind] if s is not None]
        spans = [where for where, s in zip(self._parts.spans(self._collective.rank),
                                           self.slots[kind], strict=True) if s is not None]
        for slot, where, array in zip(slots, spans, arrays, strict=True):
            value = np.asarray(slot.numpy()).copy()
            count = value.size if self._parts.whole else sum(map(len, where))
            value.reshape(-1)[:count] = array.reshape(-1)[:count]
            slot.assign(value)

    def _part(self, kind: str, spans: Spans, values: Sequence[Array], old: Array) -> Array:
        """One slot of one part, cut from the values of a plain optimizer; `old` where padded."""
        if self._parts.whole:
            entry = self._entry[Slot(kind=kind, variable=spans[0].variable)]
            return values[entry].reshape(old.shape)
        cut, position = old.copy(), 0
        for span in spans:
            value = values[self._entry[Slot(kind=kind, variable=span.variable)]]
            cut[position:position + len(span)] = value.reshape(-1)[span.start:span.stop]
            position += len(span)
        return cut

    def _described(self) -> list[_Described]:
        """Shapes and dtypes of the slots of each rank. All ranks."""
        mine = {kind: [None if s is None else (
            tuple(s.shape), keras.backend.standardize_dtype(s.dtype)) for s in slots]
            for kind, slots in self.slots.items()}
        return self._collective.gather_objects(mine)


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The state of all ranks, on the chief; put together one array at a time."""

    structure: Structure
    own: list[Array]
    held: list[dict[str, list[Array | None]]]
    """For each rank and kind an array per part."""
    parts: Parts

    def values(self) -> Iterator[Array]:
        """The variables of a plain optimizer, in order."""
        own = iter(self.own)
        where: dict[int, list[tuple[int, int, int, Span]]] = {}
        for rank in range(len(self.held)):
            for number, spans in enumerate(self.parts.spans(rank)):
                position = 0
                for span in spans:
                    where.setdefault(span.variable, []).append((rank, number, position, span))
                    position += len(span)
        for slot in self.structure:
            yield next(own) if slot is None else self._whole(slot, where.get(slot.variable, []))

    def _whole(self, slot: Slot, pieces: list[tuple[int, int, int, Span]]) -> Array:
        found: list[tuple[int, Array]] = []
        for rank, number, position, span in pieces:
            array = self.held[rank][slot.kind][number]
            if array is None:
                continue
            if self.parts.whole:
                return array
            found.append((span.start, array[position:position + len(span)]))
        shape = self.parts.shape(slot.variable)
        ordered = [array for _, array in sorted(found, key=lambda entry: entry[0])]
        return np.concatenate(ordered).reshape(shape) if ordered else np.zeros(shape, "f4")


def exchange(collective: Collective, arrays: Sequence[Array] | None,
             described: Sequence[tuple[tuple[int, ...], str]], *, root: int,
             keep: bool) -> list[Array]:
    """Send arrays of rank `root` to other ranks that keep them. All ranks.

    Args:
        collective: The collective to use.
        arrays: Sequence of arrays; on rank `root` only.
        described: Their shapes and dtypes, on all ranks.
        root: Integer, the rank that has them.
        keep: Boolean, whether this rank wants them; it is not `root`.

    Returns:
        The arrays where `keep`, else an empty list.
    """
    mine = collective.rank == root
    sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in described]
    total = sum(sizes)
    flat = np.concatenate([np.empty(0, np.uint8), *(
        np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays or [])])
    kept = np.empty(total if keep else 0, np.uint8)
    for begin in range(0, total, CHUNK_BYTES):
        end = min(total, begin + CHUNK_BYTES)
        chunk = flat[begin:end] if mine else np.empty(end - begin, np.uint8)
        received = collective.broadcast_array(chunk, root=root)
        if keep:
            kept[begin:end] = received
    if not keep:
        return []
    ends = np.cumsum(sizes, dtype=int)
    return [kept[end - size:end].view(dtype).reshape(shape)
            for end, size, (shape, dtype) in zip(ends, sizes, described, strict=True)]

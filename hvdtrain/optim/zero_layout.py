"""Which rank holds which part of the optimizer's state. Pure; equal on all ranks.

Two ways. `plan_buckets` is for optimizers that treat each element alike: variables lie one after
the other in buckets, and each rank has the same share of every bucket, wherever that cuts a
variable. `choose_owners` is for the others: each variable belongs to one rank as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALONE_BYTES = 1 << 20
"""A variable of at least so many bytes has a bucket of its own, which saves copying it."""
ALIGNED = 64
"""Large variables are cut at multiples of so many elements per rank: TensorFlow then cuts
without copying."""


@dataclass(frozen=True, kw_only=True)
class VariableFacts:
    """What the layout depends on."""

    size: int
    """Elements."""
    dtype: str
    item_bytes: int
    decays: bool
    """Weight decay applies to it."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Elements `start` to `stop` of one variable, as it lies in memory."""

    variable: int
    """Number of the variable in the order of building."""
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A vector made of variables, of which each rank holds one part."""

    spans: tuple[Span, ...]
    dtype: str
    decays: bool
    ranks: int

    @property
    def part(self) -> int:
        """Elements of the part of one rank."""
        return -(-sum(map(len, self.spans)) // self.ranks)

    @property
    def padding(self) -> int:
        """Elements at the end that belong to no variable."""
        return self.part * self.ranks - sum(map(len, self.spans))

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        """What the part of a rank consists of, in order; padding comes after it."""
        begin, end = rank * self.part, (rank + 1) * self.part
        found, position = [], 0
        for span in self.spans:
            start, stop = max(begin, position), min(end, position + len(span))
            if start < stop:
                found.append(Span(variable=span.variable, start=span.start + start - position,
                                  stop=span.start + stop - position))
            position += len(span)
        return tuple(found)

    def padding_of(self, rank: int) -> int:
        """Elements at the end of the part of a rank that belong to no variable."""
        return self.part - sum(map(len, self.spans_of(rank)))


def plan_buckets(variables: Sequence[VariableFacts], *, ranks: int,
                 bucket_bytes: int) -> tuple[Bucket, ...]:
    """Divide variables into buckets, those with the last gradients of the forward pass first.

    Args:
        variables: Sequence, in the order of building.
        ranks: Integer.
        bucket_bytes: Integer, about the most that a bucket holds.
    """
    done: list[Bucket] = []
    kinds: dict[tuple[str, bool], list[Span]] = {}

    def close(kind: tuple[str, bool]) -> None:
        spans = kinds.pop(kind, [])
        if spans:
            done.append(Bucket(spans=tuple(spans), dtype=kind[0], decays=kind[1], ranks=ranks))

    for number in reversed(range(len(variables))):
        facts = variables[number]
        kind = (facts.dtype, facts.decays)
        most = max(1, bucket_bytes // facts.item_bytes)
        if facts.size * facts.item_bytes >= ALONE_BYTES or facts.size >= most:
            done.extend(Bucket(spans=(span,), dtype=kind[0], decays=kind[1], ranks=ranks)
                        for span in _cut(number, facts.size, most, ranks))
            continue
        if facts.size == 0:
            continue
        if sum(map(len, kinds.get(kind, []))) + facts.size > most:
            close(kind)
        kinds.setdefault(kind, []).append(Span(variable=number, start=0, stop=facts.size))
    for kind in list(kinds):
        close(kind)
    return tuple(done)


def _cut(number: int, size: int, most: int, ranks: int) -> Iterator[Span]:
    """One variable in pieces of at most `most` elements, rounded up to what is aligned."""
    grain = ALIGNED * ranks
    length = -(-most // grain) * grain
    for start in range(0, size, length):
        yield Span(variable=number, start=start, stop=min(size, start + length))


def choose_owners(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """For each variable the rank that holds its state: largest first, to the least loaded."""
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = min(range(ranks), key=lambda r: (loads[r], r))
        owners[number] = owner
        loads[owner] += sizes[number]
    return tuple(owners)

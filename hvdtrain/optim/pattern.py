"""Which gradients a rank has, and the refusal of ranks that have others.

A collective in which one rank takes no part makes the others wait for ever. So the ranks tell
each other what they are about to reduce, once for each set of gradients, while the step is
traced. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.collectives.plain import carried
from hvdtrain.errors import OptimizerError


@carried
@dataclass(frozen=True, kw_only=True)
class GradientKind:
    """The gradient of one variable. Names may differ between ranks, and so may `ids`."""

    index: int
    """Of the variable, in the order in which the optimizer was built."""
    name: str = field(compare=False)
    form: Literal["dense", "sparse"]
    dtype: str
    shape: tuple[int | None, ...]
    """Of the variable."""
    ids: int | None = field(compare=False, default=None)
    """Rows in a sparse gradient, repetitions included; None where they are not known yet."""

    def __str__(self) -> str:
        shape = " x ".join("?" if n is None else f"{n:,}" for n in self.shape) or "scalar"
        return f"a {self.form} {self.dtype} gradient ({shape})"


@carried
@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank is about to reduce."""

    reducer: str
    """The name of the optimizer's reducer."""
    options: str
    kinds: tuple[GradientKind, ...]


def refuse_differences(reports: Sequence[Report]) -> None:
    """Compare the reports of all ranks with that of rank 0.

    Raises:
        OptimizerError: Naming the first rank that differs, and the first variable.
    """
    first = reports[0]
    for rank, report in enumerate(reports):
        if report.reducer != first.reducer:
            raise OptimizerError(
                f"Rank {rank} applies gradients to another optimizer than rank 0: "
                f"`{report.reducer}` instead of `{first.reducer}`. Make and apply distributed "
                "optimizers in the same order on all ranks.")
        if report.options != first.options:
            raise OptimizerError(
                f"Rank {rank} was given other ReducerOptions than rank 0: {report.options}; rank 0 "
                f"has {first.options}. Give all ranks the same.")
        _refuse_other_gradients(rank, first.kinds, report.kinds)


def _refuse_other_gradients(rank: int, expected: Sequence[GradientKind],
                            found: Sequence[GradientKind]) -> None:
    theirs, mine = ({kind.index: kind for kind in kinds} for kinds in (expected, found))
    for index in sorted({*theirs, *mine}):
        a, b = theirs.get(index), mine.get(index)
        if a == b:
            continue
        name = next(kind.name for kind in (a, b) if kind is not None)
        raise OptimizerError(
            f"The ranks have different gradients: for variable {index} (`{name}`) rank 0 has "
            f"{a or 'none'}, rank {rank} has {b or 'none'}. They would wait for each other for "
            "ever. Every rank must compute gradients of the same variables in each step: where "
            "a variable is not used on a rank, give tf.zeros_like(variable) as its gradient.")

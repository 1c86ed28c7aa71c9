"""Sparse gradients (`tf.IndexedSlices`): which way they travel, and how rows are merged.

The way is decided from sizes that are known while the step is traced, from the reports of all
ranks, and never again: a batch may have another size on another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, prod
from typing import Any, Literal

import tensorflow as tf

from hvdtrain.optim.options import ReducerOptions
from hvdtrain.optim.pattern import GradientKind

INDEX_BYTES = 4
FEWER = 1.1
"""A gather must save so much: packing rows takes time, and it is two collectives instead of a
share in one."""
FEWER_ON_ONE_HOST = 2.5
"""As `FEWER`, where bytes do not cross a network (measured by benchmarks/embedding.py)."""
SAVED_ON_ONE_HOST_BYTES = 1 << 20
"""There a gather must also save so many bytes, for its second collective."""
SMALL_TABLE_BYTES = 1 << 16
"""A table of at most this size travels whole where the number of rows used is not known: an
allreduce of it takes about as long as one of nothing."""


@dataclass(frozen=True, kw_only=True)
class SparseChoice:
    """How the gradient of one table travels."""

    way: Literal["gather", "dense"]
    reason: str
    form: Literal["sparse", "dense"] = "dense"
    """What the optimizer gets."""


def expected_rows(ids: int, rows: int) -> float:
    """Distinct rows among `ids` drawn at random from a table of `rows`."""
    return rows * (1 - exp(-ids / rows)) if rows else 0.0


def choose(kinds: Sequence[GradientKind], options: ReducerOptions, *, value_bytes: float,
           dense_bytes: float, updates_rows: bool, one_host: bool = False) -> SparseChoice:
    """Decide how the gradient of one table travels. Pure: equal on all ranks.

    Bytes are those that one rank sends in a step: `(N - 1) * rows * row` for a gather, and
    `2 (N - 1) / N * table` for an allreduce. Rows that were gathered are made a dense gradient
    where the optimizer would do it itself, and more than once, or where they are half the table.

    Args:
        kinds: The reports of all ranks on this variable.
        options: `sparse` and `merge` count.
        value_bytes: Float, of one number of a gathered row.
        dense_bytes: Float, that a rank would send for the whole table.
        updates_rows: Boolean, the optimizer changes only the rows of a sparse gradient.
        one_host: Boolean, all ranks are on one host.
    """
    rows, *inner = (n or 0 for n in kinds[0].shape)
    row_bytes = prod(inner) * value_bytes + INDEX_BYTES
    known = [kind.ids for kind in kinds if kind.ids is not None]
    used = sum(expected_rows(ids, rows) for ids in known) / max(1, len(known))
    few = len(kinds) * used < rows / 2 or len(known) < len(kinds)
    form: Literal["sparse", "dense"] = "sparse" if updates_rows and few else "dense"
    if options.merge == "none":
        return SparseChoice(way="gather", reason="merge='none'", form="sparse")
    if options.op == "adasum":
        return SparseChoice(way="dense", reason="Adasum")
    if options.sparse != "auto":
        return SparseChoice(way=options.sparse, reason="asked for", form=form)
    if len(known) < len(kinds):
        small = rows * row_bytes <= SMALL_TABLE_BYTES
        return SparseChoice(
            way="dense" if small else "gather", form=form,
            reason=f"rows per step not known, table of {_bytes(rows * row_bytes)}")
    gather_bytes = (len(kinds) - 1) * used * row_bytes
    pays = FEWER * gather_bytes < dense_bytes
    if one_host:
        pays = (FEWER_ON_ONE_HOST * gather_bytes < dense_bytes
                and dense_bytes - gather_bytes > SAVED_ON_ONE_HOST_BYTES)
    return SparseChoice(
        way="gather" if pays else "dense", form=form,
        reason=f"about {_bytes(gather_bytes)} to send per step for the rows used, "
               f"{_bytes(dense_bytes)} for the table{', within one host' if one_host else ''}")


def _bytes(number: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def static_ids(gradient: Any) -> int | None:
    """Rows in a sparse gradient, where they are known while the step is traced."""
    found: int | None = gradient.indices.shape[0]
    return gradient.values.shape[0] if found is None else found


def merge_rows(gradient: Any) -> Any:
    """Sum the rows that occur more than once.

    Adaptive optimizers and clipping of Keras 3 treat each occurrence as a gradient of its own,
    which differs from the dense gradient (by up to 2e-1 after four steps of RMSprop).
    """
    rows, position = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, position, tf.shape(rows)[0])
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def densify(gradient: Any, rows: int) -> Any:
    """The dense gradient of a table of `rows` rows."""
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)

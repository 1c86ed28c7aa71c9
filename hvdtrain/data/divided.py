"""Late division only: replaced by the real one."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.data.part import Part


@dataclass(frozen=True, kw_only=True)
class Divided:
    dataset: Any
    weighted: bool
    global_batch: int | None
    last_batch: int | None
    steps: int | None
    early: bool
    why: str
    source: Any
    cut: Any

    def skip(self, steps: Any) -> Any:
        return self.source.skip(steps).map(self.cut)


def divided(dataset: Any, part: Part, *, batches_per_step: int = 1,
            before_decoding: bool = True) -> Divided:
    if batches_per_step > 1:
        dataset = dataset.unbatch().batch(32 * batches_per_step)
    weighted = part.size > 1 and part.remainder == "join"

    def cut(*batch: Any) -> Any:
        b = batch[0] if len(batch) == 1 else batch
        n = tf.shape(tf.nest.flatten(b)[0], tf.int64)[0]
        rows = part.rows(n)
        mine = tf.nest.map_structure(lambda t: tf.gather(t, rows), b)
        return (part.weight(n), mine) if weighted else mine
    steps = int(dataset.cardinality())
    return Divided(dataset=dataset.map(cut), weighted=weighted, global_batch=None, last_batch=None,
                   steps=steps if steps >= 0 else None, early=False, why="late", source=dataset, cut=cut)

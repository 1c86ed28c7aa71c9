"""Loops with an optimizer that is not distributed: a gradient tape that averages over ranks.

    with hvdtrain.DistributedGradientTape() as tape:
        loss = ...
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

`DistributedOptimizer` and this exclude each other: gradients would be averaged twice. The
optimizer reduces once per applied update, also with accumulation and loss scaling; the tape
reduces at each call of `gradient`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.collectives.current import current
from hvdtrain.optim import state
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.optim.provenance import note_reduced
from hvdtrain.optim.reducer import GradientReducer

# A tape is made anew in each step, but names, what the ranks agreed on and residuals stay.
_reducers: weakref.WeakKeyDictionary[Collective, dict[ReducerOptions, GradientReducer]] = (
    weakref.WeakKeyDictionary())


class DistributedGradientTape:
    """A `tf.GradientTape` whose gradients are averaged over all ranks.

    All ranks must take gradients of the same sources in the same order. All else (`watch`,
    `stop_recording`, ...) is that of the tape.

    Args:
        tape: A `tf.GradientTape`, recorded already or not; defaults to a new one.
        collective: The collective to use; defaults to that of `hvdtrain.init()`.
        options: How to reduce; defaults to `ReducerOptions()`.
    """

    def __init__(self, tape: Any = None, *, collective: Collective | None = None,
                 options: ReducerOptions | None = None) -> None:
        self._tape = tf.GradientTape() if tape is None else tape
        self._reducer = _reducer_of(collective or current(), options or ReducerOptions())

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As `tf.GradientTape.gradient`, averaged over all ranks. All ranks must call it.

        Args:
            target: As there.
            sources: As there; variables, in the same order on all ranks.
            *args: As there.
            **kwargs: As there.

        Returns:
            The same structure as `sources`: tensors, `tf.IndexedSlices` or None.

        Raises:
            OptimizerError: The ranks have different gradients.
        """
        gradients = tf.nest.flatten(self._tape.gradient(target, sources, *args, **kwargs))
        variables = tf.nest.flatten(sources)
        reduced = self._reducer(gradients, variables, range(len(variables)))
        note_reduced(reduced)
        return tf.nest.pack_sequence_as(sources, reduced)


def _reducer_of(collective: Collective, options: ReducerOptions) -> GradientReducer:
    known = _reducers.setdefault(collective, {})
    if options not in known:
        known[options] = GradientReducer(collective, f"hvdtrain.tape{len(known)}", options)
    return known[options]


def broadcast_variables(variables: Sequence[Any], *, root: int = 0,
                        collective: Collective | None = None) -> int:
    """Copy the values of rank `root` to all ranks. All ranks must call it.

    Args:
        variables: Sequence of Keras or TensorFlow variables, in the same order on all ranks.
        root: Integer, the rank whose values are copied.
        collective: The collective to use; defaults to that of `hvdtrain.init()`.

    Returns:
        The number of bytes sent.

    Raises:
        TrainingError: The ranks hold different structures; the first difference is named.
    """
    return state.broadcast(collective or current(), variables, root=root)

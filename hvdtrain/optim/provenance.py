"""Were gradients changed between the tape and the optimizer? Told while a step is traced.

A distributed optimizer averages what it is given. What is linear in the gradients may be done
before (a factor, a sum); clipping may not: each rank would clip its own, and N ranks would train
another model than one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.errors import OptimizerError
from hvdtrain.optim import keras_seam

_LINEAR = frozenset({
    "Identity", "IdentityN", "Cast", "Reshape", "Neg", "Transpose", "Squeeze", "ExpandDims", "Pack",
    "Unpack", "Split", "SplitV", "ConcatV2", "Slice", "StridedSlice", "Add", "AddV2", "AddN", "Sub",
    "Sum", "Mean", "GatherV2", "UnsortedSegmentSum", "StopGradient", "PreventGradient",
    "CheckNumerics", "EnsureShape", "Fill", "BroadcastTo", "Tile", "ZerosLike", "Shape"})
_PRODUCTS = frozenset({"Mul", "MatMul", "BatchMatMulV2", "Einsum"})
_QUOTIENTS = frozenset({"RealDiv", "Div", "DivNoNan"})
Key = tuple[int, str]
_watching: list[Tapes] = []


class Tapes:
    """What tapes give while one step is traced."""

    def __init__(self) -> None:
        self._own: set[Key] = set()
        self._reduced: set[Key] = set()
        self._kept: list[Any] = []
        self._known: dict[Key, str | None] = {}

    def add(self, gradients: Any, *, reduced: bool) -> None:
        """Remember gradients: of this rank, or `reduced` over all ranks."""
        for tensor in map(_tensor_of, tf.nest.flatten(gradients)):
            if tensor is not None:
                self._kept.append(tensor)
                (self._reduced if reduced else self._own).add(_key(tensor))

    def changed_by(self, gradient: Any) -> str | None:
        """The operation that changed a gradient of a tape in a way that is not linear, or None."""
        result = self._state(_tensor_of(gradient))
        return None if result in (None, "") else result

    def _state(self, tensor: Any) -> str | None:
        """None: it does not depend on a rank's own gradients; "": linearly; else an operation."""
        left = [tensor]
        while left:
            here = left[-1]
            if _key(here) in self._known:
                left.pop()
                continue
            operation = None if _key(here) in (self._own | self._reduced) else _operation(here)
            inputs = [] if operation is None else list(operation.inputs)
            waiting = [i for i in inputs if _key(i) not in self._known]
            if waiting:
                left += waiting
                continue
            self._kept.append(here)
            self._known[_key(here)] = self._of(here, operation, inputs)
            left.pop()
        return self._known[_key(tensor)]

    def _of(self, tensor: Any, operation: Any, inputs: Sequence[Any]) -> str | None:
        if _key(tensor) in self._reduced:
            return None
        if _key(tensor) in self._own:
            return ""
        states = [self._known[_key(i)] for i in inputs]
        depending = [state for state in states if state is not None]
        if not depending:
            return None
        changed = next((state for state in depending if state), None)
        kind = operation.type
        linear = kind in _LINEAR or (kind in _PRODUCTS and len(depending) == 1) or (
            kind in _QUOTIENTS and len(depending) == 1 and states[0] is not None)
        return changed or ("" if linear else kind)


@contextmanager
def tapes_watched() -> Iterator[None]:
    """While a step is traced: remember what tapes give."""
    tapes, original = Tapes(), tf.GradientTape.gradient

    def gradient(tape: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tape, *args, **kwargs)
        tapes.add(result, reduced=False)
        return result
    tf.GradientTape.gradient = gradient
    _watching.append(tapes)
    try:
        yield
    finally:
        _watching.pop()
        tf.GradientTape.gradient = original


def note_reduced(gradients: Any) -> None:
    """These are of all ranks: whatever is done with them is done alike everywhere."""
    if _watching:
        _watching[-1].add(gradients, reduced=True)


def refuse_changed(optimizer: Any, gradients: Sequence[Any], variables: Callable[[], Any]) -> None:
    """Refuse gradients that a step has changed before it gives them to a distributed optimizer.

    Raises:
        OptimizerError: Naming the variable and the operation.
    """
    if not _watching or tf.executing_eagerly():
        return
    for position, gradient in enumerate(gradients):
        operation = None if gradient is None else _watching[-1].changed_by(gradient)
        if operation is not None:
            path = keras_seam.variable_path(list(variables())[position])
            raise OptimizerError(
                f"The train_step changes the gradient of `{path}` (operation {operation}) before "
                f"it gives it to the distributed optimizer `{optimizer.name}`: each rank would "
                "change its own, and the result would depend on the number of ranks. Let the "
                "optimizer clip, which it does with the mean of all ranks (clipnorm, clipvalue, "
                "global_clipnorm); or take the gradients with "
                "hvdtrain.DistributedGradientTape, which gives the mean of all ranks.")


def _tensor_of(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _key(tensor: Any) -> Key:
    """What tells a tensor apart: of a graph by its name, another one by itself."""
    return (id(tensor.graph), tensor.name) if _operation(tensor) is not None else (id(tensor), "")


def _operation(tensor: Any) -> Any:
    """What made a tensor of a graph; None for one that exists already."""
    return None if not hasattr(tensor, "op") or hasattr(tensor, "numpy") else tensor.op

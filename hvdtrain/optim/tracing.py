"""Checks while a training step is traced: names of calls, XLA, and changed gradients.

Gradients may be changed linearly before they are averaged (a factor, a sum), but not clipped: each
rank would clip its own, and N ranks would train another model than one process.
"""

from __future__ import annotations

import weakref
from collections import Counter
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
_Key = tuple[int, str]
_watching: list[_Tapes] = []


class CallNames:
    """Names that are equal on all ranks and unique among the calls of one traced step.

    `base` is unique to the caller. They contain no layer's name: with one layer more on one rank
    the stock names would hang.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._calls: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()

    def next(self, kind: str = "") -> str:
        """The name of one more call; calls of each kind are counted separately."""
        call = 0
        if not tf.executing_eagerly():
            # That of the outermost `tf.function` being traced: branches have their own.
            graph = tf.compat.v1.get_default_graph()
            while getattr(getattr(graph, "outer_graph", None), "building_function", False):
                graph = graph.outer_graph
            calls = self._calls.setdefault(graph, Counter())
            call = calls[kind]
            calls[kind] += 1
        return ".".join(filter(None, (self._base, kind, str(call))))


def inside_xla() -> bool:
    """Whether the graph being traced will be compiled by XLA as a whole."""
    if tf.executing_eagerly():
        return False
    from tensorflow.python.ops import control_flow_util
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def refuse_xla() -> None:
    """Refuse to reduce gradients in a step that XLA compiles as a whole."""
    if inside_xla():
        raise OptimizerError(
            "The whole train step is being compiled by XLA (jit_compile=True), but the "
            "collectives have no XLA kernel. Call model.compile(..., jit_compile=False); "
            "to keep XLA, compile only the function that computes the gradients.")


@contextmanager
def tapes_watched() -> Iterator[None]:
    """Within it, gradients from tapes are remembered while a step is traced."""
    tapes, original = _Tapes(), tf.GradientTape.gradient

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
    """Mark gradients as equal on all ranks, so that any further change is the same everywhere."""
    if _watching:
        _watching[-1].add(gradients, reduced=True)


def refuse_changed(optimizer: Any, gradients: Sequence[Any], variables: Callable[[], Any]) -> None:
    """Refuse gradients that a step has changed before it passes them to a distributed optimizer."""
    if not _watching or tf.executing_eagerly():
        return
    for position, gradient in enumerate(gradients):
        operation = None if gradient is None else _watching[-1].changed_by(gradient)
        if operation:
            path = keras_seam.variable_path(list(variables())[position])
            raise OptimizerError(
                f"The train_step changes the gradient of `{path}` (operation {operation}) before "
                f"it gives it to the distributed optimizer `{optimizer.name}`: each rank would "
                "change its own, and the result would depend on the number of ranks. Let the "
                "optimizer clip, which it does with the mean of all ranks (clipnorm, clipvalue, "
                "global_clipnorm); or take the gradients with "
                "hvdtrain.DistributedGradientTape, which gives the mean of all ranks.")


class _Tapes:
    def __init__(self) -> None:
        self._known: dict[_Key, str | None] = {}
        self._kept: list[Any] = []  # so that no other tensor gets the same key

    def add(self, gradients: Any, *, reduced: bool) -> None:
        for tensor in map(_tensor_of, tf.nest.flatten(gradients)):
            if tensor is not None:
                self._kept.append(tensor)
                self._known[_key(tensor)] = None if reduced else ""

    def changed_by(self, gradient: Any) -> str | None:
        """How a tensor depends on this rank's own gradients."""
        # None: it does not; "": linearly; else the name of the operation that is not linear.
        tensor, known = _tensor_of(gradient), self._known
        left = [tensor]
        while left:
            here = left[-1]
            operation = _operation(here)
            inputs = [] if operation is None or _key(here) in known else list(operation.inputs)
            waiting = [i for i in inputs if _key(i) not in known]
            left += waiting
            if not waiting:
                left.pop()
                self._kept.append(here)
                known.setdefault(_key(here), _changed_in(
                    operation, [known[_key(i)] for i in inputs]))
        return known[_key(tensor)]


def _changed_in(operation: Any, states: Sequence[str | None]) -> str | None:
    depending = [state for state in states if state is not None]
    if not depending:
        return None
    kind: str = operation.type
    linear = kind in _LINEAR or len(depending) == 1 and (
        kind in _PRODUCTS or kind in _QUOTIENTS and states[0] is not None)
    return next(filter(None, depending), "" if linear else kind)


def _tensor_of(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _key(tensor: Any) -> _Key:
    return (id(tensor.graph), tensor.name) if _operation(tensor) is not None else (id(tensor), "")


def _operation(tensor: Any) -> Any:
    return None if not hasattr(tensor, "op") or hasattr(tensor, "numpy") else tensor.op

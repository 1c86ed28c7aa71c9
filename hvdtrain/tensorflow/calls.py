"""How one call of Horovod is made: its name, its process set, its gradient, its types."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import tensorflow as tf

from hvdtrain.errors import ConfigError, OptimizerError
from hvdtrain.optim.compression import multiplied
from hvdtrain.optim.reducer import GradientReducer
from hvdtrain.optim.tracing import CallNames
from hvdtrain.tensorflow import current
from hvdtrain.tensorflow.basics import Adasum, Average, Sum, collective_of
from hvdtrain.tensorflow.process_sets import ProcessSet

F = TypeVar("F", bound=Callable[..., Any])
Tensor = Any
_BITS = {"bfloat16": "uint16", "uint32": "int32", "uint64": "int64"}
"""Types that Horovod does not move, and those of the same size."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\\/>-]")
_names: dict[str, CallNames] = {}


def unconverted(function: F) -> F:
    """Keep AutoGraph out of a function that is called within a `tf.function`."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call: its name, its process set, and the real functions of Horovod."""

    name: str
    process_set: ProcessSet
    ignore_name_scope: bool

    @classmethod
    def of(cls, kind: str, name: str | None, process_set: ProcessSet,
           ignore_name_scope: bool) -> Call:
        """A call of this kind; its name is made here where the user gives none."""
        process_set.check(member=True)
        if name is None:
            names = _names.setdefault(kind, CallNames(f"hvd.{kind}"))
            return cls(name=names.next(), process_set=process_set, ignore_name_scope=True)
        return cls(name=_NOT_IN_NAMES.sub("_", name), process_set=process_set,
                   ignore_name_scope=ignore_name_scope)

    def back(self) -> Call:
        """The call for the gradient."""
        return Call(name=f"{self.name}.back", process_set=self.process_set,
                     ignore_name_scope=self.ignore_name_scope)

    @property
    def size(self) -> int:
        """The number of ranks that take part."""
        return int(self.process_set.size() or 1)

    def run(self, function: str, tensors: Sequence[Tensor] | Tensor, **options: Any) -> Any:
        """Call a function of the real Horovod with tensors of which one depends on a variable."""
        ops, tie = current.several().operations, current.several().tie
        tied = tie(list(tensors)) if isinstance(tensors, (list, tuple)) else tie([tensors])[0]
        return getattr(ops, function)(
            tied, name=self.name, process_set=self.process_set,
            ignore_name_scope=self.ignore_name_scope, **options)


def on(device: str) -> AbstractContextManager[Any]:
    """Within it, operations are on this device, if one is given."""
    return tf.device(device) if device else nullcontext()


def differentiable(forward: Callable[..., list[Tensor]],
                    backward: Callable[..., Sequence[Tensor]],
                    tensors: Sequence[Tensor]) -> list[Tensor]:
    """`forward(*tensors)`, with `backward(*gradients)` as its gradient."""
    # Horovod's own gradients get their names from those of tensors, and are folded if constant.
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def applied(*inputs: Tensor) -> Any:
        return tuple(forward(*inputs)), unconverted(
            lambda *gradients: list(backward(*gradients)))
    return list(applied(*tensors))


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """The operation that `op`, or the older argument `average`, asks for."""
    if op is not None and average is not None:
        raise ConfigError("op and average say the same. Give op only.")
    if average is not None:
        warnings.warn("Parameter `average` has been replaced with `op`: write op=hvd.Average or "
                      "op=hvd.Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average if op is None else op


def reduce(function: str, tensors: Sequence[Tensor], op: int, call: Call,
            before: float, after: float) -> list[Tensor]:
    """Sum (or average, ...) dense tensors; with `allreduce` whole, with `reducescatter` a part."""
    GradientReducer.calls += 1
    if op == Adasum and (refusal := collective_of(call.process_set).refusal("adasum")):
        raise ConfigError(f"op=hvd.Adasum was asked for. {refusal}")
    if current.is_alone():
        return [times(t, before * after) for t in tensors]
    kinds = [t.dtype for t in tensors]

    def forward(*inputs: Tensor) -> list[Tensor]:
        factor, how = before, op
        sent = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t in inputs]
        if how == Average and sent[0].dtype == tf.float16:
            factor, how = before / call.size, Sum  # a sum of N could overflow
        out = call.run(f"_grouped_{function}" if len(sent) > 1 else f"_{function}",
                       sent if len(sent) > 1 else sent[0], op=how, prescale_factor=factor,
                       postscale_factor=after)
        return [tf.cast(t, kind) for t, kind in zip(
            out if len(sent) > 1 else [out], kinds, strict=True)]

    def backward(*gradients: Tensor) -> list[Tensor]:
        if op not in (Average, Sum, Adasum):
            raise OptimizerError("hvd.Min, hvd.Max and hvd.Product have no gradient between ranks. "
                                 "Use tf.stop_gradient, or op=hvd.Sum or hvd.Average.")
        if function == "allreduce":
            return reduce(function, gradients, op, call.back(), before, after)
        factor = before * after * (call.size if op == Sum else 1)
        return gather([times(g, factor) for g in gradients], call.back())
    return differentiable(forward, backward, tensors)


def times(tensor: Tensor, factor: float) -> Tensor:
    """A tensor times a number, of the same type."""
    if factor == 1 or tensor.dtype.is_floating:
        return multiplied(tensor, factor, tensor.dtype)
    return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)


def moved(function: Callable[[list[Tensor]], Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Apply what moves tensors as they are, with types that Horovod moves."""
    kind = tensors[0].dtype
    if kind == tf.bool:
        return [tf.cast(t, kind) for t in function([tf.cast(t, tf.uint8) for t in tensors])]
    if kind.name in _BITS:
        return [tf.bitcast(t, kind) for t in function(
            [tf.bitcast(t, _BITS[kind.name]) for t in tensors])]
    return list(function(list(tensors)))


def gather(tensors: Sequence[Tensor], call: Call) -> list[Tensor]:
    """Concatenate each tensor with those of the other ranks."""
    if current.is_alone():
        return list(tensors)
    rows = [tf.shape(t)[:1] for t in tensors]

    def sent(inputs: list[Tensor]) -> Any:
        return call.run("grouped_allgather", inputs) if len(inputs) > 1 else [
            call.run("allgather", inputs[0])]

    def backward(*gradients: Tensor) -> list[Tensor]:
        sizes = call.back().run("allgather", tf.stack(rows, 1))
        before = tf.reduce_sum(sizes[:call.process_set.rank()], 0)
        means = [reduce("allreduce", [g], Average, Call(
            name=f"{call.name}.back{i}", process_set=call.process_set,
            ignore_name_scope=call.ignore_name_scope), 1.0, 1.0)[0]
            for i, g in enumerate(gradients)]
        return [mean[before[i]:before[i] + rows[i][0]] for i, mean in enumerate(means)]
    return differentiable(lambda *inputs: moved(sent, inputs), backward, tensors)


def exchange(tensor: Tensor, splits: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Send `splits` rows of a tensor to each rank; what was received, and how many of each."""
    if current.is_alone():
        return tf.identity(tensor), splits
    counts: list[Tensor] = []

    def forward(value: Tensor) -> list[Tensor]:
        def sent(inputs: list[Tensor]) -> list[Tensor]:
            out, received = call.run("alltoall", inputs[0], splits=splits)
            counts[:] = [received]
            return [out]
        return [*moved(sent, [value]), counts[0]]

    def backward(gradient: Tensor, _: Tensor) -> list[Tensor]:
        return [exchange(gradient, counts[0], call.back())[0]]
    out, received = differentiable(forward, backward, [tensor])
    return out, received

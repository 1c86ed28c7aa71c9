"""The operations between ranks: each is a collective, which all ranks (of a process set) must call.

They work eagerly and in a `tf.function`, and have gradients. All ranks call the same operations in
the same order, with equal types and, unless it says otherwise, equal shapes. Operations without a
`name` get one that is equal on all ranks and unique in a step. bfloat16, which Horovod does not
have, is summed in float32 and moved as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.errors import ConfigError
from hvdtrain.tensorflow import current
from hvdtrain.tensorflow.basics import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    check_num_rank_power_of_2,
    collective_of,
    cross_rank,
    cross_size,
    init,
    local_rank,
    local_size,
    shutdown,
)
from hvdtrain.tensorflow.calls import (
    Call,
    Tensor,
    differentiable,
    exchange,
    gather,
    handle_average_backwards_compatibility,
    moved,
    on,
    reduce,
    times,
    unconverted,
)
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.current import rank, size
from hvdtrain.tensorflow.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)

__all__ = [
    "Adasum", "Average", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set",
    "allgather", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_",
    "check_num_rank_power_of_2", "cross_rank", "cross_size", "global_process_set",
    "grouped_allgather", "grouped_allreduce", "grouped_reducescatter",
    "handle_average_backwards_compatibility", "init", "join", "local_rank", "local_rank_op",
    "local_size", "local_size_op", "process_set_included_op", "rank", "rank_op", "reducescatter",
    "remove_process_set", "shutdown", "size", "size_op"]


@unconverted
def allreduce(tensor: Any, average: bool | None = None, device_dense: str = "",
              device_sparse: str = "", compression: Any = Compression.none,
              op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
              name: str | None = None, process_set: ProcessSet = global_process_set,
              ignore_name_scope: bool = False) -> Any:
    """Reduce a tensor over all ranks, element by element. All ranks.

    Args:
        tensor: A tensor, variable or number; or `tf.IndexedSlices`, whose rows are gathered.
        average: Boolean, deprecated: use `op`.
        device_dense: String, the device of the operation for dense tensors.
        device_sparse: String, that for `tf.IndexedSlices`.
        compression: `hvd.Compression.none` or `fp16`, or a class with `compress` and `decompress`.
        op: `hvd.Average` (the default), `Sum`, `Min`, `Max`, `Product`, or `Adasum` (over MPI).
        prescale_factor: Float, multiplies the tensor before.
        postscale_factor: Float, multiplies the result.
        name: String, equal on all ranks; see the module's head.
        process_set: A `ProcessSet`, whose ranks take part; by default all.
        ignore_name_scope: Boolean, whether `name` counts without the name scopes around it.

    Returns:
        A tensor of the same shape and type, equal on all ranks.
    """
    return grouped_allreduce(
        [tensor], average=average, device_dense=device_dense, device_sparse=device_sparse,
        compression=compression, op=op, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, process_set=process_set,
        ignore_name_scope=ignore_name_scope, name=name)[0]


@unconverted
def grouped_allreduce(tensors: Sequence[Any], average: bool | None = None, device_dense: str = "",
                      device_sparse: str = "", compression: Any = Compression.none,
                      op: int | None = None, prescale_factor: float = 1.0,
                      postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
                      ignore_name_scope: bool = False, name: str | None = None) -> list[Any]:
    """Reduce several tensors together: none before all of them are ready on all ranks. All ranks.

    The arguments are those of `allreduce`. Dense tensors have one type.

    Returns:
        A list of tensors, as `allreduce` returns them.
    """
    op = handle_average_backwards_compatibility(op, average)
    out = [t if isinstance(t, tf.IndexedSlices) else tf.convert_to_tensor(t) for t in tensors]
    dense = [i for i, t in enumerate(out) if not isinstance(t, tf.IndexedSlices)]
    for i, rows in enumerate(out):
        if i not in dense:
            if op not in (Sum, Average) or prescale_factor != 1 or postscale_factor != 1:
                raise ConfigError(
                    "tf.IndexedSlices can be summed or averaged only, without prescale_factor and "
                    "postscale_factor. Make it dense before: tf.convert_to_tensor(slices).")
            with on(device_sparse):
                out[i] = _reduce_rows(rows, op, process_set, name and f"{name}.{i}")
    if dense:
        call = Call.of("allreduce", name, process_set, ignore_name_scope)
        with on(device_dense):
            sent, contexts = zip(*(compression.compress(out[i]) for i in dense), strict=True)
            reduced = reduce("allreduce", sent, op, call, prescale_factor, postscale_factor)
            for i, tensor, context in zip(dense, reduced, contexts, strict=True):
                shape, out[i] = out[i].shape, compression.decompress(tensor, context)
                out[i].set_shape(shape)
    return out


def _reduce_rows(slices: Any, op: int, process_set: ProcessSet, name: str | None) -> Any:
    values = allgather(slices.values, name=name and f"{name}.values", process_set=process_set)
    rows = allgather(slices.indices, name=name and f"{name}.rows", process_set=process_set)
    if op == Average:
        values = times(values, 1 / int(process_set.size() or 1))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


@unconverted
def allgather(tensor: Any, name: str | None = None, ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate tensors of all ranks along the first axis, which may differ. All ranks."""
    return gather([tf.convert_to_tensor(tensor)],
                   Call.of("allgather", name, process_set, ignore_name_scope))[0]


@unconverted
def grouped_allgather(tensors: Sequence[Any], name: str | None = None,
                      ignore_name_scope: bool = False,
                      process_set: ProcessSet = global_process_set) -> list[Any]:
    """`allgather` of several tensors of one type together. All ranks."""
    return gather([tf.convert_to_tensor(t) for t in tensors],
                   Call.of("grouped_allgather", name, process_set, ignore_name_scope))


@unconverted
def broadcast(tensor: Any, root_rank: int, name: str | None = None,
              ignore_name_scope: bool = False,
              process_set: ProcessSet = global_process_set) -> Any:
    """Return the tensor of one rank, counted among all, on all ranks. All ranks."""
    tensor = tf.convert_to_tensor(tensor)
    call = Call.of("broadcast", name, process_set, ignore_name_scope)
    if root_rank not in (process_set.ranks or []):
        raise ConfigError(f"root_rank={root_rank} is none of the ranks {process_set.ranks}.")
    if current.is_alone():
        return tf.identity(tensor)

    def backward(gradient: Tensor) -> list[Tensor]:
        mean = reduce("allreduce", [gradient], Average, call.back(), 1.0, 1.0)[0]
        # Not decided here: a sum that is not used on one rank would be left out of its graph.
        return [tf.where(tf.equal(rank_op(), root_rank), mean, tf.zeros_like(mean))]
    return differentiable(
        lambda value: moved(lambda inputs: [call.run(
            "broadcast", inputs[0], root_rank=root_rank)], [value]), backward, [tensor])[0]


@unconverted
def broadcast_(variables: Sequence[Any], root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> list[Any]:
    """Set variables (of Keras or TensorFlow) to the values of one rank. All ranks.

    Returns:
        A list of tensors, the values that they have now.
    """
    values = []
    for number, variable in enumerate(variables):
        value = broadcast(variable, root_rank, name=name and f"{name}.{number}",
                          process_set=process_set)
        variable.assign(value)
        values.append(value)
    return values


@unconverted
def alltoall(tensor: Any, splits: Any = None, name: str | None = None,
             ignore_name_scope: bool = False,
             process_set: ProcessSet = global_process_set) -> Any:
    """Send parts of a tensor's first axis to each rank, and return those received. All ranks.

    Args:
        tensor: A tensor, whose first axis may have another length on each rank.
        splits: Sequence of integers, how many rows to send to each rank; by default equally many.
        name: String, as for `allreduce`.
        ignore_name_scope: Boolean, as for `allreduce`.
        process_set: A `ProcessSet`, as for `allreduce`.

    Returns:
        The parts received, in rank order; with `splits` also how many rows came from each rank.
    """
    tensor = tf.convert_to_tensor(tensor)
    call = Call.of("alltoall", name, process_set, ignore_name_scope)
    if splits is None and tensor.shape[0] is not None and tensor.shape[0] % call.size:
        raise ConfigError(f"alltoall of {tensor.shape[0]} rows cannot give each of {call.size} "
                          "ranks equally many. Give splits.")
    parts = tf.fill([call.size], tf.shape(tensor)[0] // call.size) if splits is None else (
        tf.cast(splits, tf.int32))
    out, counts = exchange(tensor, parts, call)
    return out if splits is None else (out, counts)


@unconverted
def reducescatter(tensor: Any, device_dense: str = "", compression: Any = Compression.none,
                  op: int = Average, name: str | None = None,
                  process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
                  prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> Any:
    """Reduce a tensor over all ranks; each gets its part of the first axis. All ranks.

    The arguments are those of `allreduce`; `op` is `hvd.Average` or `hvd.Sum`. Where the rows do
    not divide by the ranks, the first ranks get one more.
    """
    return grouped_reducescatter(
        [tensor], device_dense=device_dense, compression=compression, op=op,
        process_set=process_set, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, name=name, ignore_name_scope=ignore_name_scope)[0]


@unconverted
def grouped_reducescatter(tensors: Sequence[Any], device_dense: str = "",
                          compression: Any = Compression.none, op: int = Average,
                          process_set: ProcessSet = global_process_set,
                          prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                          name: str | None = None, ignore_name_scope: bool = False) -> list[Any]:
    """`reducescatter` of several tensors of one type together. All ranks."""
    if not tensors:
        return []
    call = Call.of("reducescatter", name, process_set, ignore_name_scope)
    with on(device_dense):
        sent, contexts = zip(*(compression.compress(tf.convert_to_tensor(t)) for t in tensors),
                             strict=True)
        parts = reduce("reducescatter", sent, op, call, prescale_factor, postscale_factor)
        return [compression.decompress(t, c) for t, c in zip(parts, contexts, strict=True)]


def join() -> Any:
    """Tell the others that this rank has no more data; returns when all ranks have called it.

    Until then this rank takes part in allreduces, with zeros; other collectives fail. Not within a
    `tf.function`.

    Returns:
        An integer tensor: the last rank that joined.
    """
    _refuse_graph("join")
    if current.is_alone():
        return tf.constant(0)
    # It has no inputs, so a function evaluates it once in its life: each call has one of its own.
    return tf.function(current.several().operations.join, autograph=False)()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks have called it. All ranks; not within a `tf.function`."""
    _refuse_graph("barrier")
    process_set.check(member=True)
    collective_of(process_set).barrier()


def _refuse_graph(name: str) -> None:
    if not tf.executing_eagerly():
        raise ConfigError(f"hvd.{name}() cannot be called within a tf.function: TensorFlow would "
                          "run it once, not in each call. Call it before or after.")


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """`size`, or that of a process set, as a tensor that is computed when it runs."""
    current.session()
    if not ProcessSet.is_known(process_set_id):
        raise ConfigError(f"Horovod has no process set with the number {process_set_id}.")
    return _asked("size_op", 1, name, process_set_id=process_set_id)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 or 0 as a tensor: whether this rank is in a process set; -3 if there is none."""
    current.session()
    if not ProcessSet.is_known(process_set_id):  # Horovod's own operation would crash
        return tf.constant(-3, name=name)
    return _asked("process_set_included_op", 1, name, process_set_id=process_set_id)


def local_size_op(name: str | None = None) -> Any:
    """`local_size` as a tensor that is computed when it runs."""
    return _asked("local_size_op", 1, name)


def rank_op(name: str | None = None) -> Any:
    """`rank` as a tensor that is computed when it runs."""
    return _asked("rank_op", 0, name)


def local_rank_op(name: str | None = None) -> Any:
    """`local_rank` as a tensor that is computed when it runs."""
    return _asked("local_rank_op", 0, name)


def _asked(what: str, alone: int, name: str | None, **options: Any) -> Any:
    if current.is_alone():
        return tf.constant(alone, name=name)
    return getattr(current.several().operations, what)(name=name, **options)

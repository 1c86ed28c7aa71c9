"""Distributed optimizers for `model.fit`, values between ranks, and loading of models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import ConfigError
from hvdtrain.tensorflow import mpi_ops
from hvdtrain.tensorflow.basics import Average
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.distributed import Groups, distributed_optimizer
from hvdtrain.tensorflow.process_sets import ProcessSet, global_process_set


def DistributedOptimizer(  # noqa: N802 - Horovod's name
        optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
        compression: Any = Compression.none, sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0, op: int = Average,
        backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
        num_groups: int = 0, groups: Groups = None,
        process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True) -> Any:
    """Make a Keras optimizer reduce its gradients over all ranks, in place. All ranks.

    The arguments are those of `hvdtrain.tensorflow.DistributedOptimizer`.

    Returns:
        The same object.
    """
    return PartialDistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
        gradient_predivide_factor, op, groups, process_set, None, scale_local_gradients,
        backward_passes_per_step=backward_passes_per_step, num_groups=num_groups,
        average_aggregated_gradients=average_aggregated_gradients)


def PartialDistributedOptimizer(  # noqa: D417, N802 - Horovod's name
        optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
        compression: Any = Compression.none, sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0, op: int = Average, groups: Groups = None,
        process_set: ProcessSet = global_process_set, local_layers: Any = None,
        scale_local_gradients: bool = True, *, backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False, num_groups: int = 0) -> Any:
    """As `DistributedOptimizer`; the gradients of `local_layers` stay on each rank. All ranks.

    Args:
        local_layers: A layer, or several, built or not.

    The other arguments are those of `hvdtrain.tensorflow.DistributedOptimizer`.

    Returns:
        The same object.
    """
    return distributed_optimizer(
        optimizer, name=name, device_dense=device_dense, device_sparse=device_sparse,
        compression=compression, sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor, op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients, num_groups=num_groups,
        groups=groups, process_set=process_set, local_layers=local_layers,
        scale_local_gradients=scale_local_gradients)


def allreduce(value: Any, name: str | None = None, average: bool | None = None,
              prescale_factor: float = 1.0, postscale_factor: float = 1.0, op: int | None = None,
              compression: Any = Compression.none) -> Any:
    """Reduce a number, an array or a tensor over all ranks. All ranks.

    The arguments are those of `hvdtrain.tensorflow.allreduce`.
    """
    return mpi_ops.allreduce(
        tf.convert_to_tensor(value), average=average, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, op=op, compression=compression, name=name)


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate arrays of all ranks along the first axis, which may differ. All ranks."""
    return mpi_ops.allgather(value, name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of one rank on all ranks. All ranks."""
    return mpi_ops.broadcast(value, root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduce an array over all ranks; each gets its part of the first axis. All ranks."""
    return mpi_ops.reducescatter(value, op=op, name=name)


def load_model(filepath: Any, custom_optimizers: Iterable[type] | None = None,
               custom_objects: Mapping[str, Any] | None = None,
               compression: Any = Compression.none, legacy_opts: bool = False) -> Any:
    """Load a model whose optimizer is distributed, with its state. All ranks.

    Args:
        filepath: A path, or an open `h5py.File`.
        custom_optimizers: Classes of optimizers that Keras does not have.
        custom_objects: Classes and functions by name, as for `keras.models.load_model`.
        compression: That of `DistributedOptimizer`.
        legacy_opts: False: Keras 3 has no legacy optimizers.

    Returns:
        A Keras model; without an optimizer if the file has none.

    Raises:
        ConfigError: `legacy_opts` is set.
    """
    if legacy_opts:
        raise ConfigError(
            "Keras 3 has no legacy optimizers. Leave legacy_opts out; load a file that was saved "
            "with one by keras.models.load_model(filepath, compile=False), and compile it anew.")
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(getattr(filepath, "filename", filepath), custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model

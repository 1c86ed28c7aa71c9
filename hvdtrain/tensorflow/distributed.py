"""`DistributedOptimizer` and `DistributedGradientTape` with Horovod's arguments.

They are those of `hvdtrain.optim`, which reduce once per applied update, before clipping; here
Horovod's arguments become a `ReducerOptions`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain import optim
from hvdtrain.config import Compression as GradientCompression
from hvdtrain.errors import ConfigError
from hvdtrain.optim import ReducerOptions, keras_seam
from hvdtrain.optim.distributed import undo_distribution
from hvdtrain.optim.options import GradientOp
from hvdtrain.tensorflow.basics import Adasum, Average, Sum, collective_of
from hvdtrain.tensorflow.compression import Compression, FP16Compressor, NoneCompressor
from hvdtrain.tensorflow.process_sets import ProcessSet, global_process_set

_OPS: dict[int, GradientOp] = {Average: "average", Sum: "sum", Adasum: "adasum"}
Groups = int | Sequence[Sequence[Any]] | None


class LocalVariables:
    """Whether the gradient of a variable stays on its rank: it was registered, or is of a layer."""

    def __init__(self, layers: Any = None) -> None:
        several: list[Any] = [] if layers is None else (
            [layers] if isinstance(layers, keras.layers.Layer) else list(layers))
        if not all(isinstance(layer, keras.layers.Layer) for layer in several):
            raise ConfigError(f"local_layers must be Keras layers. Received: {layers!r}")
        self.layers = several
        self.keys: set[str | None] = set()

    def __call__(self, variable: Any) -> bool:
        """Whether the gradient of this variable stays on its rank."""
        key = keras_seam.variable_key(variable)
        # Looked up when it is asked: a layer may be built later.
        return key in self.keys or any(
            keras_seam.variable_key(own) == key for layer in self.layers for own in layer.weights)

    def register(self, variable: Any) -> None:
        """Add a variable."""
        self.keys.add(keras_seam.variable_key(variable))


def reducer_options(*, device_dense: str = "", device_sparse: str = "",
                    compression: Any = Compression.none, sparse_as_dense: bool = False,
                    op: int = Average, gradient_predivide_factor: float = 1.0,
                    num_groups: int = 0, groups: Groups = None,
                    scale_local_gradients: bool = True) -> ReducerOptions:
    """Horovod's arguments as a `ReducerOptions`; ConfigError for what it cannot do."""
    if op not in _OPS:
        raise ConfigError("Gradients can be reduced by hvd.Average, hvd.Sum and hvd.Adasum. "
                          f"Received: op={op!r}")
    names: dict[Any, GradientCompression] = {NoneCompressor: "none", FP16Compressor: "fp16"}
    if compression not in names:
        raise ConfigError(
            f"Gradients can be sent with hvd.Compression.none or fp16. Received: {compression!r}. "
            "For bfloat16 or low rank use hvdtrain.DistributedOptimizer(optimizer, options="
            "hvdtrain.ReducerOptions(compression=\"bf16\")).")
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning,
                      stacklevel=4)
        groups = num_groups if groups is None else groups
    wanted: Any = groups or 0
    if not isinstance(wanted, int):
        wanted = tuple(tuple(str(keras_seam.variable_key(v)) for v in group) for group in wanted)
    elif wanted < 0:
        raise ConfigError("groups must be a number of groups, or a list of lists of variables. "
                          f"Received: {groups!r}")
    return ReducerOptions(
        op=_OPS[op], predivide=gradient_predivide_factor, compression=names[compression],
        sparse="dense" if sparse_as_dense else "auto", groups=wanted,
        scale_local=scale_local_gradients, device_dense=device_dense, device_sparse=device_sparse)


def distributed_optimizer(optimizer: Any, *, name: str | None, process_set: ProcessSet,
                          backward_passes_per_step: int = 1,
                          average_aggregated_gradients: bool = False, local_layers: Any = None,
                          **options: Any) -> Any:
    """`DistributedOptimizer` with all arguments that its variants have. All ranks."""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise ConfigError(
            f"tf.compat.v1.train.{type(optimizer).__name__} updates variables of TensorFlow 1 "
            f"only. Use keras.optimizers.{type(optimizer).__name__.removesuffix('Optimizer')}.")
    local = LocalVariables(local_layers)
    collective = collective_of(process_set)
    made = dataclasses.replace(
        reducer_options(**options), local_variables=local if local.layers else (),
        factor=_accumulating(optimizer, backward_passes_per_step,
                             average=average_aggregated_gradients))
    optim.DistributedOptimizer(optimizer, collective=collective, options=made, name=name)

    def register_local_var(var: Any) -> None:
        """Leave the gradients of a variable on each rank. All ranks, before training."""
        local.register(var)
        undo_distribution(optimizer)
        optim.DistributedOptimizer(
            optimizer, collective=collective, name=name,
            options=dataclasses.replace(made, local_variables=local))
        keras_seam.set_on_instance(optimizer, "register_local_var", register_local_var)
    keras_seam.set_on_instance(optimizer, "register_local_var", register_local_var)
    return optimizer


def _accumulating(optimizer: Any, steps: int, *, average: bool) -> float:
    """Let an optimizer accumulate, as Keras does; gives the factor on the mean for Horovod's."""
    if steps < 1:
        raise ConfigError(f"backward_passes_per_step must be 1 or more. Received: {steps}")
    for leaf in keras_seam.leaf_optimizers(optimizer) if steps > 1 else ():
        own = leaf.gradient_accumulation_steps
        if own == steps:
            continue
        if own is not None or leaf.built:
            why = "is built already" if own is None else f"has gradient_accumulation_steps={own}"
            raise ConfigError(
                f"backward_passes_per_step={steps} cannot be set on `{leaf.name}`, which {why}. "
                f"Make it as keras.optimizers.{type(leaf).__name__}(..., "
                f"gradient_accumulation_steps={steps}).")
        leaf.gradient_accumulation_steps = steps
    return 1.0 if average else float(steps)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
        optimizer: Any, name: str | None = None, use_locking: bool = False,
        device_dense: str = "", device_sparse: str = "", compression: Any = Compression.none,
        sparse_as_dense: bool = False, backward_passes_per_step: int = 1, op: int = Average,
        gradient_predivide_factor: float = 1.0, average_aggregated_gradients: bool = False,
        num_groups: int = 0, groups: Groups = None,
        process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True) -> Any:
    """Make a Keras optimizer reduce its gradients over all ranks, in place. All ranks.

    The result is the same object: class, config and saved files are those of Keras. Gradients are
    reduced once per applied update, before clipping and weight decay.

    Args:
        optimizer: A Keras 3 optimizer.
        name: String, begins the names of its collectives; equal on all ranks.
        use_locking: Not used; it was for optimizers of TensorFlow 1.
        device_dense: String, the device of reductions of dense gradients.
        device_sparse: String, that of gathered rows.
        compression: `hvd.Compression.none` or `fp16`, which divides before it sums.
        sparse_as_dense: Boolean, send whole tables for sparse gradients. By default rows are
            sent where that is fewer bytes. Rows that occur twice are merged.
        backward_passes_per_step: Integer k, apply the sum of k gradients; sets the optimizer's
            `gradient_accumulation_steps`, so it must not be built. Counters, schedules and bias
            corrections count updates, not passes.
        op: `hvd.Average`, `hvd.Sum` or, over MPI, `hvd.Adasum`.
        gradient_predivide_factor: Float, divides before the sum of an average, and not after.
        average_aggregated_gradients: Boolean, apply the mean of the k gradients, not the sum.
        num_groups: Deprecated, use `groups`.
        groups: Integer, or a list of lists of variables: what is sent together.
        process_set: A `ProcessSet`: a rank that is not in it trains alone.
        scale_local_gradients: Boolean, divide the gradients of local variables by the ranks.

    Returns:
        The same object, with a method `register_local_var(variable)`.

    Raises:
        ConfigError: An argument is not possible; the message says what to write instead.
        OptimizerError: The optimizer is not one of Keras, or cannot be distributed as asked.
    """
    del use_locking
    return distributed_optimizer(
        optimizer, name=name, device_dense=device_dense, device_sparse=device_sparse,
        compression=compression, sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step, op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        average_aggregated_gradients=average_aggregated_gradients, num_groups=num_groups,
        groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients)


class _Tape(optim.DistributedGradientTape):
    """A tape with Horovod's methods."""

    def __init__(self, tape: Any, process_set: ProcessSet, options: ReducerOptions,
                 local: LocalVariables) -> None:
        self._local = local
        super().__init__(tape, collective=collective_of(process_set),
                         options=dataclasses.replace(options, local_variables=local))

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable on each rank."""
        self._local.register(source)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None,
                 use_generic_names: bool = False) -> Any:
        """As `tf.GradientTape.gradient`, reduced; names are generic in any case. All ranks."""
        del use_generic_names
        return super().gradient(target, sources, output_gradients)

    def get_local_and_global_gradients(
            self, target: Any, sources: Sequence[Any], output_gradients: Any = None,
            use_generic_names: bool = False) -> tuple[list[Any], list[Any]]:
        """Pairs of source and gradient: those that stay on each rank, and the others. All ranks."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        found: tuple[list[Any], list[Any]] = ([], [])
        for pair in zip(sources, gradients, strict=True):
            found[0 if self._local(pair[0]) else 1].append(pair)
        return found


def DistributedGradientTape(  # noqa: N802 - Horovod's name
        gradtape: Any, device_dense: str = "", device_sparse: str = "",
        compression: Any = Compression.none, sparse_as_dense: bool = False, op: int = Average,
        gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Groups = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True) -> _Tape:
    """A `tf.GradientTape` whose gradients are reduced over all ranks. All ranks.

    The arguments are those of `DistributedOptimizer`, `gradtape` is the tape, which may have
    recorded already. Use it with an optimizer that is not distributed.

    Returns:
        An object with the methods of the tape; `gradient` reduces. `register_local_source(v)`
        leaves the gradient of a variable on each rank, and `get_local_and_global_gradients` gives
        those apart.
    """
    return PartialDistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
        gradient_predivide_factor, num_groups, groups, process_set, None, scale_local_gradients)


def PartialDistributedGradientTape(  # noqa: D417, N802 - Horovod's name
        gradtape: Any, device_dense: str = "", device_sparse: str = "",
        compression: Any = Compression.none, sparse_as_dense: bool = False, op: int = Average,
        gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Groups = None,
        process_set: ProcessSet = global_process_set,
        local_layers: Iterable[Any] | None = None,
        scale_local_gradients: bool = True) -> _Tape:
    """As `DistributedGradientTape`; the gradients of `local_layers` stay on each rank. All ranks.

    Args:
        local_layers: A layer, or several.

    The other arguments are those of `DistributedGradientTape`.
    """
    options = reducer_options(
        device_dense=device_dense, device_sparse=device_sparse, compression=compression,
        sparse_as_dense=sparse_as_dense, op=op,
        gradient_predivide_factor=gradient_predivide_factor, num_groups=num_groups,
        groups=groups, scale_local_gradients=scale_local_gradients)
    return _Tape(gradtape, process_set, options, LocalVariables(local_layers))

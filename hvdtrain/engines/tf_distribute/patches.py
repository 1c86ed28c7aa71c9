"""Keras 3 under tf.distribute: workarounds for its faults, and hooks on the user's optimizer.

Refused are Keras before 3.8, which adds gradients of replicas without averaging, and before 3.10,
whose metrics are wrong. The patched places are equal from 3.10 to 3.15; each signature is checked
before it is replaced, and it is put back after the training. The optimizer adds gradients over all
replicas before it clips them, once per update; Keras clips on each replica first. The rate is
scaled as for ranks; the object, its config and its files stay plain Keras.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from packaging.version import Version

from hvdtrain.errors import ConfigError, OptimizerError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.distributed import is_distributed
from hvdtrain.optim.reducer import merge_rows
from hvdtrain.optim.state import SEED_STRIDE
from hvdtrain.optim.tracing import inside_xla
from hvdtrain.train.schedule import LrPlan, multiplier

SEVERAL_REPLICAS_MIN = Version("3.10")


@dataclass(frozen=True)
class Patch:
    """A function to replace, of a module, class or object; `new` gets the original, its arguments.

    `parameters`, without `self`, are those that it must have.
    """

    owner: Any
    name: str
    parameters: tuple[str, ...]
    new: Callable[..., Any]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace it, and put it back; OptimizerError if its parameters are not those expected."""
        original, is_class = getattr(self.owner, self.name, None), inspect.isclass(self.owner)
        found = None if original is None else tuple(inspect.signature(original).parameters)
        known = ("self", *self.parameters) if is_class else self.parameters
        if original is None or found != known:
            raise OptimizerError(
                f"Keras {keras.__version__} with TensorFlow {tf.__version__}: {self.name}"
                f"({', '.join(known)}) was expected, found {found or 'nothing'}. Engine tf does "
                "not know these versions. Install others, or train with engine allreduce: "
                "hvdtrain launch -np N fit ...")
        own, kind = self.name in vars(self.owner), type if is_class else object

        def replacement(*args: Any, **kwargs: Any) -> Any:  # a function: a class binds it
            return self.new(original, *args, **kwargs)
        kind.__setattr__(self.owner, self.name, replacement)
        try:
            yield
        finally:
            if own:
                kind.__setattr__(self.owner, self.name, original)
            else:
                kind.__delattr__(self.owner, self.name)


@contextmanager
def applied(strategy: Any) -> Iterator[None]:
    """Apply all that this strategy needs, while the model is built and trained."""
    keras_seam.check_keras()
    patches = patches_of(strategy)
    if patches and Version(keras.__version__) < SEVERAL_REPLICAS_MIN:
        raise OptimizerError(
            f"Keras {keras.__version__} is installed; before {SEVERAL_REPLICAS_MIN} it gives wrong "
            "figures under a strategy with several replicas (and wrong weights before 3.8). "
            f"Install a newer one (pip install 'keras>={SEVERAL_REPLICAS_MIN},"
            f"<{keras_seam.KERAS_BELOW}'), or train with engine allreduce.")
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch.applied())
        yield


def patches_of(strategy: Any) -> list[Patch]:
    """What to replace for a strategy; nothing for a single replica."""
    if strategy.num_replicas_in_sync == 1:
        return []
    from keras.src.backend.tensorflow import core, trainer
    from keras.src.losses import loss
    patches = [
        Patch(keras.random.SeedGenerator, "next", ("ordered",), _seeds_of_their_own),
        Patch(loss, "reduce_values", ("values", "sample_weight", "reduction"), _scaled_scalars)]
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        patches.append(Patch(trainer, "reduce_per_replica", ("values", "strategy", "reduction"),
                             _local_logs))
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy):
        patches += [Patch(strategy.extended, "_create_variable", ("next_creator", "kwargs"),
                          _with_aggregation),
                    Patch(core.Variable, "_direct_assign", ("value",), _sums_grow)]
    return patches


def _seeds_of_their_own(original: Any, generator: Any, ordered: bool = True) -> Any:
    """Replicas draw equal seeds, and would drop the same units; now masks are as in allreduce."""
    seed = original(generator, ordered)
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return seed
    mine = tf.cast(context.replica_id_in_sync_group, seed.dtype) * SEED_STRIDE
    return seed + tf.stack([mine, tf.zeros_like(mine)])


def _scaled_scalars(original: Any, values: Any, sample_weight: Any = None,
                    reduction: str = "sum_over_batch_size") -> Any:
    """Divide a loss of one number per batch, as Keras does others: all gradients' sum is a mean."""
    from keras.src.losses.loss import scale_loss_for_distribution
    reduced = original(values, sample_weight, reduction)
    if tuple(values.shape) == () and reduction in (
            "sum_over_batch_size", "mean", "mean_with_sample_weight"):
        return scale_loss_for_distribution(reduced)
    return reduced


def _local_logs(original: Any, values: Any, strategy: Any, reduction: str) -> Any:
    """Keras reduces a step's figures over axis 0, which scalars do not have."""
    # This process' figures do for a progress bar; at an epoch's end the metrics of all are read.
    if reduction == "concat":
        return original(values, strategy, reduction)
    return keras.tree.map_structure(
        lambda value: strategy.experimental_local_results(value)[0], values)


def _with_aggregation(original: Any, next_creator: Any, **kwargs: Any) -> Any:
    """Variables without an aggregation cannot be assigned in a replica (BatchNorm, dropout)."""
    kinds = tf.VariableAggregation
    if kwargs.get("aggregation") in (None, kinds.NONE):
        dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
        kwargs["aggregation"] = kinds.MEAN if dtype.is_floating else kinds.ONLY_FIRST_REPLICA
    return original(next_creator, **kwargs)


def _sums_grow(original: Any, variable: Any, value: Any) -> None:
    """Keras assigns a metric's sum, v + x; added over replicas, that counts v more than once."""
    inner = variable._value
    if (getattr(inner, "aggregation", None) == tf.VariableAggregation.SUM
            and tf.distribute.get_replica_context() is not None):
        inner.assign_add(tf.cast(value, inner.dtype) - inner.read_value())
    else:
        original(variable, value)


def hook_optimizer(model: Any, strategy: Any) -> None:
    """Check and hook the optimizer of a compiled model, before the first step. All processes."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise OptimizerError("The model is not compiled. Call model.compile(optimizer, loss) in "
                             "the function that makes it.")
    leaves = keras_seam.leaf_optimizers(optimizer)
    if is_distributed(optimizer) or any(map(is_distributed, leaves)):
        raise OptimizerError(
            f"The model's optimizer ({type(optimizer).__name__}) is a DistributedOptimizer of "
            "engine allreduce; under a strategy gradients would be reduced twice. Compile with "
            "the plain Keras optimizer.")
    keras_seam.check_keras()
    keras_seam.self_test()
    is_scaled = keras_seam.is_loss_scale(optimizer)
    if strategy.num_replicas_in_sync > 1:
        _refuse_what_branches(leaves)
        if is_scaled and isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy):
            raise ConfigError(
                "A LossScaleOptimizer (compile adds one under mixed_float16) cannot be trained "
                "under strategy 'central_storage' with several devices: it updates within a "
                "condition. Use mixed_bfloat16, strategy mirrored, or engine allreduce.")
    if is_scaled:
        # Before it looks whether they are finite, so that all replicas skip alike.
        keras_seam.hook(optimizer, apply=_adding_first)
    for leaf in leaves:
        if not is_scaled:
            keras_seam.hook(leaf, _clip_gradients=_adding_first)
        # They are added already.
        keras_seam.set_on_instance(leaf, "_all_reduce_sum_gradients", list)


def _refuse_what_branches(leaves: Sequence[Any]) -> None:
    """Replicas cannot meet in a branch of the graph, where these update."""
    for leaf in leaves:
        found = ("gradient_accumulation_steps" if leaf.gradient_accumulation_steps else
                 "ema_overwrite_frequency" if leaf.use_ema and leaf.ema_overwrite_frequency else "")
        if found:
            raise ConfigError(
                f"{type(leaf).__name__} with {found}={getattr(leaf, found)} cannot be trained "
                "under a strategy with several replicas: TensorFlow lets replicas meet only "
                f"outside of conditions. Leave {found} out, or train with engine allreduce, "
                "which knows it: hvdtrain launch -np N fit ...")


def _adding_first(original: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
    """Go on with the sums over all replicas: Keras has divided each loss by their number."""
    context = tf.distribute.get_replica_context()
    out = [_merged(gradient) for gradient in gradients]
    here = [position for position, gradient in enumerate(out) if gradient is not None]
    if context is not None and context.num_replicas_in_sync > 1 and here:
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, [out[p] for p in here])
        for position, gradient in zip(here, total, strict=True):
            out[position] = _merged(gradient)
    return original(out, *args, **kwargs)


def _merged(gradient: Any) -> Any:
    """Merge a sparse gradient's rows; dense for XLA, which has no such operation."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.convert_to_tensor(gradient) if inside_xla() else merge_rows(gradient)


def scale_learning_rate(optimizer: Any, plan: LrPlan) -> None:
    """Scale the rate of updates; callbacks and files see the unscaled one. All processes; once."""
    factor = multiplier(plan)
    if factor is not None:
        for leaf in keras_seam.leaf_optimizers(optimizer):
            _hook_rate(leaf, factor)


def _hook_rate(leaf: Any, factor: Callable[[Any], Any]) -> None:
    applying = False

    def apply(original: Any, grads: Any, trainable_variables: Any) -> Any:
        nonlocal applying
        applying = True  # replicas are threads, which take turns
        try:
            return original(grads, trainable_variables)
        finally:
            applying = False

    def current_rate(original: Any) -> Any:
        rate = original()
        if not applying:
            return rate
        rate = tf.convert_to_tensor(rate)
        return rate * tf.cast(factor(tf.convert_to_tensor(leaf._iterations)), rate.dtype)

    keras_seam.hook(leaf, _backend_apply_gradients=apply, _get_current_learning_rate=current_rate)

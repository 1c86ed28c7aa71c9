"""The user's optimizer under a strategy: gradients are added before they are clipped.

That is once per update; the learning rate is scaled as for ranks. The object, its config and its
files stay plain Keras.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.errors import ConfigError, OptimizerError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.distributed import is_distributed
from hvdtrain.optim.reducer import merge_rows
from hvdtrain.train.schedule import LrPlan, multiplier


def hook_optimizer(model: Any, strategy: Any) -> None:
    """Check the model's optimizer and hook it. Every process; before the first step.

    Args:
        model: A compiled model that was made under the strategy.
        strategy: The `tf.distribute.Strategy`.

    Raises:
        OptimizerError: There is none, it reduces by itself, or Keras is not known.
        ConfigError: It does what the strategy cannot.
    """
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
    if strategy.num_replicas_in_sync > 1:
        _refuse_what_branches(leaves)
        _refuse_scaled_central(optimizer, strategy)
    if keras_seam.is_loss_scale(optimizer):
        _hook_scaled_apply(optimizer)
    else:
        for leaf in leaves:
            keras_seam.replace_method(leaf, "_clip_gradients", _clip_sums)
    for leaf in leaves:
        # They are added already.
        keras_seam.set_on_instance(leaf, "_all_reduce_sum_gradients", list)


def scale_learning_rate(optimizer: Any, plan: LrPlan) -> None:
    """Scale the learning rate, as `train.schedule.install` does. Every process; once."""
    for leaf in keras_seam.leaf_optimizers(optimizer):
        factor = multiplier(plan)
        if factor is not None:
            _hook_rate(leaf, factor)


def _refuse_what_branches(leaves: Sequence[Any]) -> None:
    """Replicas cannot meet within a branch of the graph, and these update there."""
    for leaf in leaves:
        found = ("gradient_accumulation_steps" if leaf.gradient_accumulation_steps else
                 "ema_overwrite_frequency" if leaf.use_ema and leaf.ema_overwrite_frequency else "")
        if found:
            raise ConfigError(
                f"{type(leaf).__name__} with {found}={getattr(leaf, found)} cannot be trained "
                "under a strategy with several replicas: TensorFlow lets replicas meet only "
                f"outside of conditions. Leave {found} out, or train with engine allreduce, "
                "which knows it: hvdtrain launch -np N fit ...")


def _refuse_scaled_central(optimizer: Any, strategy: Any) -> None:
    central = tf.distribute.experimental.CentralStorageStrategy
    if keras_seam.is_loss_scale(optimizer) and isinstance(strategy, central):
        raise ConfigError(
            "A LossScaleOptimizer (compile adds one under mixed_float16) cannot be trained under "
            "strategy 'central_storage' with several devices: it updates within a condition. Use "
            "mixed_bfloat16, strategy mirrored, or engine allreduce.")


def _added(gradients: Sequence[Any]) -> list[Any]:
    """The sum over all replicas. Keras has divided each loss by their number."""
    context = tf.distribute.get_replica_context()
    out = [_merged(gradient) for gradient in gradients]
    here = [position for position, gradient in enumerate(out) if gradient is not None]
    if context is not None and context.num_replicas_in_sync > 1 and here:
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, [out[p] for p in here])
        for position, gradient in zip(here, total, strict=True):
            out[position] = _merged(gradient)
    return out


def _merged(gradient: Any) -> Any:
    """Each row of a sparse gradient once; XLA, which has no such operation, gets a dense one."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.convert_to_tensor(gradient) if keras_seam.inside_xla() else merge_rows(gradient)


def _clip_sums(original: Callable[..., Any]) -> Callable[..., Any]:
    def _clip_gradients(grads: Any) -> Any:
        return original(_added(grads))
    return _clip_gradients


def _hook_scaled_apply(optimizer: Any) -> None:
    """LossScaleOptimizer: add before it looks whether they are finite, so that all skip alike."""
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            return original(_added(list(grads)), trainable_variables)
        return apply
    keras_seam.replace_method(optimizer, "apply", make)


def _hook_rate(leaf: Any, factor: Callable[[Any], Any]) -> None:
    """Multiply the rate of updates; callbacks and files see the one before."""
    applying = 0  # replicas are threads, which take turns

    def apply_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
        def _backend_apply_gradients(grads: Any, trainable_variables: Any) -> Any:
            nonlocal applying
            applying += 1
            try:
                return original(grads, trainable_variables)
            finally:
                applying = 0  # replicas are threads, which take turns
        return _backend_apply_gradients

    def current_rate(original: Callable[..., Any]) -> Callable[..., Any]:
        def _get_current_learning_rate() -> Any:
            rate = original()
            if not applying:
                return rate
            rate = tf.convert_to_tensor(rate)
            return rate * tf.cast(factor(tf.convert_to_tensor(leaf._iterations)), rate.dtype)
        return _get_current_learning_rate

    keras_seam.replace_method(leaf, "_backend_apply_gradients", apply_gradients)
    keras_seam.replace_method(leaf, "_get_current_learning_rate", current_rate)

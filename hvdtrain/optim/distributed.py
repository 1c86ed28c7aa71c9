"""`DistributedOptimizer`: makes a Keras optimizer average its gradients over all ranks.

It hooks the user's own object and returns that same object: class, config, name, variables and
loaded state stay what they were, and a saved file holds a plain Keras optimizer. What is hooked,
and why there, is told in `optim.keras_seam`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.collectives.current import current
from hvdtrain.errors import OptimizerError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.options import ReducerOptions, check_use
from hvdtrain.optim.provenance import refuse_changed
from hvdtrain.optim.reducer import GradientReducer
from hvdtrain.optim.zero import divide
from hvdtrain.optim.zero_check import check_options
from hvdtrain.optim.zero_files import keep_whole_files

STATE = "_hvdtrain_state"
_counter = itertools.count()


@dataclass(kw_only=True)
class HookState:
    """What hvdtrain keeps on a hooked optimizer (never serialised)."""

    owner_id: int
    collective: Collective
    name: str
    """Begins the names of its collectives; must be equal on all ranks."""
    learning_rate_multiplier: Callable[[Any], Any] | None = None
    """Maps the iteration (int64 tensor) to a factor on the learning rate, during updates."""
    loss_watch: Callable[[Any], None] | None = None
    """Called with each step's unscaled loss while the step is traced."""
    reducer: GradientReducer | None = None
    """What averages its gradients, unless that of an optimizer around it does."""
    given: ReducerOptions = field(default_factory=ReducerOptions)
    """What the user asked for."""
    options: ReducerOptions = field(default_factory=ReducerOptions)
    """What it does: `given`, and what the settings of a run add."""
    zero: bool = False


def state_of(optimizer: Any) -> HookState | None:
    """The hook state of exactly this object, or None: a copy does not count."""
    state = getattr(optimizer, "__dict__", {}).get(STATE)
    return state if state is not None and state.owner_id == id(optimizer) else None


def is_distributed(optimizer: Any) -> bool:
    """Whether this very object reduces its gradients over the ranks.

    deepcopy, pickle, `clone_model`, `load_model` and `from_config` all give a plain optimizer.
    """
    return state_of(optimizer) is not None


def DistributedOptimizer(  # noqa: N802 - the name the field knows
        optimizer: Any, *, collective: Collective | None = None,
        options: ReducerOptions | None = None, zero: bool = False) -> Any:
    """Make `optimizer` average its gradients over all ranks, in place.

    All ranks must call it, in the same order for several optimizers. Calling it again on the
    same object does nothing; asking for other options raises. Gradients are averaged once per
    applied update: after accumulation and loss unscaling, before clipping and weight decay, so
    that N ranks with batch B give the weights that one process gives with batch N*B.

    Args:
        optimizer: A Keras 3 optimizer, `LossScaleOptimizer` or `MultiOptimizer`, built or not.
        collective: The collective to use; defaults to that of `hvdtrain.init()`.
        options: How to reduce; defaults to `ReducerOptions()`.
        zero: Boolean, divide the state of the optimizer over the ranks (`optim.zero`).

    Returns:
        The same object.

    Raises:
        OptimizerError: `optimizer` is not a Keras optimizer object, Keras is not known, or the
            options do not fit the optimizer, the collective or those of a call before.

    Example:
        >>> hvdtrain.init()
        >>> model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam(1e-3)), "mse")
    """
    known = state_of(optimizer)
    if known is not None:
        _refuse_other_options(optimizer, known, options, zero=zero)
        return optimizer
    _refuse_what_is_no_optimizer(optimizer)
    keras_seam.check_keras()
    if collective is None:
        collective = current()
    base = f"hvdtrain.opt{next(_counter)}"
    options = options or ReducerOptions()
    leaves = keras_seam.leaf_optimizers(optimizer)
    fresh = [leaf for leaf in leaves if not is_distributed(leaf)]
    loss_scale = keras_seam.is_loss_scale(optimizer)
    zero = zero and collective.size > 1
    scaled = loss_scale and not zero and len(fresh) == len(leaves) and not (
        options.local_variables) and not any(
        leaf.gradient_accumulation_steps for leaf in leaves)
    check_use(options, fresh, collective, scaled=scaled)
    if zero:
        check_options(options)
    fresh_reducers: list[GradientReducer | None]
    outer: GradientReducer | None = None
    if scaled:
        outer = _hook_scaled_apply(optimizer, collective, base, options)
        fresh_reducers = [None] * len(fresh)
    else:
        fresh_reducers = [_reducer(leaf, collective, f"{base}.{k}", options, zero=zero)
                          for k, leaf in enumerate(fresh)]
        if loss_scale:
            _hook_agreement(optimizer, collective, base)
    settings = {"given": options, "options": options, "zero": zero}
    for leaf, reducer in zip(fresh, fresh_reducers, strict=True):
        _hook_leaf(leaf, reducer, options, outer=optimizer)
        _hook_overwriting(leaf, collective, base)
        _mark(leaf, collective, base, reducer, **settings)
    if keras_seam.is_multi(optimizer):
        _hook_late_leaves(optimizer, collective, base, options, zero=zero)
    _mark(optimizer, collective, base, outer, **settings)
    keep_whole_files(optimizer)
    _hook_loss(optimizer)
    _hook_data_dependency(optimizer, collective)
    return optimizer


def _refuse_what_is_no_optimizer(optimizer: Any) -> None:
    if not hasattr(optimizer, "apply") or not hasattr(optimizer, "variables"):
        raise OptimizerError(
            f"Expected a Keras optimizer object. Received: {optimizer!r} of type "
            f"{type(optimizer).__name__}. Use e.g. keras.optimizers.Adam(1e-3).")


def _reducer(leaf: Any, collective: Collective, name: str, options: ReducerOptions, *,
             zero: bool) -> GradientReducer | None:
    """What averages the gradients of one optimizer; None where dividing its state does it."""
    if zero:
        divide(leaf, collective, name, options.bucket_bytes)
        return None
    return GradientReducer(collective, name, options,
                           updates_rows=keras_seam.updates_rows(leaf))


def _mark(optimizer: Any, collective: Collective, name: str,
          reducer: GradientReducer | None, **settings: Any) -> None:
    if not is_distributed(optimizer):
        keras_seam.set_on_instance(optimizer, STATE, HookState(
            owner_id=id(optimizer), collective=collective, name=name, reducer=reducer,
            **settings))


def _refuse_other_options(optimizer: Any, known: HookState, options: ReducerOptions | None, *,
                          zero: bool) -> None:
    if (options is None or options == known.given) and zero in (False, known.zero):
        return
    raise OptimizerError(
        f"`{optimizer.name}` is distributed already, with {known.given.text}, zero={known.zero}. "
        f"Received: {(options or known.given).text}, zero={zero}. Distribute an optimizer once, "
        "with all options.")


def _hook_leaf(leaf: Any, reducer: GradientReducer | None, options: ReducerOptions, *,
               outer: Any) -> None:
    """Order gradients as built, reduce them before they are clipped, scale the rate."""
    context: dict[str, Any] = {"variables": (), "indices": (), "applying": False}
    if options.local_variables:
        keras_seam.mark_local(
            leaf, lambda v: options.is_local(keras_seam.variable_path(v), v))

    def apply_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
        def _backend_apply_gradients(grads: Any, trainable_variables: Any) -> Any:
            grads, variables = list(grads), list(trainable_variables)
            # Everything after this runs in build order on every rank: a global norm summed in
            # another order rounds differently, and ranks would drift apart.
            order = keras_seam.build_order(leaf, variables)
            context["variables"] = [variables[j] for j in order]
            context["indices"] = [leaf._get_variable_index(v) for v in context["variables"]]
            context["applying"] = True
            try:
                return original([grads[j] for j in order], context["variables"])
            finally:
                context["applying"] = False
        return _backend_apply_gradients

    def clip(original: Callable[..., Any]) -> Callable[..., Any]:
        def _clip_gradients(grads: Any) -> Any:
            _refuse_unhooked_loss_scale(leaf, outer)
            reduced = grads if reducer is None else reducer(
                grads, context["variables"], context["indices"])
            return original(reduced)
        return _clip_gradients

    def current_rate(original: Callable[..., Any]) -> Callable[..., Any]:
        def _get_current_learning_rate() -> Any:
            rate = original()
            state = state_of(leaf)
            if state is None or state.learning_rate_multiplier is None or not context["applying"]:
                return rate
            factor = state.learning_rate_multiplier(tf.convert_to_tensor(leaf._iterations))
            rate = tf.convert_to_tensor(rate)
            return rate * tf.cast(factor, rate.dtype)
        return _get_current_learning_rate

    keras_seam.replace_method(leaf, "_backend_apply_gradients", apply_gradients)
    keras_seam.replace_method(leaf, "_clip_gradients", clip)
    keras_seam.replace_method(leaf, "_get_current_learning_rate", current_rate)


def _hook_overwriting(leaf: Any, collective: Collective, base: str) -> None:
    """Variables that their gradient overwrites get the largest of all ranks.

    Those are float8's scales and histories of the largest values: the largest value of all ranks'
    samples is that of one process.
    """
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def overwrite(grads: Any, variables: Any) -> Any:
            grads, variables = list(grads), list(variables)
            found = [i for i, v in enumerate(variables) if keras_seam.is_overwritten(v)]
            if found and collective.size > 1:
                largest = collective.reduce([tf.convert_to_tensor(grads[i]) for i in found],
                                            name=f"{base}.overwritten", op="max")
                for position, value in zip(found, largest, strict=True):
                    grads[position] = value
            return original(grads, variables)
        return overwrite
    keras_seam.replace_method(leaf, "_overwrite_variables_directly_with_gradients", make)


def _hook_scaled_apply(optimizer: Any, collective: Collective, base: str,
                       options: ReducerOptions) -> GradientReducer:
    """LossScaleOptimizer without accumulation: reduce the scaled gradients.

    That is before the finite check: all ranks then see the same gradients, so all skip or
    apply, without a further collective.
    """
    reducer = GradientReducer(
        collective, base, options, loss_scale=lambda: optimizer.dynamic_scale,
        updates_rows=all(map(keras_seam.updates_rows, keras_seam.leaf_optimizers(optimizer))))

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            if not optimizer.built:
                optimizer.build(list(trainable_variables))
                optimizer.built = True
            inner = optimizer.inner_optimizer  # Keras 3.5's own wrapper does not know the order
            variables = list(trainable_variables or inner._trainable_variables)
            order = keras_seam.build_order(inner, variables)
            variables = [variables[j] for j in order]
            ordered = [grads[j] for j in order]
            mine = [i for i, v in enumerate(variables) if not keras_seam.is_overwritten(v)]
            means = reducer([ordered[i] for i in mine], [variables[i] for i in mine],
                            [inner._get_variable_index(variables[i]) for i in mine])
            for position, mean in zip(mine, means, strict=True):
                ordered[position] = mean
            return original(ordered, variables)
        return apply
    keras_seam.replace_method(optimizer, "apply", make)
    return reducer


def _hook_late_leaves(optimizer: Any, collective: Collective, base: str,
                      options: ReducerOptions, *, zero: bool) -> None:
    """MultiOptimizer may be given a function, which makes optimizers when it is built."""
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def build(variables: Any) -> None:
            original(variables)
            for k, leaf in enumerate(keras_seam.leaf_optimizers(optimizer)):
                if not is_distributed(leaf):
                    reducer = _reducer(leaf, collective, f"{base}.late{k}", options, zero=zero)
                    check_use(options, [leaf], collective, scaled=False)
                    _hook_leaf(leaf, reducer, options, outer=optimizer)
                    _hook_overwriting(leaf, collective, f"{base}.late{k}")
                    _mark(leaf, collective, base, reducer, given=options, options=options,
                          zero=zero)
        return build
    keras_seam.replace_method(optimizer, "build", make)


def _hook_agreement(optimizer: Any, collective: Collective, base: str) -> None:
    """LossScaleOptimizer with accumulation: ranks agree whether the gradients are finite."""
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def check_finite(grads: Any) -> Any:
            finite = original(grads)
            if collective.size == 1:
                return finite
            agreed = collective.reduce(
                [tf.cast(finite, tf.float32)], name=f"{base}.finite", op="min")[0]
            return agreed > 0.5
        return check_finite
    keras_seam.replace_method(optimizer, "check_finite", make)


def _hook_loss(optimizer: Any) -> None:
    """Show each step's loss to the watch, before it is scaled."""
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def scale_loss(loss: Any) -> Any:
            state = state_of(optimizer)
            if state is not None and state.loss_watch is not None:
                state.loss_watch(loss)
            return original(loss)
        return scale_loss
    keras_seam.replace_method(optimizer, "scale_loss", make)


def _hook_data_dependency(optimizer: Any, collective: Collective) -> None:
    """Make `apply` wait for a gradient.

    When a data set of unknown size ends, Keras runs one step more whose `get_next` fails, but
    whatever does not depend on data has then run: `iterations`, weight decay, EMA. The last
    variable's gradient is the first one made, so waiting for it keeps the overlap.
    """
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            if collective.size > 1:
                refuse_changed(optimizer, grads, lambda: (
                    trainable_variables or keras_seam.leaf_optimizers(
                        optimizer)[0]._trainable_variables))
            last = next((g for g in reversed(grads) if g is not None), None)
            if last is None or tf.executing_eagerly():
                return original(grads, trainable_variables)
            tensor = last.values if isinstance(last, tf.IndexedSlices) else last
            if not optimizer.built and trainable_variables is not None:
                trainable_variables = list(trainable_variables)
                keras_seam.build(optimizer, trainable_variables)  # depends on nothing
            with tf.control_dependencies([tensor]):
                return original(grads, trainable_variables)
        return apply
    keras_seam.replace_method(optimizer, "apply", make)


def _refuse_unhooked_loss_scale(leaf: Any, outer: Any) -> None:
    """Refuse to reduce below a LossScaleOptimizer that does not agree over ranks.

    `compile` under mixed_float16 wraps a distributed optimizer in a plain LossScaleOptimizer;
    one overflowing rank would then skip the collective and all would wait for ever.
    """
    import inspect
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_stateful_handle_finite_grads":
            scaler = frame.f_locals.get("self")
            if scaler is not outer and not is_distributed(scaler):
                raise OptimizerError(
                    f"The distributed optimizer `{leaf.name}` sits inside a "
                    f"`{type(scaler).__name__}` that is not distributed (compile() adds one "
                    "under the mixed_float16 policy): ranks would disagree on overflow and "
                    "wait for ever. Use DistributedOptimizer(LossScaleOptimizer(optimizer)).")
            return
        frame = frame.f_back

"""`DistributedOptimizer`: makes a Keras optimizer average its gradients over all ranks.

It hooks the user's own object and returns it: class, config, name, variables and loaded state stay
the same, and a saved file holds a plain Keras optimizer. `optim.keras_seam` says what is hooked.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from hvdtrain.collectives import current
from hvdtrain.collectives.base import Collective
from hvdtrain.errors import OptimizerError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.compression import ErrorFeedback
from hvdtrain.optim.options import ReducerOptions, check_use, check_zero
from hvdtrain.optim.reducer import GradientReducer
from hvdtrain.optim.tracing import refuse_changed
from hvdtrain.optim.zero import DividedOptimizer, divided_leaves, keep_whole_files

_STATE = "_hvdtrain_state"
_counter = itertools.count()


@dataclass(kw_only=True, eq=False)
class HookState:
    """The state on a hooked optimizer, whose `id` is `owner` (never serialized), and its hooks.

    `options` are those `given` by the user, merged with the settings of a run. `name` is the prefix
    of its collectives' names, equal on all ranks. `learning_rate_multiplier` maps the iteration
    (int64 tensor) to a factor during updates. `loss_watch` gets each unscaled loss while a step is
    traced. `reducer` is None inside an optimizer that averages. `outer` is the optimizer that was
    distributed, if it is another one.
    """

    owner: int = 0
    optimizer: Any = None
    outer: Any = None
    collective: Collective
    name: str
    learning_rate_multiplier: Callable[[Any], Any] | None = None
    loss_watch: Callable[[Any], None] | None = None
    reducer: GradientReducer | None = None
    given: ReducerOptions
    options: ReducerOptions
    zero: bool
    _variables: Sequence[Any] = ()
    _indices: Sequence[int] = ()
    _applying: bool = False

    def _apply(self, original: Any, grads: Any, trainable_variables: Any) -> Any:
        """Everything after this runs in build order on every rank."""
        # A global norm summed in another order rounds differently, and ranks would diverge.
        self._indices, gradients, self._variables = keras_seam.in_build_order(
            self.optimizer, grads, trainable_variables)
        self._applying = True
        try:
            return original(gradients, self._variables)
        finally:
            self._applying = False

    def _clip(self, original: Any, grads: Any) -> Any:
        # `compile` under mixed_float16 wraps a distributed optimizer in a plain LossScaleOptimizer;
        # one overflowing rank would then skip the collective and all would wait forever.
        scaler = keras_seam.calling_loss_scale()
        if scaler is not None and scaler is not self.outer and not is_distributed(scaler):
            raise OptimizerError(
                f"The distributed optimizer `{self.optimizer.name}` sits inside a "
                f"`{type(scaler).__name__}` that is not distributed (compile() adds one "
                "under the mixed_float16 policy): ranks would disagree on overflow and "
                "wait for ever. Use DistributedOptimizer(LossScaleOptimizer(optimizer)).")
        if self.reducer is not None:
            grads = self.reducer(grads, self._variables, self._indices)
        return original(grads)

    def _current_rate(self, original: Any) -> Any:
        rate, state = original(), state_of(self.optimizer)
        if state is None or state.learning_rate_multiplier is None or not self._applying:
            return rate
        factor = state.learning_rate_multiplier(
            tf.convert_to_tensor(keras_seam.iterations(self.optimizer)))
        rate = tf.convert_to_tensor(rate)
        return rate * tf.cast(factor, rate.dtype)

    def _overwrite(self, original: Any, grads: Any, variables: Any) -> Any:
        """Variables that are overwritten by their gradient get the largest of all ranks."""
        # These are float8 scales and histories of maxima: the maximum over all ranks is that of one
        # process.
        grads, variables = list(grads), list(variables)
        found = [i for i, v in enumerate(variables) if _is_overwritten(v)]
        if found and self.collective.size > 1:
            largest = self.collective.reduce([tf.convert_to_tensor(grads[i]) for i in found],
                                             name=f"{self.name}.overwritten", op="max")
            for position, value in zip(found, largest, strict=True):
                grads[position] = value
        return original(grads, variables)

    def _apply_scaled(self, reducer: GradientReducer, original: Any, grads: Any,
                      trainable_variables: Any = None) -> Any:
        """LossScaleOptimizer without accumulation: reduce scaled gradients before its check."""
        # All ranks then see the same gradients, so all skip or apply, without a further collective.
        if not self.optimizer.built:
            keras_seam.build(self.optimizer, list(trainable_variables))
        inner = self.optimizer.inner_optimizer  # it knows the order of its variables
        indices, gradients, variables = keras_seam.in_build_order(
            inner, grads, trainable_variables or keras_seam.trained(inner))
        mine = [p for p, variable in enumerate(variables) if not _is_overwritten(variable)]
        means = reducer([gradients[p] for p in mine], [variables[p] for p in mine],
                        [indices[p] for p in mine])
        for position, mean in zip(mine, means, strict=True):
            gradients[position] = mean
        return original(gradients, variables)

    def _agree_on_finite(self, original: Any, grads: Any) -> Any:
        """LossScaleOptimizer with accumulation: ranks agree whether the gradients are finite."""
        agreed = self.collective.reduce([tf.cast(original(grads), tf.float32)],
                                        name=f"{self.name}.finite", op="min")[0]
        return agreed > 0.5

    def _build_and_hook(self, original: Any, variables: Any) -> None:
        original(variables)
        for k, leaf in enumerate(keras_seam.leaf_optimizers(self.optimizer)):
            if not is_distributed(leaf):
                check_use(self.options, [leaf], self.collective, scaled=False, zero=self.zero)
                _hook_leaf(leaf, self, f"{self.name}.late{k}", outer=self.optimizer, reduces=True)

    def _show_loss(self, original: Any, loss: Any) -> Any:
        if self.loss_watch is not None:
            self.loss_watch(loss)
        return original(loss)

    def _apply_after_data(self, original: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Make `apply` wait for a gradient."""
        # When a dataset of unknown size ends, Keras runs one more step whose `get_next` fails, but
        # whatever does not depend on data has then run: `iterations`, weight decay, EMA. The last
        # variable's gradient is the first one made, so waiting for it keeps the overlap.
        grads, optimizer = list(grads), self.optimizer
        if self.collective.size > 1:
            leaf = keras_seam.leaf_optimizers(optimizer)[0]
            refuse_changed(optimizer, grads, lambda: (
                trainable_variables or keras_seam.trained(leaf)))
        last = next((g for g in reversed(grads) if g is not None), None)
        if last is None or tf.executing_eagerly():
            return original(grads, trainable_variables)
        tensor = last.values if isinstance(last, tf.IndexedSlices) else last
        if not optimizer.built and trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            keras_seam.build(optimizer, trainable_variables)  # depends on nothing
        with tf.control_dependencies([tensor]):
            return original(grads, trainable_variables)


def _is_overwritten(variable: Any) -> bool:
    """Whether a variable takes its gradient as its value (scales of float8)."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def state_of(optimizer: Any) -> HookState | None:
    """The hook state of exactly this object, or None: a copy has none."""
    state = getattr(optimizer, "__dict__", {}).get(_STATE)
    return state if state is not None and state.owner == id(optimizer) else None


def is_distributed(optimizer: Any) -> bool:
    """Whether this very object averages its gradients; a copy or a loaded one does not."""
    return state_of(optimizer) is not None


def DistributedOptimizer(  # noqa: N802 - the name the field knows
        optimizer: Any, *, collective: Collective | None = None,
        options: ReducerOptions | None = None, zero: bool = False, name: str | None = None) -> Any:
    """Make `optimizer` average its gradients over all ranks, in place.

    All ranks must call it, in the same order for several optimizers. Calling it again on the same
    object does nothing. Gradients are averaged once per applied update: after accumulation and loss
    unscaling, before clipping and weight decay, so that N ranks with batch B give the weights that
    one process gives with batch N*B.

    Args:
        optimizer: A Keras 3 optimizer, `LossScaleOptimizer` or `MultiOptimizer`, built or not.
        collective: The collective to use; defaults to that of `hvdtrain.init()`.
        options: A `ReducerOptions`; defaults to `ReducerOptions()`.
        zero: Boolean, divide the state of the optimizer over the ranks (`optim.zero`).
        name: String, begins the names of its collectives; equal on all ranks.

    Returns:
        The same object.

    Raises:
        OptimizerError: `optimizer` is not a Keras optimizer object, the Keras version is not
            supported, or the options do not fit the optimizer, the collective or an earlier call.

    Example:
        >>> hvdtrain.init()
        >>> model.compile(hvdtrain.DistributedOptimizer(keras.optimizers.Adam(1e-3)), "mse")
    """
    known = state_of(optimizer)
    if known is None:
        options = options or ReducerOptions()
        _distribute(optimizer, collective or current(), options, given=options, zero=zero,
                    name=name or "hvdtrain")
    elif options not in (None, known.given) or zero not in (False, known.zero):
        raise OptimizerError(
            f"`{optimizer.name}` is distributed already, with {known.given.text}, "
            f"zero={known.zero}. Received: {(options or known.given).text}, zero={zero}. "
            "Distribute an optimizer once, with all options.")
    return optimizer


def distribute_as_set(optimizer: Any, collective: Collective, options: ReducerOptions, *,
                      zero: bool) -> None:
    """Apply the settings of a run to an optimizer (or ConfigError). All ranks, before tracing."""
    # What the user gave to `DistributedOptimizer` stays; runs with other settings may follow.
    known = next(iter(_states(optimizer)), None)
    if known is None:
        _distribute(optimizer, collective, options, given=ReducerOptions(), zero=zero)
        return
    wanted = known.given.changed_by(options)
    if known.zero:
        check_zero(wanted)
    elif wanted != known.options or (zero and collective.size > 1):
        undo_distribution(optimizer)
        _distribute(optimizer, collective, wanted, given=known.given, zero=zero)
    # compile() wraps an optimizer in a plain LossScaleOptimizer under mixed_float16.
    DistributedOptimizer(optimizer, collective=collective)


def undo_distribution(optimizer: Any) -> None:
    """Make an optimizer plain again; its state stays. All ranks."""
    for part in [optimizer, *keras_seam.leaf_optimizers(optimizer)]:
        keras_seam.restore_all(part)
        part.__dict__.pop(_STATE, None)


def _states(optimizer: Any) -> list[HookState]:
    return [state for part in [optimizer, *keras_seam.leaf_optimizers(optimizer)]
            if (state := state_of(part)) is not None]


def _distribute(optimizer: Any, collective: Collective, options: ReducerOptions, *,
                given: ReducerOptions, zero: bool, name: str = "hvdtrain") -> None:
    if not hasattr(optimizer, "apply") or not hasattr(optimizer, "variables"):
        raise OptimizerError(
            f"Expected a Keras optimizer object. Received: {optimizer!r} of type "
            f"{type(optimizer).__name__}. Use e.g. keras.optimizers.Adam(1e-3).")
    keras_seam.check_keras()
    state = HookState(collective=collective, name=f"{name}.opt{next(_counter)}", given=given,
                      options=options, zero=zero and collective.size > 1)
    leaves = keras_seam.leaf_optimizers(optimizer)
    fresh = [leaf for leaf in leaves if not is_distributed(leaf)]
    loss_scale = keras_seam.is_loss_scale(optimizer)
    scaled = loss_scale and not state.zero and len(fresh) == len(leaves) and not (
        options.local_variables) and not any(
        leaf.gradient_accumulation_steps for leaf in leaves)
    check_use(options, fresh, collective, scaled=scaled, zero=state.zero)
    for k, leaf in enumerate(fresh):
        _hook_leaf(leaf, state, f"{state.name}.{k}", outer=optimizer, reduces=not scaled)
    own = state_of(optimizer) or _mark(optimizer, state)
    if scaled:
        own.reducer = GradientReducer(
            collective, state.name, options, loss_scale=lambda: optimizer.dynamic_scale,
            updates_rows=all(map(keras_seam.updates_rows, leaves)))
        keras_seam.hook(optimizer, apply=partial(own._apply_scaled, own.reducer))
    elif loss_scale:
        keras_seam.hook(optimizer, check_finite=own._agree_on_finite)
    if keras_seam.is_multi(optimizer):
        keras_seam.hook(optimizer, build=own._build_and_hook)
    if divided_leaves(optimizer) and optimizer not in leaves:
        keep_whole_files(optimizer)
    keras_seam.hook(optimizer, scale_loss=own._show_loss, apply=own._apply_after_data)


def _mark(optimizer: Any, state: HookState, **changes: Any) -> HookState:
    own = dataclasses.replace(state, owner=id(optimizer), optimizer=optimizer, **changes)
    keras_seam.set_on_instance(optimizer, _STATE, own)
    return own


def _hook_leaf(leaf: Any, state: HookState, name: str, *, outer: Any, reduces: bool) -> None:
    reducer = None
    if state.zero:
        DividedOptimizer(leaf, state.collective, name, state.options)
    elif reduces:
        reducer = GradientReducer(state.collective, name, state.options,
                                  updates_rows=keras_seam.updates_rows(leaf))
    if state.options.local_variables:
        is_local = state.options.is_local
        keras_seam.set_on_instance(leaf, keras_seam.IS_LOCAL, lambda v: is_local(
            keras_seam.variable_path(v), v))
    own = _mark(leaf, state, reducer=reducer, name=name, outer=outer)
    keras_seam.hook(leaf, _backend_apply_gradients=own._apply, _clip_gradients=own._clip,
                    _get_current_learning_rate=own._current_rate,
                    _overwrite_variables_directly_with_gradients=own._overwrite)


def collect_error_feedback(optimizer: Any) -> dict[str, Any]:
    """The residuals of compression, for a checkpoint; see `ErrorFeedback.collect`. All ranks."""
    return {f"{number}/{name}": value for number, feedback in enumerate(_feedbacks(optimizer))
            for name, value in feedback.collect().items()}


def restore_error_feedback(optimizer: Any, values: Mapping[str, Any]) -> bool:
    """Set what `collect_error_feedback` returned; False if unused. All ranks, before a step."""
    found = _feedbacks(optimizer)
    for number, feedback in enumerate(found):
        prefix = f"{number}/"
        feedback.restored = {name.removeprefix(prefix): value for name, value in values.items()
                             if name.startswith(prefix)}
    return any(feedback.collective.size > 1 for feedback in found)


def _feedbacks(optimizer: Any) -> list[ErrorFeedback]:
    reducers = dict.fromkeys(state.reducer for state in _states(optimizer))
    return [r.compression.feedback for r in reducers if r and r.compression.feedback]

"""ZeRO-1: each rank holds and updates one part of the optimizer's state.

A reduce-scatter averages gradients, the rank's Keras optimizer updates its part, and an allgather
gives all ranks the whole. Like `optim.distributed` it hooks the user's own object: Keras sees an
optimizer built for fewer elements. Files hold the whole, as a plain optimizer writes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.errors import OptimizerError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.keras_seam import replaced
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.optim.reducer import densify
from hvdtrain.optim.tracing import CallNames, refuse_xla
from hvdtrain.optim.zero_parts import (
    Parts,
    StateExchange,
    Structure,
    VariableFacts,
    plan_buckets,
    plan_owners,
)

_STATE = "_hvdtrain_zero"
_BY_VARIABLE = ("Adafactor", "Lamb", "Muon")
_DTYPES = ("float32", "float64")
_SAVING = ("BackupAndRestore", "ModelCheckpoint", "OrbaxCheckpoint")


class DividedOptimizer:
    """The hooks and data of one Keras optimizer whose state is divided over the ranks.

    A built optimizer keeps this rank's part. Of `options` it takes the size of one collective.
    """

    def __init__(self, leaf: Any, collective: Collective, name: str,
                 options: ReducerOptions) -> None:
        self.leaf = leaf
        self._collective = collective
        self._whole = _looks_at_whole_variables(leaf)
        self._names = CallNames(f"{name}.zero")
        self._call = ""
        self._options = options
        self._variables: list[Any] = []
        self.exchange: StateExchange | None = None
        """Moves its state; None until it is built."""
        self._originals: dict[str, Callable[..., Any]] = {}
        for method, ours in (
                ("build", self._build), ("apply", self._apply), ("_clip_gradients", self._clip),
                ("finalize_variable_values", self._finalize)):
            self._originals[method] = getattr(leaf, method)
            keras_seam.set_on_instance(leaf, method, ours)
        keras_seam.set_on_instance(leaf, _STATE, self)
        keep_whole_files(leaf)
        if leaf.built:
            variables, values = keras_seam.trained(leaf), [
                np.asarray(v.numpy()) for v in leaf.variables]
            keras_seam.unbuild(leaf)
            self._build(variables).take(values)

    def _build(self, variables: Sequence[Any]) -> StateExchange:
        if self.exchange is None:
            with tf.init_scope():
                self.exchange = self._exchange_for(list(variables))
        return self.exchange

    def _exchange_for(self, variables: list[Any]) -> StateExchange:
        leaf, build, ranks = self.leaf, self._originals["build"], self._collective.size
        self._variables, structure = variables, _structure_of(leaf, build, variables)
        facts = [_facts(leaf, variable) for variable in variables]
        most = self._options.bucket_for(sum(f.size * f.item_bytes for f in facts),
                                        one_host=self._collective.one_host)
        buckets = plan_owners(facts, ranks=ranks) if self._whole else plan_buckets(
            facts, ranks=ranks, bucket_bytes=most)
        self._parts = Parts(variables, buckets, self._collective, whole=self._whole)
        if not self._whole:
            for parameter, bucket in zip(self._parts.parameters, buckets, strict=True):
                leaf._exclude_from_weight_decay_cache[leaf._var_key(parameter)] = bucket.decays
        build(list(self._parts.parameters))
        leaf.built = True
        exchange = StateExchange(self._collective, leaf, self._parts, structure)
        for _, _, slot in exchange.slots():
            keras_seam.set_on_instance(slot, keras_seam.DIVIDED, True)
        return exchange

    def _apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        grads = list(grads)
        if not grads:
            return
        self._build(trainable_variables or ()).loaded = None
        refuse_xla()
        gradients = self._in_order(
            grads, self._variables if trainable_variables is None else list(trainable_variables))
        self._call = name = self._names.next()
        leaf, parts, steps = self.leaf, self._parts, self.leaf.gradient_accumulation_steps
        publishes = None  # always: the parameters may change in each step
        if steps and not leaf.ema_overwrite_frequency and not (self._whole and any(
                v.constraint is not None for v in self._variables)):
            publishes = (tf.convert_to_tensor(keras_seam.iterations(leaf)) + 1) % steps == 0
        # While gradients are accumulated, a step waits for the one before, whose names it uses.
        before = [tf.convert_to_tensor(v) for v in keras_seam.accumulators(leaf)]
        with tf.control_dependencies(before):
            mine = parts.scatter([tf.identity(g) for g in gradients], name)
        parts.refresh()
        if mine:
            self._originals["apply"](mine, parts.parameters)
        else:  # more ranks than variables
            keras_seam.iterations(leaf).assign_add(1)
        if publishes is None:
            parts.publish(name)
        else:
            tf.cond(publishes, lambda: parts.publish(name), tf.no_op)
        parts.release()
        if not self._whole:
            for variable in self._variables:
                if variable.constraint is not None:
                    variable.assign(variable.constraint(variable))

    def _in_order(self, grads: list[Any], given: list[Any]) -> list[Any]:
        """One dense gradient for each variable, in build order."""
        key = keras_seam.variable_key
        found = {key(v): g for v, g in zip(given, grads, strict=True) if g is not None}
        missing = [v for v in self._variables if key(v) not in found]
        if missing or len(found) != len(self._variables):
            which = f"`{missing[0].path}` has none" if missing else "there are more"
            raise OptimizerError(
                f"With zero, each step needs one gradient for each of the {len(self._variables)} "
                f"variables that the optimizer `{self.leaf.name}` was built for; {which}. Set "
                "trainable = False on what is not trained and build the optimizer without it, or "
                "leave zero out.")
        return [tf.cast(densify(found[key(v)], v), v.dtype) for v in self._variables]

    def _clip(self, grads: Sequence[Any]) -> list[Any]:
        """Norms are of all parts together."""
        leaf, parts = self.leaf, self._parts
        by_variable = bool(leaf.clipnorm and leaf.clipnorm > 0)
        by_all = not by_variable and bool(leaf.global_clipnorm and leaf.global_clipnorm > 0)
        if not by_all and (not by_variable or self._whole):
            return list(self._originals["_clip_gradients"](grads))
        squared = self._collective.reduce(
            [parts.squared_norms(grads)], name=f"{self._call}.norm", op="sum")[0]
        if by_variable:
            return parts.scaled(
                grads, leaf.clipnorm / tf.maximum(tf.sqrt(squared), leaf.clipnorm))
        norm, most = tf.sqrt(tf.reduce_sum(squared)), leaf.global_clipnorm
        # As Keras: a norm that is not finite makes all gradients NaN.
        factor = most * tf.minimum(1.0 / norm, 1.0 / most) + (norm - norm)
        return [g * tf.cast(factor, g.dtype) for g in grads]

    def _finalize(self, var_list: Any) -> None:
        if not self.leaf.use_ema:
            self._originals["finalize_variable_values"](var_list)
            return
        self._parts.refresh()
        self._originals["finalize_variable_values"](self._parts.parameters)
        self._parts.publish(self._names.next())
        self._parts.release()


def _looks_at_whole_variables(leaf: Any) -> bool:
    """Whether an optimizer uses all elements of a variable to update one of them."""
    known = (*keras_seam.ELEMENTWISE, *_BY_VARIABLE)
    name = type(leaf).__name__
    if name not in known or type(leaf) is not getattr(keras.optimizers, name, None):
        raise OptimizerError(
            f"zero divides the state of these optimizers of Keras: {', '.join(known)}. Received: "
            f"{name}. Of another class it is not known whether its parts can be updated apart "
            "from each other. Use one of these, or leave zero out.")
    return name in _BY_VARIABLE


def _facts(leaf: Any, variable: Any) -> VariableFacts:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if dtype not in _DTYPES:
        raise OptimizerError(
            f"zero divides variables of {' and '.join(_DTYPES)}; `{variable.path}` is of {dtype}. "
            "Use a policy that keeps variables in float32 (mixed_float16, mixed_bfloat16), or "
            "leave zero out.")
    if getattr(variable, "overwrite_with_gradient", False):
        raise OptimizerError(
            f"`{variable.path}` is overwritten with its gradient (float8), which zero cannot "
            "divide. Leave zero out.")
    return VariableFacts(size=prod(variable.shape), dtype=dtype,
                         item_bytes=np.dtype(dtype).itemsize,
                         decays=bool(leaf._use_weight_decay(variable)))


def _structure_of(leaf: Any, build: Callable[[list[Any]], None],
                 variables: Sequence[Any]) -> Structure:
    """What a plain optimizer like `leaf`, which is not built, would hold for `variables`."""
    # It is built for stand-ins without elements, which take no memory, and unbuilt again.
    stand_ins = []
    for variable in variables:
        stand_ins.append(keras.Variable(
            np.zeros((0,) * len(variable.shape)), name=variable.name, trainable=False,
            dtype=keras.backend.standardize_dtype(variable.dtype)))
        stand_ins[-1]._path = variable.path
    build(stand_ins)
    where = {id(slot): (kind, number)
             for kind, slots in keras_seam.slots(leaf, len(variables)).items()
             for number, slot in enumerate(slots) if slot is not None}
    found = [where.get(id(variable)) for variable in leaf.variables]
    keras_seam.unbuild(leaf)
    return found


def divided(optimizer: Any) -> DividedOptimizer | None:
    """The divided state of exactly this optimizer, or None: a copy has none."""
    found = getattr(optimizer, "__dict__", {}).get(_STATE)
    return found if found is not None and found.leaf is optimizer else None


def divided_leaves(optimizer: Any) -> list[DividedOptimizer]:
    """The divided states of an optimizer (or None) and those within it, in order."""
    return [] if optimizer is None else [
        found for leaf in keras_seam.leaf_optimizers(optimizer)
        if (found := divided(leaf)) is not None]


def exchanges(optimizer: Any) -> list[StateExchange]:
    """What moves the divided states of an optimizer (or None) and those within it, in order."""
    return [leaf.exchange for leaf in divided_leaves(optimizer) if leaf.exchange is not None]


@contextlib.contextmanager
def consolidated(optimizer: Any, *, keeps: bool | None = None) -> Iterator[None]:
    """Within it, the chief can save the optimizer as a plain one. All ranks.

    The state of all ranks is gathered in the memory of the chief only, unless `keeps` is given. An
    optimizer that is not divided stays as it is.

    Args:
        optimizer: A Keras optimizer, or None.
        keeps: Boolean, whether this rank can save it. Defaults to None: the chief can.

    Example:
        >>> with hvdtrain.consolidated(model.optimizer):
        ...     if session.world.is_chief:
        ...         model.save("model.keras")
    """
    found = exchanges(optimizer)
    for each in found:
        each.gather(keeps=keeps)
    try:
        yield
    finally:
        for each in found:
            each.forget()


def share_loaded(optimizer: Any) -> None:
    """Give all ranks their parts of the state that the chief has loaded. All ranks."""
    # What is equal on all ranks (iterations, learning rate) is broadcast with the weights.
    for each in exchanges(optimizer):
        each.share_loaded()


def check_callbacks(optimizer: Any, callbacks: Sequence[Any]) -> None:
    """OptimizerError for callbacks of `fit` that save a divided optimizer on the chief alone."""
    saving = tuple(getattr(keras.callbacks, name) for name in _SAVING
                   if hasattr(keras.callbacks, name))
    found = next((c for c in callbacks if isinstance(c, saving)), None)
    if found is not None and divided_leaves(optimizer):
        raise OptimizerError(
            f"The callback {type(found).__name__} saves the optimizer on the chief, which has only "
            "its part of the state (zero). Leave it out: fit writes checkpoints of the whole "
            "(checkpoint_every_epochs); or leave zero out.")


def keep_whole_files(optimizer: Any) -> None:
    """Make a divided optimizer, or one with such within it, save and load a plain file."""
    def load(original: Any, store: Any) -> None:
        values = [np.asarray(store[str(k)]) for k in range(len(store.keys()))]
        holders = _holders(optimizer)
        if len(values) != sum(getattr(holder, "count", 1) for holder in holders):
            original(store)  # says that it does not fit
            return
        for holder in holders:
            if isinstance(holder, StateExchange):
                holder.loaded, values = values[:holder.count], values[holder.count:]
                holder.take(holder.loaded)
            else:
                holder.assign(values.pop(0))

    def save(_: Any, store: Any) -> None:
        values = (value for holder in _holders(optimizer) for value in (
            holder.values() if isinstance(holder, StateExchange) else [holder.numpy()]))
        for number, value in enumerate(values):
            store[str(number)] = value
    replaced(optimizer, "save_own_variables", partial(partial, save))
    replaced(optimizer, "load_own_variables", partial(partial, load))


def _holders(optimizer: Any) -> list[Any]:
    """What has the variables of a plain optimizer, in order: variables, and divided states."""
    found = divided(optimizer)
    return [found.exchange] if found is not None and found.exchange is not None else [
        *optimizer._variables,
        *(holder for inner in keras_seam.inner_optimizers(optimizer) or []
          for holder in _holders(inner))]

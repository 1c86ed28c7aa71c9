"""ZeRO-1: each rank holds and updates one part of the optimizer's state.

In a step, gradients are averaged by a reduce-scatter, so that each rank has those of its part
only; the Keras optimizer of the rank updates that part, and an allgather gives all ranks the
whole. Like `optim.distributed` it hooks the user's own object: what Keras sees is an optimizer
that was built for fewer elements.

`zero_layout` says which rank has which part, `zero_parts` moves gradients and parameters,
`zero_state` the optimizer's state, `zero_files` keeps files whole, and `zero_check` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.errors import OptimizerError
from hvdtrain.optim import keras_seam, zero_check
from hvdtrain.optim.names import CallNames
from hvdtrain.optim.zero_layout import VariableFacts, plan_buckets
from hvdtrain.optim.zero_parts import BucketParts, Parts, WholeParts
from hvdtrain.optim.zero_state import (
    Gathered,
    StateExchange,
    Structure,
    read_structure,
    structure_of,
)

_STATE = "_hvdtrain_zero"


class DividedOptimizer:
    """What is kept and hooked on one Keras optimizer whose state is divided over the ranks.

    Args:
        leaf: A Keras optimizer, built or not.
        collective: The collective to use.
        name: String, unique to the optimizer, equal on all ranks.
        bucket_bytes: Integer, about the size of one collective.
    """

    def __init__(self, leaf: Any, collective: Collective, name: str, bucket_bytes: int) -> None:
        self.leaf = leaf
        self.structure: Structure = []
        self._collective = collective
        self._whole = zero_check.looks_at_whole_variables(leaf)
        self._names = CallNames(f"{name}.zero")
        self._call = ""
        self._bucket_bytes = bucket_bytes
        self._variables: list[Any] = []
        self._exchange: StateExchange | None = None
        self._gathered: Gathered | None = None
        self._loaded: list[Any] | None = None
        self._originals: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        """Hook the optimizer. One that is built keeps this rank's part of its state."""
        for name, method in (
                ("build", self.build), ("apply", self.apply), ("_clip_gradients", self.clip),
                ("finalize_variable_values", self.finalize),
                ("save_own_variables", self.save), ("load_own_variables", self.load)):
            self._originals[name] = getattr(self.leaf, name)
            keras_seam.set_on_instance(self.leaf, name, method)
        keras_seam.set_on_instance(self.leaf, _STATE, self)
        if self.leaf.built:
            variables = list(self.leaf._trainable_variables)
            values = [np.asarray(v.numpy()) for v in self.leaf.variables]
            structure = read_structure(self.leaf, len(variables))
            keras_seam.unbuild(self.leaf)
            self._build(variables, structure).load(values)

    def build(self, variables: Sequence[Any]) -> None:
        """In the place of the optimizer's `build`."""
        if self.leaf.built:
            return
        with tf.init_scope():
            chosen = list(variables)
            self._build(chosen, structure_of(self.leaf, self._originals["build"], chosen))

    def _build(self, variables: list[Any], structure: Structure) -> StateExchange:
        for variable in variables:
            zero_check.check_variable(variable)
        self._variables, self.structure = variables, structure
        self._parts = self._make_parts(variables)
        self._originals["build"](list(self._parts.parameters))
        self.leaf.built = True
        self._exchange = StateExchange(self._collective, self.leaf, self._parts, structure)
        for slots in self._exchange.slots.values():
            for slot in slots:
                if slot is not None:
                    keras_seam.mark_divided(slot)
        return self._exchange

    def _make_parts(self, variables: list[Any]) -> Parts:
        leaf = self.leaf
        if self._whole:
            return WholeParts(variables, self._collective)
        facts = [VariableFacts(
            size=int(np.prod(v.shape)), dtype=keras.backend.standardize_dtype(v.dtype),
            item_bytes=v.value.dtype.size, decays=bool(leaf._use_weight_decay(v)))
            for v in variables]
        buckets = plan_buckets(facts, ranks=self._collective.size,
                               bucket_bytes=self._bucket_bytes)
        parts = BucketParts(variables, buckets, self._collective)
        for parameter, bucket in zip(parts.parameters, buckets, strict=True):
            leaf._exclude_from_weight_decay_cache[leaf._var_key(parameter)] = bucket.decays
        return parts

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """In the place of the optimizer's `apply`. All ranks."""
        grads = list(grads)
        if not grads:
            return
        if not self.leaf.built:
            self.build(list(trainable_variables))
        given = self._variables if trainable_variables is None else trainable_variables
        gradients = zero_check.in_order(self.leaf, self._variables, grads, list(given))
        self._loaded = None
        self._call = name = self._names.next()
        publishes, parts = self._publishes(), self._parts
        # While gradients are accumulated, a step waits for the one before, whose names it uses.
        before = getattr(self.leaf, "_accumulated_gradients", [])
        with tf.control_dependencies([tf.convert_to_tensor(v) for v in before]):
            mine = parts.scatter([tf.identity(g) for g in gradients], name)
        parts.refresh()
        if mine:
            self._originals["apply"](mine, parts.parameters)
        else:  # more ranks than variables
            self.leaf._iterations.assign_add(1)
        if publishes is None:
            parts.publish(name)
        else:
            tf.cond(publishes, lambda: self._publish(name), lambda: tf.constant(True))
        parts.release()
        if not parts.whole:
            for variable in self._variables:
                if variable.constraint is not None:
                    variable.assign(variable.constraint(variable))

    def _publish(self, name: str) -> Any:
        self._parts.publish(name)
        return tf.constant(True)

    def _publishes(self) -> Any:
        """Whether the parameters change in this step, as a tensor; None if they always may."""
        leaf, steps = self.leaf, self.leaf.gradient_accumulation_steps
        constrained = any(v.constraint is not None for v in self._variables)
        if not steps or leaf.ema_overwrite_frequency or (self._whole and constrained):
            return None
        return (tf.convert_to_tensor(leaf._iterations) + 1) % steps == 0

    def clip(self, grads: Sequence[Any]) -> list[Any]:
        """In the place of `_clip_gradients`: norms are of all parts together. All ranks."""
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

    def finalize(self, var_list: Any) -> None:
        """In the place of `finalize_variable_values`. All ranks."""
        if not self.leaf.use_ema:
            self._originals["finalize_variable_values"](var_list)
            return
        self._parts.refresh()
        self._originals["finalize_variable_values"](self._parts.parameters)
        self._parts.publish(self._names.next())
        self._parts.release()

    def gather(self) -> None:
        """Bring the state of all ranks to the chief, until `forget`. All ranks."""
        if self._exchange is not None:
            self._gathered = self._exchange.gather()

    def forget(self) -> None:
        """Free what `gather` has brought."""
        self._gathered = None

    def values(self) -> Iterator[Any]:
        """The variables of a plain optimizer, as arrays. The chief, after `gather`."""
        if self._exchange is None:
            return iter([np.asarray(v.numpy()) for v in self.leaf.variables])
        if self._gathered is None:
            raise OptimizerError(
                f"The state of the optimizer `{self.leaf.name}` is divided over "
                f"{self._collective.size} ranks (zero), so one rank alone cannot save it. Save "
                "on the chief within `with hvdtrain.consolidated(model.optimizer):`, which all "
                "ranks enter, as fit does for its own checkpoints. Keras' callbacks "
                "ModelCheckpoint and BackupAndRestore do not.")
        return self._gathered.values()

    def save(self, store: Any) -> None:
        """In the place of `save_own_variables`: what a plain optimizer would save."""
        for number, value in enumerate(self.values()):
            store[str(number)] = value

    def load(self, store: Any) -> None:
        """In the place of `load_own_variables`: takes this rank's part of a plain file."""
        if self._exchange is None or len(store.keys()) != len(self.structure):
            self._originals["load_own_variables"](store)  # says that it does not fit
            return
        self.take([np.asarray(store[str(k)]) for k in range(len(self.structure))])

    @property
    def count(self) -> int:
        """How many variables a plain optimizer would have."""
        return len(self.leaf.variables) if self._exchange is None else len(self.structure)

    def take(self, values: list[Any]) -> None:
        """Take this rank's part of the variables of a plain optimizer."""
        if self._exchange is None:
            for variable, value in zip(self.leaf.variables, values, strict=True):
                variable.assign(value)
            return
        self._exchange.load(values)
        self._loaded = values

    def share_loaded(self) -> None:
        """Give all ranks their parts of what the chief has loaded. All ranks."""
        if self._exchange is None:
            return
        if self._collective.gather_objects(self._loaded is not None)[0]:
            self._exchange.share(self._loaded if self._collective.rank == 0 else None)
        self._loaded = None


def divide(leaf: Any, collective: Collective, name: str, bucket_bytes: int) -> None:
    """Divide the state of one Keras optimizer over the ranks, in place. All ranks.

    Args:
        leaf: A Keras optimizer that updates variables, built or not.
        collective: The collective to use.
        name: String, unique to the optimizer, equal on all ranks.
        bucket_bytes: Integer, about the size of one collective.

    Raises:
        OptimizerError: It is of a class, or for variables, that cannot be divided.
    """
    DividedOptimizer(leaf, collective, name, bucket_bytes).install()


def divided(leaf: Any) -> DividedOptimizer | None:
    """What `divide` has put on exactly this optimizer, or None."""
    found = getattr(leaf, "__dict__", {}).get(_STATE)
    return found if found is not None and found.leaf is leaf else None

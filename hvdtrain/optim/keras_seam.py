"""The private parts of Keras' optimizers that hvdtrain leans on; of its models: `keras_model`.

A distributed optimizer is the user's own object with a few methods replaced *on the instance*,
so that its class, config and saved files stay plain Keras. The methods, in the order in which
one training step runs them (Keras 3.5 and later):

    scale_loss -> apply -> _backend_apply_gradients -> _clip_gradients -> update

`_clip_gradients` runs once per applied update, after loss unscaling and gradient accumulation
and before clipping and weight decay: that is where gradients are reduced. Keras before 3.5
clipped in `apply`.

`check_keras` compares versions and signatures; `self_test` runs an optimizer for three steps
and watches the order. Both are cheap and run at every start.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from packaging.version import Version

from hvdtrain.errors import OptimizerError

KERAS_MIN, KERAS_BELOW = Version("3.5"), Version("3.16")
_DIVIDED = "_hvdtrain_divided"
_REPLACED = "_hvdtrain_replaced"
_SIGNATURES = {
    "apply": ["grads", "trainable_variables"],
    "scale_loss": ["loss"],
    "_backend_apply_gradients": ["grads", "trainable_variables"],
    "_clip_gradients": ["grads"],
    "_get_variable_index": ["variable"],
    "_overwrite_variables_directly_with_gradients": ["grads", "vars"],
    "_get_current_learning_rate": [],
}
_IS_LOCAL = "_hvdtrain_is_local"
Optimizer = Any


@dataclass(frozen=True)
class Hidden:
    """A value on a Keras object that Keras does not save: it looks into lists and dictionaries."""

    value: Any


def set_on_instance(obj: object, name: str, value: object) -> None:
    """Set an attribute past the tracking of Keras and TensorFlow."""
    object.__setattr__(obj, name, value)


def replace_method(optimizer: Optimizer, name: str,
                   make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `optimizer.name` on this instance by `make(the method it had)`."""
    original = getattr(optimizer, name)
    if _REPLACED not in optimizer.__dict__:
        set_on_instance(optimizer, _REPLACED, Hidden([]))
    optimizer.__dict__[_REPLACED].value.append((name, original))
    set_on_instance(optimizer, name, make(original))


def restore_all(optimizer: Optimizer) -> None:
    """Undo every `replace_method` on this instance."""
    for name, original in reversed(optimizer.__dict__.pop(_REPLACED, Hidden([])).value):
        restore_method(optimizer, name, original)
    optimizer.__dict__.pop(_IS_LOCAL, None)


def restore_method(obj: object, name: str, original: Callable[..., Any]) -> None:
    """Undo `replace_method`: give the instance the method that it had."""
    if getattr(original, "__func__", None) is getattr(type(obj), name, None):
        object.__delattr__(obj, name)
    else:
        set_on_instance(obj, name, original)


def check_keras(version: str | None = None) -> None:
    """Refuse a Keras that is not known, by version and by the methods it lacks.

    Args:
        version: String, the version to judge; defaults to the installed one.

    Raises:
        OptimizerError: Naming the version found and the range expected, or the method.
    """
    found = Version(version or keras.__version__)
    if not KERAS_MIN <= found < KERAS_BELOW:
        raise OptimizerError(
            f"Keras {found} is installed; hvdtrain knows {KERAS_MIN} to {KERAS_BELOW} "
            "(exclusive). Distributed gradients hook methods that are private to Keras, so "
            f"another version could train wrongly without a word. Install one that is known: "
            f"pip install 'keras>={KERAS_MIN},<{KERAS_BELOW}'")
    if keras.backend.backend() != "tensorflow":
        raise OptimizerError(
            f"Keras runs on the backend {keras.backend.backend()!r}; hvdtrain needs "
            "'tensorflow'. Set KERAS_BACKEND=tensorflow before Keras is imported.")
    for name, expected in _SIGNATURES.items():
        method = getattr(keras.optimizers.Optimizer, name, None)
        found_names = list(inspect.signature(method).parameters)[1:] if method else None
        if found_names != expected:
            raise OptimizerError(
                f"Keras {found}: Optimizer.{name}({', '.join(expected)}) was expected, found "
                f"{'nothing' if found_names is None else found_names}. This Keras is not "
                "known to hvdtrain; install another (see above range) or report it.")


def self_test() -> None:
    """Run a small optimizer and check that the hooks are called where they must be.

    Raises:
        OptimizerError: Keras calls them in another order or another number of times.
    """
    seen: list[str] = []

    def watched(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(*args: Any) -> Any:
                seen.append(name)
                return original(*args)
            return method
        return make

    with tf.init_scope(), tf.device("CPU:0"):
        variable = tf.Variable([1.0], name="hvdtrain_self_test")
        optimizer = keras.optimizers.SGD(
            0.5, clipvalue=1.0, gradient_accumulation_steps=2, name="hvdtrain_self_test")
        optimizer.build([variable])
        for name in ("_backend_apply_gradients", "_clip_gradients"):
            replace_method(optimizer, name, watched(name))
        for gradient in (1.0, 3.0):
            optimizer.apply([tf.constant([gradient])], [variable])
        value = float(variable[0])
    expected = ["_backend_apply_gradients"] * 2 + ["_clip_gradients"]
    if seen != expected or abs(value - 0.5) > 1e-6:
        raise OptimizerError(
            f"Keras {keras.__version__} does not apply gradients as expected: two accumulated "
            f"steps called {seen} (expected {expected}) and left {value} (expected 0.5). "
            f"Install a Keras from {KERAS_MIN} to {KERAS_BELOW} that is known.")


def is_loss_scale(optimizer: Optimizer) -> bool:
    """Whether this is a `LossScaleOptimizer`."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def is_multi(optimizer: Optimizer) -> bool:
    """Whether this is a `MultiOptimizer` (Keras has it since 3.11)."""
    multi = getattr(keras.optimizers, "MultiOptimizer", None)
    return multi is not None and isinstance(optimizer, multi)


def found_optimizers(model: Any) -> list[Optimizer]:
    """All optimizers of a model: that of `compile`, and those in attributes (`d_optimizer`).

    Without duplicates, and without those within another one; in an order that depends on the
    model's class only.
    """
    found: dict[int, Optimizer] = {}
    left = [getattr(model, "optimizer", None), *vars(model).values()]
    while left:
        value = left.pop(0)
        if isinstance(value, keras.optimizers.Optimizer):
            found.setdefault(id(value), value)
        elif isinstance(value, (list, tuple)):
            left += value
        elif isinstance(value, dict):
            left += value.values()
    within = {id(leaf) for o in found.values() for leaf in leaf_optimizers(o) if leaf is not o}
    return [o for o in found.values() if id(o) not in within]


def optimizers_of(model: Any) -> list[Optimizer]:
    """The optimizers that train a built model; empty if it has none.

    `compile()` of a class that has optimizers of its own makes one more, which is never built.
    """
    found = found_optimizers(model)
    return [o for o in found if o.built] or found[:1]


def leaf_optimizers(optimizer: Any) -> list[Optimizer]:
    """The optimizers that update variables, below loss scaling and `MultiOptimizer`.

    Args:
        optimizer: One, or a list of several.
    """
    if isinstance(optimizer, (list, tuple)):
        return [leaf for one in optimizer for leaf in leaf_optimizers(one)]
    if is_loss_scale(optimizer):
        return leaf_optimizers(optimizer.inner_optimizer)
    if is_multi(optimizer):
        return [leaf for inner in optimizer.optimizers for leaf in leaf_optimizers(inner)]
    return [optimizer]


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers directly within one: of a list, of loss scaling and `MultiOptimizer`."""
    if isinstance(optimizer, (list, tuple)):
        return list(optimizer)
    if is_loss_scale(optimizer):
        return [optimizer.inner_optimizer]
    return list(optimizer.optimizers) if is_multi(optimizer) else []


def build_order(optimizer: Optimizer, variables: list[Any]) -> list[int]:
    """Positions of `variables` in the order in which the optimizer was built."""
    index = [optimizer._get_variable_index(v) for v in variables]
    return sorted(range(len(variables)), key=index.__getitem__)


def updates_rows(leaf: Optimizer) -> bool:
    """Whether an optimizer changes only the rows of a sparse gradient.

    Those of Keras make it dense instead, but for two; others are taken at their word.
    """
    if type(leaf) is keras.optimizers.SGD:
        return not leaf.momentum
    own = not type(leaf).__module__.startswith("keras.src.optimizers")
    return own or type(leaf) is keras.optimizers.Adagrad


def rate_variable(leaf: Optimizer) -> Any | None:
    """The variable of a learning rate that is a number; None where it is a schedule."""
    rate = leaf._learning_rate
    return rate if hasattr(rate, "assign") else None


def steps_done(optimizer: Optimizer) -> int:
    """Training steps that an optimizer has seen, also those that only accumulated."""
    return int(leaf_optimizers(optimizer)[0]._iterations.numpy())


def variable_path(variable: Any) -> str:
    """A variable's name with its layers, for messages and for choosing by name."""
    path = getattr(variable, "path", None)
    if path is None and hasattr(variable, "assign"):
        path = variable.name.split(":")[0]  # a variable of TensorFlow
    return str(path or "a tensor")


def variable_key(variable: Any) -> str | None:
    """What tells a variable apart from all others of this process; None for a tensor."""
    inner = getattr(variable, "value", variable)
    if callable(inner):  # TensorFlow's own variables have a method of that name
        inner = variable
    key: str | None = getattr(inner, "_unique_id", None)
    return key


def mark_local(leaf: Optimizer, is_local: Callable[[Any], bool]) -> None:
    """Remember which variables each rank has for itself."""
    set_on_instance(leaf, _IS_LOCAL, is_local)


def shared_weights(optimizer: Optimizer, variables: Iterable[Any]) -> list[Any]:
    """Those of `variables` whose gradients are averaged over ranks: equal on all ranks."""
    tests = [leaf.__dict__[_IS_LOCAL] for leaf in leaf_optimizers(optimizer)
             if _IS_LOCAL in leaf.__dict__]
    return [v for v in variables if not any(is_local(v) for is_local in tests)]


def shared_variables(optimizer: Optimizer) -> list[Any]:
    """The optimizer's variables that are equal on all ranks.

    That is all but gradient accumulators, which hold what one rank gathered since the last
    update, the states of variables that each rank has for itself, and states that are divided.
    """
    own = {id(v) for leaf in leaf_optimizers(optimizer)
           for v in [*getattr(leaf, "_accumulated_gradients", []), *local_slots(leaf)]}
    return [v for v in variables_of(optimizer) if id(v) not in own and not is_divided(v)]


def variables_of(optimizer: Any) -> list[Any]:
    """The variables of one optimizer, or of several."""
    several = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return [v for one in several for v in one.variables]


def local_slots(leaf: Optimizer) -> list[Any]:
    """The states of local variables: Keras keeps each kind in a list, in build order."""
    is_local = leaf.__dict__.get(_IS_LOCAL)
    if is_local is None:
        return []
    trainable = list(leaf._trainable_variables)
    local = [i for i, v in enumerate(trainable) if is_local(v)]
    slots = [values for name, values in vars(leaf).items()
             if isinstance(values, list) and len(values) == len(trainable)
             and name not in ("_variables", "_trainable_variables")]
    return [values[i] for values in slots for i in local]


def open_accumulators(optimizer: Optimizer) -> list[Any]:
    """The gradients that wait for the next update, of weights that are equal on all ranks.

    Empty between two updates; else one variable for each weight, in build order.
    """
    found: list[Any] = []
    for leaf in leaf_optimizers(optimizer):
        steps = leaf.gradient_accumulation_steps
        if leaf.built and steps and int(leaf._iterations.numpy()) % steps:
            own = {id(v) for v in local_slots(leaf)}
            found += [v for v in leaf._accumulated_gradients
                      if v is not None and id(v) not in own and not is_divided(v)]
    return found


def slots(optimizer: Optimizer, count: int) -> dict[str, list[Any]]:
    """What a built optimizer keeps for its variables: attribute -> a variable (or None) each.

    Args:
        optimizer: One that updates variables.
        count: Integer, how many it was built for.
    """
    if not count:
        return {}
    return {name: list(value) for name, value in vars(optimizer).items()
            if name not in ("_variables", "_trainable_variables")
            and isinstance(value, list) and len(value) == count
            and any(v is not None for v in value)
            and all(v is None or isinstance(v, keras.Variable) for v in value)}


def build(optimizer: Optimizer, variables: Sequence[Any]) -> None:
    """Build an optimizer as its `apply` does."""
    with keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(variables)
    optimizer.built = True


def unbuild(optimizer: Optimizer) -> None:
    """Forget what `build` has made, so that the optimizer can be built for other variables."""
    kept = {id(optimizer._iterations), id(optimizer._learning_rate)}
    for variable in optimizer.variables:
        if id(variable) not in kept:
            optimizer._untrack_variable(variable)
    optimizer._trainable_variables_indices.clear()
    optimizer.built = False


def is_overwritten(variable: Any) -> bool:
    """Whether a variable takes its gradient as its value (scales of float8)."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def mark_divided(variable: Any) -> None:
    """Note that each rank has another part of this variable."""
    set_on_instance(variable, _DIVIDED, True)


def is_divided(variable: Any) -> bool:
    """Whether each rank has another part of this variable."""
    return _DIVIDED in getattr(variable, "__dict__", {})


def inside_xla() -> bool:
    """Whether the graph being traced will be compiled by XLA as a whole."""
    if tf.executing_eagerly():
        return False
    from tensorflow.python.ops import control_flow_util
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def outermost_graph() -> Any:
    """The graph of the outermost `tf.function` being traced (branches have their own)."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph
    return graph


def global_seed_variable() -> Any:
    """The state of Keras' global seed generator; layers without a seed of their own use it.

    Keras seeds it from Python's generator when it is first used; what a script draws from that
    stays what it is.
    """
    from keras.src.random.seed_generator import global_seed_generator
    before = random.getstate()
    try:
        return global_seed_generator().state
    finally:
        random.setstate(before)

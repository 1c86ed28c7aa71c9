"""The private parts of Keras' optimizers that hvdtrain uses; for models see `keras_model`.

A distributed optimizer is the user's own object with a few methods replaced *on the instance*, so
that its class, config and saved files stay plain Keras. The methods, in the order in which one
training step runs them (Keras 3.7 and later):

    scale_loss -> apply -> _backend_apply_gradients -> _clip_gradients -> update

`_clip_gradients` runs once per applied update, after loss unscaling and gradient accumulation and
before clipping and weight decay: gradients are reduced there.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from packaging.version import Version

from hvdtrain.errors import OptimizerError

KERAS_MIN, KERAS_BELOW = Version("3.7"), Version("3.16")
ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam",
               "Ftrl", "Lion")
"""Keras optimizers that update each element of a variable independently."""
DIVIDED = "_hvdtrain_divided"
"""The attribute of a variable of which each rank has another part."""
_UNDO = "_hvdtrain_undo"
IS_LOCAL = "_hvdtrain_is_local"
"""The attribute of an optimizer with its function for local variables."""
_FINITE_STEP = "_stateful_handle_finite_grads"
"""The method of `LossScaleOptimizer` that applies finite gradients."""
_SIGNATURES = {
    keras.optimizers.Optimizer: {
        "apply": ["grads", "trainable_variables"],
        "scale_loss": ["loss"],
        "_backend_apply_gradients": ["grads", "trainable_variables"],
        "_clip_gradients": ["grads"],
        "_get_variable_index": ["variable"],
        "_overwrite_variables_directly_with_gradients": ["grads", "vars"],
        "_get_current_learning_rate": [],
        "_use_weight_decay": ["variable"],
        "_var_key": ["variable"],
    },
    keras.optimizers.LossScaleOptimizer: {
        "check_finite": ["grads"],
        _FINITE_STEP: ["grads", "trainable_variables"],
    },
}
Optimizer = Any


@dataclass(frozen=True)
class Hidden:
    """A value on a Keras object that Keras does not save: it looks into lists and dictionaries."""

    value: Any


def set_on_instance(obj: object, name: str, value: object) -> None:
    """Set an attribute past the tracking of Keras and TensorFlow."""
    object.__setattr__(obj, name, value)


def replaced(obj: object, name: str, make: Callable[..., Any]) -> Callable[[], None]:
    """Replace `obj.name` on this instance by `make(old)`; returns a function that undoes it."""
    before = vars(obj).get(name)
    set_on_instance(obj, name, make(getattr(obj, name)))
    return functools.partial(object.__delattr__, obj, name) if before is None else (
        functools.partial(set_on_instance, obj, name, before))


def replace_method(optimizer: Optimizer, name: str, make: Callable[..., Any]) -> None:
    """As `replaced`, until `restore_all`."""
    undo = replaced(optimizer, name, make)
    if _UNDO not in optimizer.__dict__:
        set_on_instance(optimizer, _UNDO, Hidden([]))
    optimizer.__dict__[_UNDO].value.append(undo)


def hook(optimizer: Optimizer, **methods: Callable[..., Any]) -> None:
    """Replace methods by functions that get the original method and then its arguments."""
    for name, method in methods.items():
        replace_method(optimizer, name, functools.partial(functools.partial, method))


@contextmanager
def hooked(obj: object, **methods: Callable[..., Any]) -> Iterator[None]:
    """As `hook`, while it is entered."""
    with ExitStack() as undo:
        for name, method in methods.items():
            undo.callback(replaced(obj, name, functools.partial(functools.partial, method)))
        yield


def restore_all(optimizer: Optimizer) -> None:
    """Undo every `replace_method` and `hook` on this instance."""
    for undo in reversed(optimizer.__dict__.pop(_UNDO, Hidden([])).value):
        undo()
    optimizer.__dict__.pop(IS_LOCAL, None)


def check_keras(version: str | None = None) -> None:
    """Refuse an unsupported Keras (default: the installed one), by version and by what it lacks."""
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
    for cls, methods in _SIGNATURES.items():
        for name, expected in methods.items():
            method = getattr(cls, name, None)
            found_names = list(inspect.signature(method).parameters)[1:] if method else None
            if found_names != expected:
                raise OptimizerError(
                    f"Keras {found}: {cls.__name__}.{name}({', '.join(expected)}) was expected, "
                    f"found {'nothing' if found_names is None else found_names}. This Keras is "
                    "not known to hvdtrain; install another (see above range) or report it.")


def self_test() -> None:
    """Run a small optimizer and refuse a Keras that calls the hooks elsewhere."""
    seen: list[str] = []

    def watched(name: str, original: Callable[..., Any], *args: Any) -> Any:
        seen.append(name)
        return original(*args)

    with tf.init_scope(), tf.device("CPU:0"):
        variable = tf.Variable([1.0], name="hvdtrain_self_test")
        optimizer = keras.optimizers.SGD(
            0.5, clipvalue=1.0, gradient_accumulation_steps=2, name="hvdtrain_self_test")
        optimizer.build([variable])
        hook(optimizer, **{name: functools.partial(watched, name)
                           for name in ("_backend_apply_gradients", "_clip_gradients")})
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


def calling_loss_scale() -> Optimizer | None:
    """The `LossScaleOptimizer` that is applying finite gradients now, outside of this call."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != _FINITE_STEP:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")


def is_multi(optimizer: Optimizer) -> bool:
    """Whether this is a `MultiOptimizer` (new in Keras 3.11)."""
    return isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ()))


def found_optimizers(model: Any) -> list[Optimizer]:
    """All outermost optimizers of a model, from `compile` and from attributes."""
    # The order depends on the model's class only.
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
    """The optimizers that train a built model; empty if it has none."""
    found = found_optimizers(model)
    # `compile` of a class that has optimizers of its own makes one more, which is never built.
    return [o for o in found if o.built] or found[:1]


def inner_optimizers(optimizer: Any) -> list[Optimizer] | None:
    """The optimizers directly within a list, loss scaling or `MultiOptimizer`; else None."""
    if isinstance(optimizer, (list, tuple)):
        return list(optimizer)
    if is_loss_scale(optimizer):
        return [optimizer.inner_optimizer]
    return list(optimizer.optimizers) if is_multi(optimizer) else None


def leaf_optimizers(optimizer: Any) -> list[Optimizer]:
    """The innermost optimizers, which update variables, of one optimizer or of several."""
    inner = inner_optimizers(optimizer)
    return [optimizer] if inner is None else [
        leaf for one in inner for leaf in leaf_optimizers(one)]


def trained(leaf: Optimizer) -> list[Any]:
    """The variables that an optimizer was built for, in that order."""
    return list(leaf._trainable_variables)


def in_build_order(leaf: Optimizer, grads: Iterable[Any], variables: Iterable[Any],
                   ) -> tuple[list[int], list[Any], list[Any]]:
    """Indices, gradients and variables, in the order in which the optimizer was built."""
    found = sorted(((leaf._get_variable_index(v), g, v)
                    for g, v in zip(grads, variables, strict=True)), key=lambda one: one[0])
    return [i for i, _, _ in found], [g for _, g, _ in found], [v for _, _, v in found]


def updates_rows(leaf: Optimizer) -> bool:
    """Whether an optimizer changes only the rows of a sparse gradient."""
    # Those of Keras make it dense instead, but for two; others are taken at their word.
    if type(leaf) is keras.optimizers.SGD:
        return not leaf.momentum
    return type(leaf) is keras.optimizers.Adagrad or (
        not type(leaf).__module__.startswith("keras.src.optimizers"))


def rate_variable(leaf: Optimizer) -> Any | None:
    """The variable of a constant learning rate; None for a schedule."""
    return leaf._learning_rate if hasattr(leaf._learning_rate, "assign") else None


def iterations(optimizer: Optimizer) -> Any:
    """The variable that counts steps, also those that only accumulate."""
    return leaf_optimizers(optimizer)[0]._iterations


def steps_done(optimizer: Optimizer) -> int:
    """Training steps done, also those that only accumulated."""
    return int(iterations(optimizer).numpy())


def variable_path(variable: Any) -> str:
    """A variable's name with its layers, for messages and for choosing by name."""
    path = getattr(variable, "path", None)
    if path is None and hasattr(variable, "assign"):
        path = variable.name.split(":")[0]  # a variable of TensorFlow
    return str(path or "a tensor")


def is_variable(value: Any) -> bool:
    """Whether this is a variable of Keras."""
    # In TensorFlow's own variables, `value` is a method.
    return hasattr(value, "assign") and not callable(getattr(value, "value", None))


def has_value(variable: Any) -> bool:
    """Whether a variable is initialized: one that was made while tracing is not yet."""
    return bool((variable.value if is_variable(variable) else variable).is_initialized())


def variable_key(variable: Any) -> str | None:
    """The unique key of a variable in this process; None for a tensor."""
    inner = getattr(variable, "value", variable)  # a method of TensorFlow's own variables
    return getattr(variable if callable(inner) else inner, "_unique_id", None)


def shared_weights(optimizer: Optimizer, variables: Iterable[Any]) -> list[Any]:
    """Those of `variables` whose gradients are averaged over ranks: equal on all ranks."""
    tests = [leaf.__dict__[IS_LOCAL] for leaf in leaf_optimizers(optimizer)
             if IS_LOCAL in leaf.__dict__]
    return [v for v in variables if not any(is_local(v) for is_local in tests)]


def shared_variables(optimizer: Optimizer) -> list[Any]:
    """The optimizer's variables that are equal on all ranks."""
    # Not among them: gradient accumulators, which hold one rank's sum since the last update, the
    # states of local variables, and states that are divided.
    own = {id(v) for leaf in leaf_optimizers(optimizer)
           for v in [*accumulators(leaf), *local_slots(leaf)]}
    return [v for v in variables_of(optimizer) if id(v) not in own and not is_divided(v)]


def variables_of(optimizer: Any) -> list[Any]:
    """The variables of one optimizer, or of several."""
    several = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return [v for one in several for v in one.variables]


def slots(leaf: Optimizer, count: int) -> dict[str, list[Any]]:
    """The slots of an optimizer for `count` variables: attribute -> one (or None) for each."""
    if not count:
        return {}
    return {name: list(value) for name, value in vars(leaf).items()
            if name not in ("_variables", "_trainable_variables")
            and isinstance(value, list) and len(value) == count
            and any(v is not None for v in value)
            and all(v is None or is_variable(v) for v in value)}


def local_slots(leaf: Optimizer) -> list[Any]:
    """The states of variables that are local to each rank."""
    is_local, variables = leaf.__dict__.get(IS_LOCAL, lambda _: False), trained(leaf)
    local = [i for i, v in enumerate(variables) if is_local(v)]
    return [kept[i] for kept in slots(leaf, len(variables)).values() for i in local]


def accumulators(leaf: Optimizer) -> list[Any]:
    """The gradient accumulators of an optimizer (or None), in build order."""
    return list(getattr(leaf, "_accumulated_gradients", []))


def velocities(leaf: Optimizer) -> list[Any]:
    """The momentum of each variable, of an optimizer with one learning rate within it."""
    if not leaf.built or not getattr(leaf, "momentum", 0.0):
        return []
    return [v for name, kept in slots(leaf, len(trained(leaf))).items()
            if name.lstrip("_") == "momentums" for v in kept if v is not None]


def build(optimizer: Optimizer, variables: Sequence[Any]) -> None:
    """Build an optimizer as its `apply` does."""
    with keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(variables)
    optimizer.built = True


def unbuild(leaf: Optimizer) -> None:
    """Undo `build`, so that the optimizer can be built for other variables."""
    kept = {id(leaf._iterations), id(leaf._learning_rate)}
    for variable in leaf.variables:
        if id(variable) not in kept:
            leaf._untrack_variable(variable)
    leaf._trainable_variables_indices.clear()
    leaf.built = False


def is_divided(variable: Any) -> bool:
    """Whether each rank has another part of this variable."""
    return DIVIDED in getattr(variable, "__dict__", {})


def global_seed_variable() -> Any:
    """The state of Keras' global seed generator; layers without a seed of their own use it."""
    from keras.src.random.seed_generator import global_seed_generator
    before = random.getstate()  # Keras draws its seed from it, and a script may too
    try:
        return global_seed_generator().state
    finally:
        random.setstate(before)

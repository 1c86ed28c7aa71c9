"""The private parts of Keras that hvdtrain leans on: all of them, and only here.

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
import io
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf
from packaging.version import Version

from hvdtrain.errors import OptimizerError

KERAS_MIN, KERAS_BELOW = Version("3.5"), Version("3.16")
MOMENTS = "_moments"
"""The method of `BatchNormalization` that computes mean and variance of a batch."""
_DIVIDED = "_hvdtrain_divided"
_SIGNATURES = {
    "apply": ["grads", "trainable_variables"],
    "scale_loss": ["loss"],
    "_backend_apply_gradients": ["grads", "trainable_variables"],
    "_clip_gradients": ["grads"],
    "_get_variable_index": ["variable"],
    "_get_current_learning_rate": [],
}
_IS_LOCAL = "_hvdtrain_is_local"
Optimizer = Any


def set_on_instance(obj: object, name: str, value: object) -> None:
    """Set an attribute past the tracking of Keras and TensorFlow."""
    object.__setattr__(obj, name, value)


def replace_method(optimizer: Optimizer, name: str,
                   make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `optimizer.name` on this instance by `make(the method it had)`."""
    set_on_instance(optimizer, name, make(getattr(optimizer, name)))


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


def metrics_are_built(model: Any) -> bool:
    """Whether the compiled metrics have their states."""
    parts = [model._compile_metrics, model._compile_loss]
    return all(part is None or part.built for part in parts)


def build_metrics(model: Any, batch: Any) -> None:
    """Create the states of compiled metrics, which Keras leaves to the first step.

    Args:
        model: A compiled model.
        batch: Some samples, as `train_step` gets them: arrays `x`, `(x, y)` or
            `(x, y, sample_weight)`.
    """
    model._symbolic_build(data_batch=tf.nest.map_structure(tf.convert_to_tensor, batch))


def call_in_training(model: Any, x: Any) -> Any:
    """The forward pass of a training step."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def leaf_metrics(model: Any) -> list[Any]:
    """The metrics of a model, those given to `compile` one by one, without duplicates."""
    found: dict[int, Any] = {}
    for metric in model.metrics:
        for leaf in getattr(metric, "metrics", None) or [metric]:
            found.setdefault(id(leaf), leaf)
    return list(found.values())


def mask_of(tensor: Any) -> Any | None:
    """The mask that layers or losses have put on a tensor."""
    from keras.src import backend
    return backend.get_keras_mask(tensor)


def sum_of_weights(sample_weight: Any | None, mask: Any | None, dtype: Any) -> Any:
    """The denominator of the reduction `mean_with_sample_weight`."""
    from keras.src.losses.loss import apply_mask
    weight = None if sample_weight is None else tf.cast(sample_weight, dtype)
    return tf.reduce_sum(apply_mask(weight, mask, dtype, "mean_with_sample_weight"))


def replace_losses(compiled: Any, make: Callable[[int, Any], Any]) -> None:
    """Replace each loss of a `CompileLoss` by `make(its number, it)`, now or once it is built.

    What is saved with a model is what was given to `compile`, so that files do not change.
    """
    def replace() -> None:
        compiled._flat_losses = [entry._replace(loss=make(number, entry.loss))
                                 for number, entry in enumerate(compiled._flat_losses)]
    if compiled.built:
        replace()
        return
    build = compiled.build

    def built(y_true: Any, y_pred: Any) -> None:
        build(y_true, y_pred)
        restore_method(compiled, "build", build)
        replace()
    set_on_instance(compiled, "build", built)


def save_to_memory(model: Any, file: io.BytesIO) -> None:
    """Write the `.keras` file of a model into memory."""
    from keras.src.saving import saving_lib
    saving_lib.save_model(model, file)


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


def leaf_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that update variables, below loss scaling and `MultiOptimizer`."""
    if is_loss_scale(optimizer):
        return leaf_optimizers(optimizer.inner_optimizer)
    if is_multi(optimizer):
        return [leaf for inner in optimizer.optimizers for leaf in leaf_optimizers(inner)]
    return [optimizer]


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers directly within one: of loss scaling and `MultiOptimizer`."""
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
    return [v for v in optimizer.variables if id(v) not in own and not is_divided(v)]


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


def unbuild(optimizer: Optimizer) -> None:
    """Forget what `build` has made, so that the optimizer can be built for other variables."""
    kept = {id(optimizer._iterations), id(optimizer._learning_rate)}
    for variable in optimizer.variables:
        if id(variable) not in kept:
            optimizer._untrack_variable(variable)
    optimizer._trainable_variables_indices.clear()
    optimizer.built = False


def mark_divided(variable: Any) -> None:
    """Note that each rank has another part of this variable."""
    set_on_instance(variable, _DIVIDED, True)


def is_divided(variable: Any) -> bool:
    """Whether each rank has another part of this variable."""
    return _DIVIDED in getattr(variable, "__dict__", {})


def check_batch_normalization() -> None:
    """Refuse a Keras whose batch normalization does not take its moments from one method.

    Raises:
        OptimizerError: Naming what was expected.
    """
    check_keras()
    cls = keras.layers.BatchNormalization
    method = getattr(cls, MOMENTS, None)
    found = list(inspect.signature(method).parameters)[1:] if method else None
    called = MOMENTS in inspect.unwrap(cls.call).__code__.co_names
    if found != ["inputs", "mask"] or not called:
        raise OptimizerError(
            f"Keras {keras.__version__}: BatchNormalization.call was expected to use "
            f"{MOMENTS}(inputs, mask), found {'nothing' if found is None else found}. This Keras "
            "is not known to hvdtrain; leave sync_batch_norm out, or install another.")


def batch_normalizations(model: Any) -> list[Any]:
    """The batch normalizations of a model, in its order; those of models within it too.

    Raises:
        OptimizerError: One has a method of its own for the moments.
    """
    cls = keras.layers.BatchNormalization
    found = [layer for layer in model._flatten_layers() if isinstance(layer, cls)]
    for layer in found:
        if getattr(type(layer), MOMENTS) is not getattr(cls, MOMENTS):
            raise OptimizerError(
                f"The layer `{layer.name}` ({type(layer).__name__}) computes its moments in its "
                f"own way ({MOMENTS}), so it cannot be synchronized over ranks. Use a "
                "keras.layers.BatchNormalization, or leave sync_batch_norm out.")
    return found


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
    """The state of Keras' global seed generator; layers without a seed of their own use it."""
    from keras.src.random.seed_generator import global_seed_generator
    return global_seed_generator().state

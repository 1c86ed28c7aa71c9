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
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from packaging.version import Version

from hvdtrain.errors import OptimizerError

KERAS_MIN, KERAS_BELOW = Version("3.5"), Version("3.16")
_SIGNATURES = {
    "apply": ["grads", "trainable_variables"],
    "scale_loss": ["loss"],
    "_backend_apply_gradients": ["grads", "trainable_variables"],
    "_clip_gradients": ["grads"],
    "_get_variable_index": ["variable"],
    "_get_current_learning_rate": [],
}
Optimizer = Any


def set_on_instance(obj: object, name: str, value: object) -> None:
    """Set an attribute past the tracking of Keras and TensorFlow."""
    object.__setattr__(obj, name, value)


def replace_method(optimizer: Optimizer, name: str,
                   make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `optimizer.name` on this instance by `make(the method it had)`."""
    set_on_instance(optimizer, name, make(getattr(optimizer, name)))


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


def build_metrics(model: Any, batch: Any) -> None:
    """Create the states of compiled metrics, which Keras leaves to the first step.

    Args:
        model: A compiled model.
        batch: Some samples, as `train_step` gets them: arrays `x`, `(x, y)` or
            `(x, y, sample_weight)`.
    """
    model._symbolic_build(data_batch=tf.nest.map_structure(tf.convert_to_tensor, batch))


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


def build_order(optimizer: Optimizer, variables: list[Any]) -> list[int]:
    """Positions of `variables` in the order in which the optimizer was built."""
    index = [optimizer._get_variable_index(v) for v in variables]
    return sorted(range(len(variables)), key=index.__getitem__)


def rate_variable(leaf: Optimizer) -> Any | None:
    """The variable of a learning rate that is a number; None where it is a schedule."""
    rate = leaf._learning_rate
    return rate if hasattr(rate, "assign") else None


def steps_done(optimizer: Optimizer) -> int:
    """Training steps that an optimizer has seen, also those that only accumulated."""
    return int(leaf_optimizers(optimizer)[0]._iterations.numpy())


def shared_variables(optimizer: Optimizer) -> list[Any]:
    """The optimizer's variables that are equal on all ranks.

    That is all but gradient accumulators: they hold what one rank gathered since the last
    update.
    """
    own = {id(v) for leaf in leaf_optimizers(optimizer)
           for v in getattr(leaf, "_accumulated_gradients", [])}
    return [v for v in optimizer.variables if id(v) not in own]


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

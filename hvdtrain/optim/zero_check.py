"""What zero cannot do, said before the first step."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import OptimizerError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.options import ReducerOptions

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam",
                "Ftrl", "Lion")
_BY_VARIABLE = ("Adafactor", "Lamb", "Muon")
_DTYPES = ("float32", "float64")


def looks_at_whole_variables(leaf: Any) -> bool:
    """Whether an optimizer uses all elements of a variable to update one of them.

    Raises:
        OptimizerError: It is not known.
    """
    known = (*_ELEMENTWISE, *_BY_VARIABLE)
    name = type(leaf).__name__
    if name not in known or type(leaf) is not getattr(keras.optimizers, name, None):
        raise OptimizerError(
            f"zero divides the state of these optimizers of Keras: {', '.join(known)}. Received: "
            f"{name}. Of another class it is not known whether its parts can be updated apart "
            "from each other. Use one of these, or leave zero out.")
    return name in _BY_VARIABLE


def check_options(options: ReducerOptions) -> None:
    """Refuse ways to reduce gradients that zero does not have.

    Raises:
        OptimizerError: Naming the first.
    """
    plain = ReducerOptions()
    for name in ("compression", "predivide", "op", "local_variables", "merge"):
        if getattr(options, name) != getattr(plain, name):
            raise OptimizerError(
                f"zero averages whole gradients, so it cannot be combined with {name}="
                f"{getattr(options, name)!r}. Leave one of the two out.")


def check_variable(variable: Any) -> None:
    """Refuse a variable whose state cannot be divided.

    Raises:
        OptimizerError: Naming it.
    """
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


def in_order(leaf: Any, variables: list[Any], grads: list[Any], given: list[Any]) -> list[Any]:
    """The gradients in the order of building, one for each variable, dense.

    Args:
        leaf: The Keras optimizer.
        variables: List of the variables that it was built for.
        grads: List of gradients: tensors, `IndexedSlices` or None.
        given: List of their variables.

    Raises:
        OptimizerError: A variable has no gradient, or XLA compiles the step.
    """
    if keras_seam.inside_xla():
        raise OptimizerError(
            "The whole train step is being compiled by XLA (jit_compile=True), but the "
            "collectives have no XLA kernel. Call model.compile(..., jit_compile=False).")
    key = leaf._var_key
    found = {key(v): g for v, g in zip(given, grads, strict=True) if g is not None}
    missing = [v for v in variables if key(v) not in found]
    if missing or len(found) != len(variables):
        which = f"`{missing[0].path}` has none" if missing else "there are more"
        raise OptimizerError(
            f"With zero, each step needs one gradient for each of the {len(variables)} variables "
            f"that the optimizer `{leaf.name}` was built for; {which}. Set trainable = False on "
            "what is not trained and build the optimizer without it, or leave zero out.")
    return [_dense(found[key(v)], v) for v in variables]


def _dense(gradient: Any, variable: Any) -> Any:
    """One tensor of the variable's dtype; rows of an embedding that occur twice are summed."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.math.unsorted_segment_sum(
            gradient.values, gradient.indices, variable.shape[0])
    return tf.cast(gradient, variable.dtype)

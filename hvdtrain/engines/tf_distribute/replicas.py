"""Variables over replicas: what each replica keeps for itself is brought together."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.errors import RanksDifferError
from hvdtrain.optim import state

Array = np.ndarray[Any, Any]


def average_statistics(strategy: Any, collective: Collective, model: Any) -> None:
    """Give all replicas the mean of what each has gathered: BatchNorm's moving statistics.

    The statistics move linearly, so that the mean at the end of an epoch is what the mean at
    every step would be. Every process; a variable that is equal on all replicas stays as it is,
    bit for bit.

    Args:
        strategy: The strategy.
        collective: Between the processes.
        model: The model.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    seeds = {id(v) for v in state.seed_variables(model.variables)}
    variables = [v for v in model.non_trainable_variables if id(v) not in seeds
                 and keras.backend.is_float_dtype(keras.backend.standardize_dtype(v.dtype))]
    if not variables:
        return
    values = [[part.astype(np.float64) for part in local_values(strategy, v)] for v in variables]
    base = _joined([parts[0] for parts in values])
    mean = _joined([np.mean([part - parts[0] for part in parts], axis=0) for parts in values])
    if collective.size > 1:
        root = collective.broadcast_array(base)
        change = tf.constant(base + mean - root)
        mean = collective.reduce([change], name="statistics", op="average")[0].numpy()
        base = root
    start = 0
    for variable, parts in zip(variables, values, strict=True):
        end = start + parts[0].size
        value = (base + mean)[start:end].reshape(parts[0].shape)
        variable.assign(value.astype(keras.backend.standardize_dtype(variable.dtype)))
        start = end


def local_values(strategy: Any, variable: Any) -> list[Array]:
    """The values of a Keras variable in the replicas of this process."""
    return [np.asarray(part.numpy())
            for part in strategy.experimental_local_results(variable.value)]


def check_replicas_equal(strategy: Any, variables: list[Any], *, when: str) -> None:
    """Stop where the replicas of this process hold different weights.

    Args:
        strategy: The strategy.
        variables: List of Keras variables that must be bitwise equal.
        when: String for the message, e.g. `"after step 1"`.

    Raises:
        RanksDifferError: Naming the replica and the first variable that differs.
    """
    for variable in variables:
        first, *others = local_values(strategy, variable)
        for number, other in enumerate(others, start=1):
            if first.tobytes() != other.tobytes():
                raise RanksDifferError(
                    f"The replicas of this process no longer hold the same weights {when}: "
                    f"replica {number} differs from replica 0, first in `{variable.path}`. "
                    "Something updates weights within a replica (a custom train_step or layer "
                    "that bypasses the optimizer). Training was stopped; the last checkpoint is "
                    "from before.")


def _joined(arrays: list[Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in arrays])

"""The optimizers of a model as the settings of a run say, whatever the script has done before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.collectives.base import Collective
from hvdtrain.optim import keras_seam
from hvdtrain.optim.distributed import STATE, DistributedOptimizer, state_of
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.optim.zero_check import check_options


def distribute_as_set(optimizer: Any, collective: Collective, options: ReducerOptions, *,
                      zero: bool) -> None:
    """Distribute an optimizer as the settings of a run say, or change it to that. All ranks.

    What the user has given to `DistributedOptimizer` stays, where the settings say nothing else.
    Before the train function is traced; other runs with other settings may follow.

    Args:
        optimizer: A Keras optimizer, distributed or not.
        collective: The collective of the run.
        options: The settings of the run; a default says nothing.
        zero: Boolean, the settings say that its state is divided.

    Raises:
        ConfigError: The user has given something else to `DistributedOptimizer`.
        OptimizerError: As `DistributedOptimizer`.
    """
    parts = [optimizer, *keras_seam.leaf_optimizers(optimizer)]
    known = next((found for part in parts if (found := state_of(part)) is not None), None)
    if known is None:
        DistributedOptimizer(optimizer, collective=collective, options=options, zero=zero)
        for part in parts:
            hooked = state_of(part)
            if hooked is not None:
                hooked.given = ReducerOptions()
        return
    wanted = known.given.changed_by(options)
    if known.zero:
        check_options(wanted)
    elif wanted != known.options or (zero and collective.size > 1):
        _undo(parts)
        DistributedOptimizer(optimizer, collective=collective, options=wanted, zero=zero)
        for part in parts:
            hooked = state_of(part)
            if hooked is not None:
                hooked.given = known.given
    # compile() wraps an optimizer in a plain LossScaleOptimizer under mixed_float16.
    DistributedOptimizer(optimizer, collective=collective)


def undo_distribution(optimizer: Any) -> None:
    """Make an optimizer plain again; its state stays. Every rank.

    Args:
        optimizer: A Keras optimizer, distributed or not.
    """
    _undo([optimizer, *keras_seam.leaf_optimizers(optimizer)])


def _undo(parts: Sequence[Any]) -> None:
    """Make optimizers plain again; their state stays."""
    for part in parts:
        keras_seam.restore_all(part)
        part.__dict__.pop(STATE, None)

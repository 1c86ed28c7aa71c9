"""What compression has not sent yet, in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdtrain.optim import keras_seam
from hvdtrain.optim.distributed import state_of
from hvdtrain.optim.reducer import GradientReducer


def collect_kept_back(optimizer: Any) -> dict[str, Any]:
    """What a checkpoint holds; see `KeptBack.collect`. All ranks."""
    return {f"{number}/{name}": value for number, reducer in enumerate(_reducers_of(optimizer))
            for name, value in reducer.kept_back.collect(reducer.collective).items()}


def restore_kept_back(optimizer: Any, values: Mapping[str, Any]) -> bool:
    """Begin with what `collect_kept_back` gave. Before the first step, on all ranks.

    Returns:
        Whether the optimizer's compression has a use for it.
    """
    reducers = _reducers_of(optimizer)
    for number, reducer in enumerate(reducers):
        prefix = f"{number}/"
        reducer.kept_back.restore({name.removeprefix(prefix): value
                                   for name, value in values.items() if name.startswith(prefix)})
    return any(reducer.keeps_back for reducer in reducers)


def _reducers_of(optimizer: Any) -> list[GradientReducer]:
    found = [state.reducer for part in [optimizer, *keras_seam.leaf_optimizers(optimizer)]
             if (state := state_of(part)) is not None and state.reducer is not None]
    return list(dict.fromkeys(found))

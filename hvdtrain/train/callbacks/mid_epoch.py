"""Stopping within an epoch and going on from there, as if nothing had happened.

A checkpoint within an epoch holds, beside model and optimizer, how many samples of the epoch
were trained on, and the metrics' states over all ranks. `GoOn` restores them. Keras then begins
the epoch anew and asks for all of its steps; those that were done are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.log import get_logger
from hvdtrain.optim import keras_seam
from hvdtrain.train.checkpoint_file import RunState
from hvdtrain.train.metrics import restore_states


class GoOn(keras.callbacks.Callback):
    """Restores the metrics of the epoch that was cut off. The first callback, on every rank.

    Args:
        state: Where the run stood.
        is_chief: Boolean; the chief holds the sums, the other ranks begin from nothing.
    """

    def __init__(self, state: RunState, *, is_chief: bool) -> None:
        super().__init__()
        self._state: RunState | None = state
        self._is_chief = is_chief

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Restore, once: after Keras has reset them."""
        del epoch, logs
        state, self._state = self._state, None
        if state is None or not state.samples:
            return
        if not restore_states(self.model, state.metrics, is_chief=self._is_chief) and (
                self._is_chief):
            get_logger().warning("The checkpoint holds other metrics than this job's: those of "
                                 "this epoch count from sample %d on.", state.samples)


def skip_steps(model: Any, steps: int) -> None:
    """Let the next calls of the train function do nothing. Every rank; the data begin later.

    Args:
        model: A compiled model.
        steps: Integer, a multiple of its `steps_per_execution`.
    """
    model.make_train_function()
    train: Callable[[Any], Any] = model.train_function
    left = steps // model.steps_per_execution

    def skipping(iterator: Any) -> Any:
        nonlocal left
        if left == 0:
            return train(iterator)
        left -= 1
        return {}

    model.train_function = skipping


def has_whole_updates(optimizer: Any) -> bool:
    """Whether no gradients wait in accumulators, of which each rank has its own."""
    return all(int(leaf._iterations.numpy()) % leaf.gradient_accumulation_steps == 0
               for leaf in keras_seam.leaf_optimizers(optimizer)
               if leaf.gradient_accumulation_steps)

"""`KerasState`, and callbacks that keep an elastic state up to date."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.tensorflow.elastic import State, TensorFlowKerasState, run

__all__ = ["CommitStateCallback", "KerasState", "TensorFlowKerasState", "UpdateBatchStateCallback",
           "UpdateEpochStateCallback", "run"]


class KerasState(TensorFlowKerasState):
    """As `TensorFlowKerasState`.

    Args:
        model: A built Keras model.
        optimizer: Its optimizer, where the model is not compiled with it.
        **kwargs: Python values, as attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state every few batches, and at the end of each epoch.

    Args:
        state: A `State`.
        batches_per_commit: Integer, counted from the beginning of the training.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to count."""
        del logs
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if it is time."""
        del batch, logs
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        del epoch, logs
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Sets `state.batch` to the number of the batch, and to 0 at the end of an epoch.

    Args:
        state: A `State` with an attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to count."""
        del logs
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Leave out of `params["steps"]` the batches done before; Keras shows it only."""
        del epoch, logs
        if self.params.get("steps"):
            self.steps_per_epoch = self.steps_per_epoch or self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the batch."""
        del logs
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note that the next epoch begins."""
        del epoch, logs
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Sets `state.epoch` to the number of epochs done, with those before this `fit`.

    Args:
        state: A `State` with an attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Count from what was done before."""
        del logs
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        del logs
        self.state.epoch = self.initial_epoch + epoch + 1

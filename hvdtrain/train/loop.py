"""What of ours stands in Keras' own loop: the list of callbacks, and the ends of its epochs.

Keras' `fit` runs the epochs. `RankCallbacks` is the list of callbacks that it calls, and `joined`
gives it the figures of all ranks where it reads those of this rank: after the last step of an
epoch and after an evaluation, before any callback sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.base import Collective
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.optim.state import training_state
from hvdtrain.train.callbacks.coordinator import Coordinator
from hvdtrain.train.callbacks.state import CallbackStates
from hvdtrain.train.checkpoint_file import RunState
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.metrics import as_figures, mean_of, restore_states

_DOORS = ("evaluate", "predict")
"""Methods of the model that `hvdtrain.distribute` may have replaced."""


class RankCallbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The callbacks of a run on this rank, called as Keras calls them, and together.

    - Steps that a former run has trained are not told of.
    - A run that goes on within an epoch begins that epoch anew for the callbacks, but neither
      their memory nor the model is left changed by it.
    - What a callback adds to the figures of an epoch is made equal on all ranks before the next
      callback sees it.

    Args:
        users: The user's callbacks.
        divided: What this rank runs of them, as `divide` gives it.
        coordinator: Called before them.
        after: Callbacks that are called after them.
        model: The model.
        collective: The collective of the run.
        states: What the user's callbacks remember.
        begin: Where the run begins.
        first_step: Integer, steps of the first epoch that a former run has done.
        holds_metrics: Boolean, this rank goes on from the metrics of the epoch that was cut off:
            the sums of all ranks.
        params: As for `keras.callbacks.CallbackList`: `verbose`, `epochs`, `steps`.
    """

    def __init__(self, users: Sequence[Any], divided: Sequence[Any], *, coordinator: Coordinator,
                 after: Sequence[Any], model: Any, collective: Collective,
                 states: CallbackStates, begin: RunState, first_step: int, holds_metrics: bool,
                 **params: Any) -> None:
        super().__init__([coordinator, *divided, *after], add_history=True,
                         add_progbar=params["verbose"] != 0, model=model, **params)
        self._users = list(users)
        self._coordinator = coordinator
        self._collective = collective
        self._states = states
        self._begin = begin
        self._skipped = first_step
        self._holds_metrics = holds_metrics
        coordinator.callbacks = self

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin; `EarlyStopping` and others forget everything when they do."""
        super().on_train_begin(logs)
        self._restore()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin an epoch. Keras has reset the metrics."""
        if epoch != self._begin.epoch or not self._begin.samples:
            super().on_epoch_begin(epoch, logs)
            return
        kept = [(v, np.array(v.numpy())) for v in training_state(self.model)]
        super().on_epoch_begin(epoch, logs)
        for variable, value in kept:
            variable.assign(value)
        self._restore()
        if not restore_states(self.model, self._begin.metrics, is_chief=self._holds_metrics) and (
                self._holds_metrics):
            get_logger().warning("The checkpoint holds other metrics than this job's: those of "
                                 "this epoch count from sample %d on.", self._begin.samples)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin a step, unless it is one of those that were done."""
        if batch >= self._skipped:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """End a step; with several steps per execution, `batch` is the last of them."""
        if batch >= self._skipped:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """End an epoch, with the figures of all ranks."""
        self._skipped = 0
        if self._async_train:
            self._flush_futures()
        figures = keras_model.pythonify_logs(logs)
        rate, last = figures.get("learning_rate"), len(self._users)
        for number, callback in enumerate(self.callbacks):
            before = dict(figures)
            callback.on_epoch_end(epoch, figures)
            if 1 <= number <= last and not keras_model.is_of_keras(self._users[number - 1]):
                self._agree_on(figures, before, type(self._users[number - 1]).__name__)
            if number == last and rate is not None:
                figures["learning_rate"] = rate  # Keras' own callbacks put the unscaled one there
            if number == last > 0:
                self._coordinator.compare_weights(f"after the callbacks of epoch {epoch + 1}")

    def _restore(self) -> None:
        if self._begin.callbacks:
            self._states.restore(self._begin.callbacks)

    def _agree_on(self, figures: dict[str, Any], before: dict[str, Any], name: str) -> None:
        """Make equal on all ranks what one callback has done to the figures. All ranks."""
        changed = {k: v for k, v in figures.items() if k not in before or before[k] is not v}
        removed = [k for k in before if k not in figures]
        everyone = self._collective.gather_objects((as_figures(changed), removed))
        if all(_same(theirs, everyone[0]) for theirs in everyone):
            return
        names = list(dict.fromkeys(k for theirs, _ in everyone for k in theirs))
        if self._collective.rank == 0:
            get_logger().warning(
                "The callback %s gives each rank figures of its own (%s): their mean over the "
                "ranks that have them is used.", name, ", ".join(names) or ", ".join(removed))
        for key in names:
            figures[key] = mean_of([theirs[key] for theirs, _ in everyone if key in theirs])
        for key in before:
            if key in everyone[0][1] and key not in names:
                figures.pop(key, None)
            else:
                figures.setdefault(key, before[key])


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


@contextmanager
def joined(model: Any, coordinator: Coordinator,
           evaluation: Evaluation | None = None) -> Iterator[None]:
    """While it is entered, Keras' `fit` of this model ends its epochs as the coordinator does.

    What a callback evaluates or predicts by itself (`self.model.evaluate`) stays this rank's own,
    as in Keras.

    Args:
        model: The model.
        coordinator: Of the run.
        evaluation: Of the validation data that Keras' `fit` evaluates.
    """
    results, doors = model._get_metrics_result_or_logs, {
        name: model.__dict__.pop(name) for name in _DOORS if name in model.__dict__}
    evaluate = model.evaluate
    own_evaluations = 0

    def results_of_all(logs: Any) -> Any:
        return results(logs) if own_evaluations else coordinator.end_of_loop(logs)

    def evaluate_here(*args: Any, **kwargs: Any) -> Any:
        nonlocal own_evaluations
        if kwargs.get("_use_cached_eval_dataset") and evaluation is not None:
            with coordinator.evaluating(), evaluation.traced():
                return evaluate(*args, **kwargs)
        if coordinator.is_evaluating:
            return evaluate(*args, **kwargs)
        own_evaluations += 1
        try:
            return evaluate(*args, **kwargs)
        finally:
            own_evaluations -= 1

    keras_seam.set_on_instance(model, "_get_metrics_result_or_logs", results_of_all)
    keras_seam.set_on_instance(model, "evaluate", evaluate_here)
    try:
        yield
    finally:
        keras_seam.restore_method(model, "_get_metrics_result_or_logs", results)
        keras_seam.restore_method(model, "evaluate", evaluate)
        for name, door in doors.items():
            keras_seam.set_on_instance(model, name, door)


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

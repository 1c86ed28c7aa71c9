"""`Coordinator`: what all ranks do together during `fit`, before any other callback.

- At agreed steps: is some rank's loss not finite, was some rank told to stop? All ranks learn it
  at the same step. The distance between two such steps is set from the time they took, which
  the ranks exchange, so that it is about `AGREE_EVERY_S` on every machine.
- After the first step and each epoch: a checksum of weights and optimizer, compared over ranks.
- At the end of an epoch: metrics of all ranks in place of this rank's, evaluation on all ranks,
  the learning rate. Later callbacks see only these.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.errors import TrainingError
from hvdtrain.optim import keras_seam, state
from hvdtrain.optim.distributed import state_of
from hvdtrain.train.metrics import merged_results
from hvdtrain.train.schedule import LrPlan, effective_rate

AGREE_EVERY_S = 2.0
EXIT_STOPPED = 75


class StoppedError(TrainingError):
    """A signal asked the job to stop; all ranks left at the same step."""

    exit_code = EXIT_STOPPED


class LossWatch:
    """Remembers, on the device, the first step whose loss was not finite."""

    def __init__(self, optimizer: Any) -> None:
        self._iterations = keras_seam.leaf_optimizers(optimizer)[0]._iterations
        self._first = tf.Variable(-1, dtype=tf.int64, trainable=False, name="hvdtrain_bad_step")

    def __call__(self, loss: Any) -> None:
        """Look at the loss of the step that is being traced."""
        bad = tf.logical_not(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(loss))))
        step = tf.cast(self._iterations, tf.int64) + 1
        self._first.assign(tf.where(tf.logical_and(bad, self._first < 0), step, self._first))

    @property
    def first_bad_step(self) -> int:
        """Step counted from 1, or -1."""
        return int(self._first.numpy())


class Coordinator(keras.callbacks.Callback):
    """The first callback on every rank.

    Args:
        collective: The collective of the run.
        lr_plan: Scaling of the learning rate.
        evaluate: Callable that evaluates this rank's share of the validation data, leaving its
            metric states in the model; None without validation data.
        check_weights: Boolean, compare checksums.
        stop_on_nan: Boolean, stop when a loss is not finite.
        stop_asked: Callable that tells whether this process was told to stop.
    """

    def __init__(self, *, collective: Collective, lr_plan: LrPlan,
                 evaluate: Callable[[], None] | None, check_weights: bool,
                 stop_on_nan: bool, stop_asked: Callable[[], bool]) -> None:
        super().__init__()
        self._collective = collective
        self._lr_plan = lr_plan
        self._evaluate = evaluate
        self._check_weights = check_weights
        self._stop_on_nan = stop_on_nan
        self._stop_asked = stop_asked
        self._watch: LossWatch | None = None
        self._steps_seen = 0
        self._next_agreement = 1
        self._agreed_at = (0, time.monotonic())

    def watch_loss(self, optimizer: Any) -> None:
        """Look at each step's loss. Before the train function is traced."""
        hooked = state_of(optimizer)
        if self._stop_on_nan and hooked is not None:
            self._watch = LossWatch(optimizer)
            hooked.loss_watch = self._watch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Agree where it is time.

        Not in `on_train_batch_end`: overriding that one makes Keras copy the metrics from the
        device after every batch.
        """
        del logs
        if self._steps_seen >= self._next_agreement:
            first = self._next_agreement == 1
            self._agree()
            if first and self._check_weights:
                self._compare_weights("after the first step")
        self._steps_seen += self.model.steps_per_execution

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace this rank's figures by those of all ranks."""
        figures = {} if logs is None else logs
        self._agree()
        merged = merged_results(self._collective, self.model)
        # A custom train_step may report figures of its own; none is added to those.
        figures.update({k: v for k, v in merged.items() if k in figures or not figures})
        self._refuse_nan_metrics(epoch, figures)
        if self._check_weights:
            self._compare_weights(f"after epoch {epoch + 1}")
        figures["learning_rate"] = effective_rate(self.model.optimizer, self._lr_plan)
        if self._evaluate is not None:
            self._evaluate()
            validated = merged_results(self._collective, self.model)
            figures.update({f"val_{name}": value for name, value in validated.items()})

    def _agree(self) -> None:
        """Exchange what each rank knows; all ranks act on it alike."""
        bad = self._watch.first_bad_step if self._watch is not None else -1
        steps, at = self._agreed_at
        elapsed = (time.monotonic() - at) / max(1, self._steps_seen - steps)
        everyone = self._exchange([bad, float(self._stop_asked()), elapsed])
        self._agreed_at = (self._steps_seen, time.monotonic())
        pause = max(1, int(AGREE_EVERY_S / max(float(everyone[:, 2].max()), 1e-6)))
        self._next_agreement = self._steps_seen + (pause if self._steps_seen > 2 else 20)
        bad_steps = everyone[:, 0]
        if (bad_steps >= 0).any():
            step = int(bad_steps[bad_steps >= 0].min())
            self._raise_nan(step, [int(r) for r in np.flatnonzero(bad_steps == step)])
        if everyone[:, 1].any():
            raise StoppedError(
                f"Stopped on request (signal) after step {self._steps_seen} of this run, on all "
                "ranks alike. Checkpoints that were written are whole; go on with --resume.")

    def _exchange(self, values: list[float]) -> np.ndarray[Any, Any]:
        if self._collective.size == 1:
            return np.asarray([values])
        row = tf.constant([values], tf.float64)
        return np.asarray(self._collective.allgather(row, name="hvdtrain.agree"))

    def _raise_nan(self, step: int, ranks: list[int]) -> None:
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        raise TrainingError(
            f"The loss is not finite (NaN or infinity) since step {step}, first on {named}. "
            "Training was stopped before anything was saved: checkpoints that were written are "
            "from before. Look at that rank's data, lower the learning rate, or add clipping "
            "(global_clipnorm=1.0).")

    def _refuse_nan_metrics(self, epoch: int, figures: dict[str, Any]) -> None:
        if self._stop_on_nan and not np.isfinite(figures.get("loss", 0.0)):
            raise TrainingError(
                f"The loss of epoch {epoch + 1} is not finite ({figures['loss']}). Training was "
                "stopped before anything was saved: checkpoints that were written are from before.")

    def _compare_weights(self, when: str) -> None:
        shared = keras_seam.shared_variables(self.model.optimizer)
        state.check_equal(self._collective, [*self.model.trainable_variables, *shared], when=when)


class StopAgreement(keras.callbacks.Callback):
    """Ends training on all ranks where a callback asked for it on one. After the user's own.

    A rank that left alone at the end of an epoch would keep the others waiting for ever.
    """

    def __init__(self, collective: Collective) -> None:
        super().__init__()
        self._collective = collective

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Agree. All ranks."""
        del epoch, logs
        asked = self._collective.gather_objects(bool(self.model.stop_training))
        self.model.stop_training = any(asked)

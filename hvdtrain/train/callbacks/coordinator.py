"""`Coordinator`: what all ranks do together during `fit`, before any other callback.

- At agreed steps: is some rank's loss not finite, was some rank told to stop, by a signal or by
  a callback? All ranks learn it at the same step. The distance between two such steps is set
  from the time they took, which the ranks exchange, so that it is about `AGREE_EVERY_S` on every
  machine.
- After the first step and each epoch: a checksum of weights and optimizer, compared over ranks.
- After the last step of an epoch: metrics of all ranks in place of this rank's, evaluation on all
  ranks, the learning rate. All callbacks see only these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.errors import EXIT_STOPPED, NotFiniteError, TrainingError
from hvdtrain.optim import keras_seam, state
from hvdtrain.optim.distributed import state_of
from hvdtrain.runtime.progress import Progress
from hvdtrain.train.callbacks.saver import CheckpointSaver, SaveTimes
from hvdtrain.train.metrics import merged_logs, refuse_unmergeable
from hvdtrain.train.schedule import LrPlan, effective_rate

AGREE_EVERY_S = 2.0


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
        progress: Of this rank, for the watchdog.
        lr_plan: Scaling of the learning rate.
        check_weights: Boolean, compare checksums.
        stop_on_nan: Boolean, stop when a loss is not finite.
        stop_asked: Callable that tells whether this process was told to stop.
        stop: The callback that knows what the user's callbacks ask for.
        saver: Writes checkpoints within an epoch; None where nothing is saved.
        times: When one is due within an epoch, beside a stop.
        steps_per_epoch: Integer; None where it is not known.
        evaluate: Callable that is given the list of callbacks and evaluates this rank's share of
            the validation data as Keras does, with its calls of callbacks; returns what
            `model.evaluate` returns as a dictionary. None where Keras' `fit` does it.
        epoch_ended: Callable, called after the last step of an epoch.
    """

    def __init__(self, *, collective: Collective, progress: Progress, lr_plan: LrPlan,
                 check_weights: bool, stop_on_nan: bool, stop_asked: Callable[[], bool],
                 stop: StopAgreement, steps_per_epoch: int | None,
                 saver: CheckpointSaver | None = None, times: SaveTimes | None = None,
                 evaluate: Callable[[Any], dict[str, Any]] | None = None,
                 epoch_ended: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._collective = collective
        self._progress = progress
        self._stop = stop
        self._saver = saver
        self._times = times or SaveTimes()
        self._clock_asks = False
        self._stopping = False
        self._epoch = 0
        self._lr_plan = lr_plan
        self._evaluate = evaluate
        self._steps_per_epoch = steps_per_epoch
        self._epoch_ended = epoch_ended
        self._steps_before = 0
        """Steps of the epochs before; in this run where their number was not known."""
        self._batch = 0
        self.callbacks: Any = None
        """The list of all callbacks of the run, for the evaluation."""
        self.is_evaluating = False
        """The validation data of the run are being evaluated."""
        self._check_weights = check_weights
        self._stop_on_nan = stop_on_nan
        self._stop_asked = stop_asked
        self._watch: LossWatch | None = None
        self._steps_seen = 0
        self._merged_before = False
        self._next_agreement = 1
        self._agreed_at = (0, time.monotonic())

    def watch_loss(self, optimizers: Sequence[Any]) -> Callable[[], None]:
        """Look at each step's loss. Before the train function is traced.

        Returns:
            A function that undoes it.
        """
        watched = [found for optimizer in optimizers if (found := state_of(optimizer)) is not None]
        if self._stop_on_nan and watched:
            self._watch = LossWatch(optimizers)
            for hooked in watched:
                hooked.loss_watch = self._watch

        def undo() -> None:
            for hooked in watched:
                hooked.loss_watch = None
        return undo

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Keras returns after this, when the iterator of the data is deleted."""
        del logs
        self._progress.enter("closing the data")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remember which it is."""
        del logs
        steps = self._steps_per_epoch
        if steps is not None:
            self._steps_before = epoch * steps
        else:
            self._steps_before += self._batch
        self._epoch, self._batch = epoch, 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Agree where it is time.

        Not in `on_train_batch_end`: overriding that one makes Keras copy the metrics from the
        device after every batch.
        """
        del logs
        if self._steps_seen == 0:
            self._progress.enter("building the first step")
        else:
            self._progress.advance(self._steps_seen + 1)
        if self._steps_seen >= self._next_agreement:
            first = self._next_agreement == 1
            self._agree()
            if first:
                self.compare_weights("after the first step")
        self._save_or_leave(batch)
        self._steps_seen += self.model.steps_per_execution
        self._batch = batch + self.model.steps_per_execution
        self._times.now = self._steps_before + self._batch

    def _save_or_leave(self, batch: int) -> None:
        """Save where it is due, or end where it was asked for."""
        step = self._steps_before + batch
        if self._steps_seen == 0:
            self._times.begin(step)
        due = batch > 0 and (self._clock_asks or self._times.by_steps(step))
        if not (due or self._stopping):
            return
        if due:
            self._agree()  # nothing is saved of a run whose loss is no number
        if self._stopping:
            self._leave(batch)
        if self._saver is not None:
            self._saver.save(self.model, self._epoch, batch)
        self._clock_asks = False
        self._times.begin(step)

    def end_of_loop(self, logs: Any) -> dict[str, Any]:
        """The figures of all ranks, where Keras reads this rank's. All ranks.

        Args:
            logs: What the last step of this rank has given; nothing where it had no step.

        Returns:
            At the end of an epoch: its figures with those of the evaluation and the learning
            rate. At the end of an evaluation: its figures.
        """
        if self.is_evaluating:
            self._progress.advance("the end of the evaluation")
            return self._figures(logs)
        epoch = self._epoch
        self._progress.advance(f"the end of epoch {epoch + 1}")
        self._agree()
        if self._stopping:
            self._leave(self._batch)
        self._average_statistics()
        state.average_accumulators(self._collective, keras_seam.optimizers_of(self.model))
        figures = self._figures(logs)
        self._refuse_nan_metrics(epoch, figures)
        self.compare_weights(f"after epoch {epoch + 1}")
        figures["learning_rate"] = effective_rate(
            keras_seam.optimizers_of(self.model), self._lr_plan)
        if self._epoch_ended is not None:
            self._epoch_ended()
        if self._evaluate is not None:
            with self.evaluating():
                validation = self._evaluate(self.callbacks)
            figures.update({f"val_{name}": value for name, value in validation.items()})
        return figures

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While it is entered, the validation data of the run are evaluated."""
        self.is_evaluating = True
        try:
            with self._progress.phase("evaluating"):
                yield
        finally:
            self.is_evaluating = False

    def _figures(self, logs: Any) -> dict[str, Any]:
        """The figures of all ranks after a loop over steps. All ranks."""
        if not self._merged_before:
            refuse_unmergeable(self._collective, self.model)
            self._merged_before = True
        return merged_logs(self._collective, self.model, logs)

    def _average_statistics(self) -> None:
        state.average_statistics(self._collective, self.model)

    def _agree(self) -> None:
        """Exchange what each rank knows; all ranks act on it alike."""
        bad = self._watch.first_bad_step if self._watch is not None else -1
        steps, at = self._agreed_at
        elapsed = (time.monotonic() - at) / max(1, self._steps_seen - steps)
        everyone = self._exchange(
            [bad, float(self._stop_asked()), elapsed, float(self._stop.wanted),
             float(self._times.by_clock())])
        self._agreed_at = (self._steps_seen, time.monotonic())
        pause = max(1, int(AGREE_EVERY_S / max(float(everyone[:, 2].max()), 1e-6)))
        self._next_agreement = self._steps_seen + (pause if self._steps_seen > 2 else 20)
        bad_steps = everyone[:, 0]
        if (bad_steps >= 0).any():
            step = int(bad_steps[bad_steps >= 0].min())
            self._raise_nan(step, [int(r) for r in np.flatnonzero(bad_steps == step)])
        self._stopping = self._stopping or bool(everyone[:, 1].any())
        self._clock_asks = self._clock_asks or bool(everyone[0, 4])
        if everyone[:, 3].any():
            self._stop.agree()

    def _leave(self, step: int) -> NoReturn:
        """Save, and end the run on all ranks at the same step of the epoch."""
        saved = "Nothing was saved, since the run has no output folder."
        if self._saver is not None:
            path = self._saver.save(self.model, self._epoch, step)
            self._saver.wait()
            saved = f"All of it is in {path}; go on with --resume."
        raise StoppedError(
            f"Stopped on request (signal) after step {step} of epoch {self._epoch + 1}, on all "
            f"ranks alike. {saved}")

    def _exchange(self, values: list[float]) -> np.ndarray[Any, Any]:
        if self._collective.size == 1:
            return np.asarray([values])
        row = tf.constant([values], tf.float64)
        return np.asarray(self._collective.allgather(row, name="hvdtrain.agree"))

    def _raise_nan(self, step: int, ranks: list[int]) -> None:
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        raise NotFiniteError(
            f"The loss is not finite (NaN or infinity) since step {step}, first on {named}. "
            "Training was stopped before anything was saved: checkpoints that were written are "
            "from before. Look at that rank's data, lower the learning rate, or add clipping "
            "(global_clipnorm=1.0).")

    def _refuse_nan_metrics(self, epoch: int, figures: dict[str, Any]) -> None:
        bad = next((name for name, value in figures.items()
                    if name.endswith("loss") and not np.all(np.isfinite(value))), None)
        if self._stop_on_nan and bad is not None:
            raise NotFiniteError(
                f"The {bad} of epoch {epoch + 1} is not finite ({figures[bad]}). Training was "
                "stopped before anything was saved: checkpoints that were written are from before.")

    def compare_weights(self, when: str) -> None:
        """Stop where ranks hold different weights, unless it is switched off. All ranks."""
        if not self._check_weights:
            return
        optimizers = keras_seam.optimizers_of(self.model)
        shared = keras_seam.shared_variables(optimizers)
        with self._progress.phase("comparing the weights"):
            weights = keras_seam.shared_weights(optimizers, self.model.trainable_variables)
            state.check_equal(self._collective, [*weights, *shared], when=when)


class StopAgreement(keras.callbacks.Callback):
    """Ends training on all ranks where a callback asked for it on one. After the user's own.

    A rank that left alone would keep the others waiting for ever. Within an epoch the wish is
    taken away from Keras and kept until the `Coordinator` has told all ranks of it: then all of
    them end after the same step.

    Args:
        collective: The collective of the run.
        progress: Of this rank, for the watchdog.
    """

    # Keras may call `on_train_batch_end` from another thread, and need not wait for it. A wish
    # that a callback expresses there comes in time all the same: Keras then calls all in order.
    async_safe = True

    def __init__(self, collective: Collective, progress: Progress) -> None:
        super().__init__()
        self._collective = collective
        self._progress = progress
        self._agreed = collective.size == 1
        self.wanted = False

    def agree(self) -> None:
        """All ranks know of it: Keras ends after the step that begins."""
        self._agreed = True
        self.model.stop_training = True

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """The user's callbacks of this step have run, which may hang too."""
        del batch, logs
        self._progress.advance()
        self._keep()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Before Keras looks at the wish."""
        del batch, logs
        self._keep()

    def _keep(self) -> None:
        if self.model.stop_training and not self._agreed:
            self.wanted = True
            self.model.stop_training = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Agree. All ranks."""
        del logs
        self._progress.advance(f"the end of epoch {epoch + 1}, after the callbacks")
        asked = self._collective.gather_objects(self.wanted or bool(self.model.stop_training))
        self.model.stop_training = any(asked)

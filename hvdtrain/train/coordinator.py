"""`Coordinator`: the callbacks of a run, and what all ranks do before these see anything.

- At agreed steps: exchange losses that are not finite and requests to stop (signal, callback). The
  distance between such steps follows the measured time: about `AGREE_EVERY_S` on every machine.
- After the first step and each epoch: compare a checksum of weights and optimizer.
- After an epoch's last step: merge metrics, evaluate, add the rate. Callbacks see only these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.plain import encode
from hvdtrain.errors import EXIT_STOPPED, NotFiniteError, TrainingError
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_model, keras_seam, state
from hvdtrain.optim.distributed import state_of
from hvdtrain.runtime import phases
from hvdtrain.train import evaluate
from hvdtrain.train.callbacks import divide
from hvdtrain.train.plan import verbosity
from hvdtrain.train.run import Run
from hvdtrain.train.schedule import effective_rate
from hvdtrain.train.writers import Checkpoints, Commits

AGREE_EVERY_S = 2.0

Logs = dict[str, Any] | None


class StoppedError(TrainingError):
    """A signal asked the job to stop; all ranks stopped at the same step."""

    exit_code = EXIT_STOPPED


class ChangedError(StoppedError):
    """The ranks of an elastic job are about to change; all of them have committed and ended."""


class Coordinator(keras.callbacks.CallbackList):
    """Coordinates the ranks, then calls the user's callbacks, and those that write `files`.

    A rank that stopped alone for a callback would hang the others. Within an epoch the request is
    withheld from Keras until all ranks know of it, and all stop after the same step. `evaluate_own`
    returns the figures of this rank's share of the validation data, where Keras' `fit` does not.

    Steps of a former run are not reported. A run resumed within an epoch restarts it for the
    callbacks, but their state and the model are kept. What a callback adds to an epoch's figures is
    made equal on all ranks before the next callback sees it.
    """

    def __init__(self, run: Run, checkpoints: Checkpoints, files: Sequence[Any], *,
                 epoch_ended: Callable[[], None],
                 evaluate_own: Callable[[Any], dict[str, Any]] | None = None) -> None:
        verbose = verbosity(run.session.world, run.verbose)
        super().__init__([*divide(run.callbacks, run.session), *files],
                         add_history=True, add_progbar=verbose != 0, model=run.model,
                         verbose=verbose, epochs=run.config.epochs, steps=run.plan.shards.steps)
        self._run = run
        self._skipped = run.first_step
        self._progress = run.session.progress
        self._checkpoints = checkpoints
        self._commits = Commits(run, self._history)
        self._stop_wanted, self._stop_agreed = False, run.session.collective.size == 1
        self._epoch_ended = epoch_ended
        self._evaluate_own = evaluate_own
        self._first_bad: Any = None  # step whose loss was not finite, from 1, on the device; or -1
        self._clock_asks = self._stopping = self._changing = self._merged_before = False
        self._epoch = self._batch = self._steps_seen = 0
        self._steps_before = 0  # the epoch; in this run where their number was not known
        self._next_agreement = 1
        self._agreed_at = (0, time.monotonic())
        self.is_evaluating = False

    @contextmanager
    def watching_loss(self, optimizers: Sequence[Any], first: Any) -> Iterator[None]:
        """While entered, note in `first` the step whose loss is not finite; trace within."""
        hooked = [found for optimizer in optimizers if (found := state_of(optimizer)) is not None]
        iterations = keras_seam.leaf_optimizers(optimizers)[0]._iterations
        self._first_bad = first
        first.assign(-1)

        def watch(loss: Any) -> None:
            bad = tf.logical_not(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(loss))))
            step = tf.cast(iterations, tf.int64) + 1
            first.assign(tf.where(tf.logical_and(bad, first < 0), step, first))
        for each in hooked if self._run.stops_on_nan else ():
            each.loss_watch = watch
        try:
            yield
        finally:
            for each in hooked:
                each.loss_watch = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Begin; `EarlyStopping` and others then reset their state, so it is restored."""
        super().on_train_begin(logs)
        self._restore()
        if former := self._run.begin.history:
            self._history.epoch, self._history.history = (
                list(former["epoch"]), {k: list(v) for k, v in former["history"].items()})
        if not self._run.begin.samples:
            self._commits.save(self._run.begin.epoch)  # so that each host has one

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begin an epoch; Keras has reset the metrics."""
        begin, holds_metrics = self._run.begin, self._run.holds_metrics
        steps = self._run.plan.shards.steps
        self._steps_before = (self._steps_before + self._batch if steps is None
                              else epoch * steps)
        self._epoch, self._batch = epoch, 0
        if epoch != begin.epoch or not begin.samples:
            super().on_epoch_begin(epoch, logs)
            return
        kept = [(v, np.array(v.numpy())) for v in state.training_state(self.model)]
        super().on_epoch_begin(epoch, logs)
        for variable, value in kept:
            variable.assign(value)
        self._restore()
        restored = evaluate.restore_states(self.model, begin.metrics, is_chief=holds_metrics)
        if holds_metrics and not restored:
            get_logger().warning("The checkpoint holds other metrics than this job's: those of "
                                 "this epoch count from sample %d on.", begin.samples)

    def _restore(self) -> None:
        if self._run.begin.callbacks:
            self._run.states.restore(self._run.begin.callbacks)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Begin a step, unless a former run did it: agree, save, or stop, where it is time."""
        if batch < self._skipped:
            return
        commits = self._commits
        if self._steps_seen == 0:
            if (begin := self._run.begin).samples and self._epoch == begin.epoch:
                commits.save(self._epoch, batch, begin=begin)
            self._progress.enter("building the first step")
        else:
            self._progress.advance(self._steps_seen + 1)
        if self._steps_seen >= self._next_agreement:
            is_first = self._next_agreement == 1
            self._agree()
            if is_first:
                self._run.compare_weights("after the first step")
        step, times = self._steps_before + batch, self._checkpoints.times
        if self._steps_seen == 0:
            times.begin(step)
            commits.times.begin(step)
        due = batch > 0 and (self._clock_asks or times.by_steps(step))
        commit_due = batch > 0 and commits.is_due(step)
        if due or commit_due:
            self._agree()  # nothing is saved of a run whose loss is no number
        self._leave_if_asked(batch, within=batch > 0)
        if due:
            self._checkpoints.save(self._epoch, batch)
            self._clock_asks = False
            times.begin(step)
        if commit_due:
            commits.save(self._epoch, batch)
            commits.times.begin(step)
        self._steps_seen += self._run.model.steps_per_execution
        self._batch = batch + self._run.model.steps_per_execution
        self._checkpoints.steps_done = self._steps_before + self._batch
        commits.count(self._steps_seen)
        super().on_train_batch_begin(batch, logs)
        self._progress.advance()  # the callbacks may hang too
        self._keep_wish()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """End a step; with several steps per execution, `batch` is the last of them."""
        if batch >= self._skipped:
            super().on_train_batch_end(batch, logs)

    def _on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Keras may call it from another thread, and need not wait for it."""
        super()._on_train_batch_end(batch, logs)
        self._keep_wish()

    def on_train_end(self, logs: Logs = None) -> None:
        """End. Keras returns after this, when the iterator of the data is deleted."""
        self._progress.enter("closing the data")
        super().on_train_end(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """End an epoch, with the figures of all ranks."""
        self._skipped = 0
        if self._async_train:
            self._flush_futures()
        run, figures = self._run, keras_model.pythonify_logs(logs)
        rate = figures.get("learning_rate")
        for user, callback in zip(run.callbacks, self.callbacks, strict=False):
            before = dict(figures)
            callback.on_epoch_end(epoch, figures)
            if type(user).__module__.split(".")[0] != "keras":
                self._agree_on(figures, before, type(user).__name__)
        if rate is not None:
            figures["learning_rate"] = rate  # Keras' own callbacks put the unscaled one there
        if run.callbacks:
            run.compare_weights(f"after the callbacks of epoch {epoch + 1}")
        self._progress.advance(f"the end of epoch {epoch + 1}, after the callbacks")
        everyone = run.session.collective.gather_objects((
            self._stop_wanted or bool(run.model.stop_training), run.clock and run.clock.lap()))
        run.model.stop_training = any(stops for stops, _ in everyone)
        if run.clock is not None:
            run.times.append(phases.of_all_ranks(
                [lap for _, lap in everyone], run.session.collective.tells_waiting))
        for callback in self.callbacks[len(run.callbacks):]:
            callback.on_epoch_end(epoch, figures)
        done = self._checkpoints.steps_done
        if self._commits.is_due(done) and not run.model.stop_training:
            self._commits.save(epoch + 1)
            self._commits.times.begin(done)

    def _agree_on(self, figures: dict[str, Any], before: dict[str, Any], name: str) -> None:
        """Make what one callback did to the figures equal. All ranks."""
        collective = self._run.session.collective
        changed = {k: v for k, v in figures.items() if k not in before or before[k] is not v}
        removed = [k for k in before if k not in figures]
        everyone = collective.gather_objects((evaluate.as_figures(changed), removed))
        if all(encode(theirs) == encode(everyone[0]) for theirs in everyone):
            return
        names = list(dict.fromkeys(k for theirs, _ in everyone for k in theirs))
        if collective.rank == 0:
            get_logger().warning(
                "The callback %s gives each rank figures of its own (%s): their mean over the "
                "ranks that have them is used.", name, ", ".join(names) or ", ".join(removed))
        for key in names:
            figures[key] = evaluate.mean_of(
                [theirs[key] for theirs, _ in everyone if key in theirs])
        for key in before:
            if key in everyone[0][1] and key not in names:
                figures.pop(key, None)
            else:
                figures.setdefault(key, before[key])

    def _keep_wish(self) -> None:
        """After a step's callbacks, before Keras looks at a request to stop."""
        if self._run.model.stop_training and not self._stop_agreed:
            self._stop_wanted, self._run.model.stop_training = True, False

    def end_of_loop(self, logs: Any) -> dict[str, Any]:
        """All ranks' figures, at an epoch's end with evaluation and learning rate. All ranks."""
        if self.is_evaluating:
            self._progress.advance("the end of the evaluation")
            return self._figures(logs)
        epoch, run = self._epoch, self._run
        optimizers = keras_seam.optimizers_of(self._run.model)
        self._progress.advance(f"the end of epoch {epoch + 1}")
        self._agree()
        self._leave_if_asked(self._batch)
        run.average_statistics()
        state.average_accumulators(run.session.collective, optimizers)
        figures = self._figures(logs)
        bad = next((name for name, value in figures.items()
                    if name.endswith("loss") and not np.all(np.isfinite(value))), None)
        if run.stops_on_nan and bad is not None:
            raise NotFiniteError(
                f"The {bad} of epoch {epoch + 1} is not finite ({figures[bad]}). Training was "
                "stopped before anything was saved: checkpoints that were written are from before.")
        run.compare_weights(f"after epoch {epoch + 1}")
        figures["learning_rate"] = effective_rate(optimizers, run.plan.lr)
        self._epoch_ended()
        if self._evaluate_own is not None:
            with self.evaluating():
                validation = self._evaluate_own(self)
            figures.update({f"val_{name}": value for name, value in validation.items()})
        return figures

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While entered, the run's validation data are evaluated."""
        self.is_evaluating = True
        try:
            with self._progress.phase("evaluating"):
                yield
        finally:
            self.is_evaluating = False

    def _figures(self, logs: Any) -> dict[str, Any]:
        if not self._merged_before:
            evaluate.refuse_unmergeable(self._run.session.collective, self._run.model)
            self._merged_before = True
        return self._run.figures(logs)

    def _agree(self) -> None:
        bad = -1 if self._first_bad is None else int(self._first_bad.numpy())
        steps, at = self._agreed_at
        step_s = (time.monotonic() - at) / max(1, self._steps_seen - steps)
        collective = self._run.session.collective
        everyone: Any = np.asarray([[
            bad, self._run.stop_asked(), step_s, self._stop_wanted,
            self._checkpoints.times.by_clock(), self._commits.times.by_clock(),
            self._commits.change_asked]], np.float64)
        if collective.size > 1:
            everyone = np.asarray(collective.allgather(
                tf.constant(everyone), name="hvdtrain.agree"))
        bad_steps, told, steps_s, wanted, clock, commit_clock, change = everyone.T
        self._agreed_at = (self._steps_seen, time.monotonic())
        pause = max(1, int(AGREE_EVERY_S / max(float(steps_s.max()), 1e-6)))
        self._next_agreement = self._steps_seen + (pause if self._steps_seen > 2 else 20)
        if (bad_steps >= 0).any():
            step = int(bad_steps[bad_steps >= 0].min())
            ranks = list(map(str, np.flatnonzero(bad_steps == step)))
            named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
            self._raise_nan(f" since step {step}, first on {named}", "that rank's data")
        if self._run.stops_on_nan and self._steps_seen and not self._run.loss_is_finite():
            done = keras_seam.steps_done(keras_seam.optimizers_of(self._run.model))
            self._raise_nan(f", seen after step {done}", "the data of these steps")
        self._stopping = self._stopping or bool(told.any())
        self._changing = self._changing or bool(change.any())
        self._clock_asks = self._clock_asks or bool(clock[0])
        self._commits.is_asked = self._commits.is_asked or bool(commit_clock[0])
        if wanted.any():  # Keras ends after the step that begins
            self._stop_agreed = self._run.model.stop_training = True

    def _leave_if_asked(self, step: int, *, within: bool = True) -> None:
        """End this rank, as all others, if a signal or the launcher has asked for it.

        `within`: callbacks have not been told that an epoch begins after this step.
        """
        if self._stopping:
            path = self._checkpoints.save(self._epoch, step)
            self._checkpoints.wait()
            raise stopped(step, self._epoch, path, ", on all ranks alike")
        if self._changing and within:
            self._commits.save(self._epoch, step)
            self._checkpoints.wait()
            raise ChangedError(f"The ranks change: committed after step {step} of epoch "
                               f"{self._epoch + 1}, on all ranks alike. The launcher goes on.")

    def _raise_nan(self, where: str, suspect: str) -> NoReturn:
        raise NotFiniteError(
            f"The loss is not finite (NaN or infinity){where}. Training was stopped before "
            "anything was saved: checkpoints that were written are from before. Look at "
            f"{suspect}, lower the learning rate, or add clipping (global_clipnorm=1.0).")


def stopped(step: int, epoch: int, path: str | None, where: str = "") -> StoppedError:
    """The error of a run that was asked to stop, and has written a checkpoint, if any."""
    saved = ("Nothing was saved, since the run has no output folder." if path is None else
             f"All of it is in {path}; go on with --resume.")
    return StoppedError(f"Stopped on request (signal) after step {step} of epoch {epoch + 1}"
                        f"{where}. {saved}")

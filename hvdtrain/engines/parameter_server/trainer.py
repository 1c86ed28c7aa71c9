"""`Trainer`: epochs, callbacks and evaluation around one of the two modes. On the chief.

The model and the optimizer on the chief are the user's, plain Keras ones. They hold what the
servers hold at the end of each epoch, before callbacks see them; what a callback changes in them
(weights, a learning rate) goes back to the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config import TrainConfig
from hvdtrain.data.pipeline import evaluation_dataset
from hvdtrain.data.source import Source
from hvdtrain.engines.parameter_server.asynchronous import Asynchronous, Machinery, share_of
from hvdtrain.engines.parameter_server.closures import InFlight
from hvdtrain.engines.parameter_server.parameters import Array
from hvdtrain.engines.parameter_server.synchronous import Synchronous
from hvdtrain.errors import NotFiniteError, TrainingError
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_seam
from hvdtrain.optim.state import digests
from hvdtrain.runtime.progress import Progress
from hvdtrain.train.callbacks.coordinator import StoppedError
from hvdtrain.train.checkpoint import CheckpointStore
from hvdtrain.train.checkpoint_file import RunState
from hvdtrain.train.plan import TrainPlan
from hvdtrain.train.schedule import effective_rate


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training, from the position where it begins."""

    model: Any
    plan: TrainPlan
    begin: RunState
    validation: Source | None
    callbacks: Sequence[Any]
    """The user's."""
    writers: Sequence[Any]
    store: CheckpointStore | None
    progress: Progress
    stop_asked: Callable[[], bool]
    verbose: int


class Trainer:
    """Runs one training.

    Args:
        run: What to train.
        machinery: The parts on servers and workers.
        mode: How updates happen.
    """

    def __init__(self, run: Run, machinery: Machinery, mode: Asynchronous | Synchronous) -> None:
        self._run, self._m, self._mode = run, machinery, mode
        self._config: TrainConfig = run.plan.config
        self._evaluate = tf.function(self._evaluate_closure, autograph=False)
        self._callbacks: Any = None
        self._epoch = run.begin.epoch
        self._gained = machinery.metrics.nothing()
        self._told = self._begun = 0
        self._pushed_rate: float | None = None

    def fit(self) -> dict[str, list[float]]:
        """Train to the last epoch.

        Returns:
            Figures per epoch.

        Raises:
            NotFiniteError: A loss is not finite.
            StoppedError: This process was told to stop; all is saved.
        """
        run, model = self._run, self._run.model
        history = keras.callbacks.History()
        self._callbacks = keras.callbacks.CallbackList(
            [*run.callbacks, *run.writers, history], model=model,
            add_progbar=run.verbose != 0, verbose=run.verbose, epochs=self._config.epochs,
            steps=run.plan.shards.steps)
        model.stop_training = False
        self._heeding("on_train_begin", self._callbacks.on_train_begin)
        logs: dict[str, float] = {}
        first_step = run.plan.shards.step_after(run.begin.samples)
        for epoch in range(run.begin.epoch, self._config.epochs):
            logs = self._train_epoch(epoch, first_step)
            first_step = 0
            if model.stop_training:
                break
        if isinstance(self._mode, Synchronous):
            self._mode.drain()
        if getattr(model.optimizer, "use_ema", False):
            model.optimizer.finalize_variable_values(model.trainable_variables)
        self._callbacks.on_train_end(logs)
        return dict(history.history)

    def pull(self) -> None:
        """Bring model and optimizer on the chief up to date."""
        for part in (self._m.parameters, self._m.state, self._m.optimizer):
            part.pull()

    def _train_epoch(self, epoch: int, first_step: int) -> dict[str, float]:
        run, steps = self._run, self._run.plan.shards.steps
        self._epoch, self._gained, self._told = epoch, self._begin_metrics(first_step), first_step
        self._heeding("on_epoch_begin", lambda: self._callbacks.on_epoch_begin(epoch))
        self._begin_batch(first_step)
        done = self._mode.run(epoch, first_step, steps, epoch * steps, self._report)
        self._m.coordinator.join()
        run.progress.advance(f"the end of epoch {epoch + 1}")
        with run.progress.phase("copying the parameters from the servers"):
            self.pull()
        self._refuse_weights_that_are_not_finite()
        if run.stop_asked() and done < steps:
            self._stop(done)
        logs = self._m.metrics.results(self._gained)
        logs["learning_rate"] = effective_rate(run.model.optimizer, run.plan.lr)
        if run.validation is not None:
            with run.progress.phase("evaluating"):
                logs |= {f"val_{k}": v for k, v in self._validate(run.validation).items()}
        with run.progress.phase("in the callbacks at the end of an epoch"):
            self._heeding("on_epoch_end", lambda: self._callbacks.on_epoch_end(epoch, logs))
        if run.stop_asked() and epoch + 1 < self._config.epochs:
            self._epoch = epoch + 1
            self._gained = self._m.metrics.nothing()
            self._stop(0)
        return logs

    def _begin_metrics(self, first_step: int) -> Array:
        """Those of the epoch that a former run has begun."""
        if first_step == 0:
            return self._m.metrics.nothing()
        gained = self._m.metrics.gained_by(self._run.begin.metrics)
        if gained is None:
            get_logger().warning("The checkpoint holds other metrics than this job's: those of "
                                 "this epoch count from step %d on.", first_step + 1)
            return self._m.metrics.nothing()
        return gained

    def _report(self, done: int, gained: Array) -> bool:
        """After each closure or update: figures, callbacks, whether to go on."""
        self._run.progress.advance(self._epoch * self._run.plan.shards.steps + done)
        self._gained = self._gained + gained
        if self._config.stop_on_nan and not np.isfinite(gained).all():
            raise NotFiniteError(
                f"The loss, or a metric, is not finite between steps {self._told + 1} and {done} "
                f"of epoch {self._epoch + 1}. Lower the learning rate, clip gradients "
                "(global_clipnorm), or look at the data. --no-stop-on-nan goes on regardless.")
        logs = self._m.metrics.results(self._gained) if self._wants("on_train_batch_end") else {}
        for step in range(self._told, done):
            if step >= self._begun:
                self._callbacks.on_train_batch_begin(step)
            self._callbacks.on_train_batch_end(step, logs)
        self._told = done
        if self._run.stop_asked() or self._run.model.stop_training:
            return False
        if done < self._run.plan.shards.steps:
            self._begin_batch(done)
        return True

    def _begin_batch(self, step: int) -> None:
        """Before a batch is sent: a rate that a callback sets for it counts."""
        self._callbacks.on_train_batch_begin(step)
        self._begun = step + 1
        self._push_rate()

    def _wants(self, hook: str) -> bool:
        """Whether a callback of the user's has a method of its own for this."""
        old = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}
        return any(getattr(type(callback), name, None) is not getattr(
            keras.callbacks.Callback, name) for callback in self._run.callbacks
            for name in (hook, old.get(hook, hook)))

    def _heeding(self, hook: str, call: Callable[[], None]) -> None:
        """Call callbacks, and bring to the servers what they change in model and optimizer.

        Raises:
            TrainingError: A callback changed what workers hold as a constant.
        """
        if not self._wants(hook):
            call()
            return
        model, constants = self._run.model, self._m.parameters.parts.constant
        rate = keras_seam.rate_variable(model.optimizer)
        watched = [v for v in (*model.variables, *model.optimizer.variables) if v is not rate]
        before = digests(watched).values
        call()
        changed = [v for v, a, b in zip(watched, before, digests(watched).values, strict=True)
                   if a != b]
        fixed = next((v for v in changed if any(v is c for c in constants)), None)
        if fixed is not None:
            raise TrainingError(
                f"A callback has changed {fixed.path} in {hook}. It is not trained, and engine ps "
                "has sent it to the workers once. Use the engine allreduce (--engine allreduce).")
        if changed:
            self._push_model()

    def _push_rate(self) -> None:
        """A learning rate that a callback has set on the chief counts on the servers."""
        own = keras_seam.rate_variable(self._run.model.optimizer)
        if own is not None:
            rate = float(own.numpy())
            if rate != self._pushed_rate:
                self._m.optimizer.set_rate(rate)
                self._pushed_rate = rate

    def _push_model(self) -> None:
        p = self._m.parameters
        values = [np.asarray(v.numpy()) for v in p.parts.trained]
        for variable, value in zip(p.variables, p.take_apart(values), strict=True):
            variable.value.assign(value)
        self._m.state.push()
        self._m.optimizer.push()

    def _refuse_weights_that_are_not_finite(self) -> None:
        """A layer may swallow what is not finite, so that no loss tells of it."""
        if self._config.stop_on_nan:
            for variable in self._m.parameters.parts.trained:
                if not np.isfinite(np.asarray(variable.numpy(), np.float64).sum()):
                    raise NotFiniteError(
                        f"{variable.path} is not finite at the end of epoch {self._epoch + 1}. "
                        "Look for inputs that are not finite, lower the learning rate, or clip "
                        "gradients (global_clipnorm). --no-stop-on-nan goes on regardless.")

    def _validate(self, validation: Source) -> dict[str, float]:
        model, batch = self._run.model, self._config.rank_batch(1)
        own = type(model).test_step is not keras.Model.test_step
        if own or self._config.ps.evaluation == "direct":
            dataset = evaluation_dataset(validation, np.arange(len(validation)), batch)
            found = model.evaluate(dataset, verbose=0, return_dict=True,
                                   callbacks=self._callbacks)
            model.reset_metrics()
            return dict(found)
        self._heeding("on_test_begin", self._callbacks.on_test_begin)
        batches = -(-len(validation) // batch)
        length = share_of(self._config.ps.steps_per_closure, batches, self._m.workers)
        flying = InFlight(self._m.coordinator)
        for begin in range(0, batches, length):
            flying.send(begin, self._evaluate, [
                tf.constant(at, tf.int64) for at in (begin, min(batches, begin + length))])
        gained = self._m.metrics.nothing()
        for _, part in sorted(flying.drain(), key=lambda pair: pair[0]):
            gained = gained + np.asarray(part)
        logs = self._m.metrics.results(gained)
        if self._wants("on_test_batch_begin") or self._wants("on_test_batch_end"):
            for step in range(batches):  # they run on workers, in no order
                self._callbacks.on_test_batch_begin(step)
                self._callbacks.on_test_batch_end(step, logs)
        self._heeding("on_test_end", lambda: self._callbacks.on_test_end(logs))
        return logs

    def _evaluate_closure(self, begin: Any, end: Any) -> Any:
        m = self._m

        def batch(number: Any, *metrics: Any) -> list[Any]:
            found = m.strategy.run(m.step.evaluate, args=(m.feed.validation(number),
                                                          list(metrics)))
            return [number + 1, *found]
        _, *states = tf.while_loop(lambda number, *_: number < end, batch,
                                   [begin, *m.metrics.begin()], parallel_iterations=1)
        return m.metrics.gained(states)

    def _stop(self, done: int) -> None:
        """Save, and end.

        Raises:
            StoppedError: Always.
        """
        run, saved = self._run, "Nothing was saved, since the run has no output folder."
        if run.store is not None:
            state = RunState(
                epoch=self._epoch, step=keras_seam.steps_done(run.model.optimizer),
                ranks=self._mode.replicas, version=run.begin.version,
                samples=run.plan.shards.samples_before(done),
                metrics=self._m.metrics.total(self._gained) if done else ())
            with run.progress.phase("saving a checkpoint"):
                saved = f"All of it is in {run.store.save(run.model, state)}; go on with --resume."
                run.store.wait()
        raise StoppedError(f"Stopped on request (signal) after step {done} of epoch "
                           f"{self._epoch + 1}. {saved}")

"""`StepClock`: where the time of a training goes, on each rank; see also `runtime.phases`.

A step's time is that of Keras' train function. Within it a clock in the graph notes when the batch
is there, when the gradients are ready, and when they are reduced; collectives of numpy arrays count
themselves. The rest comes from the phases of `Progress`. On a GPU, whose work goes on after the
function has returned, `computing` holds what cannot be told apart.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.collectives.arrays import ArrayCollective
from hvdtrain.collectives.base import Collective
from hvdtrain.optim.keras_seam import hooked
from hvdtrain.optim.reducer import GradientReducer
from hvdtrain.runtime.phases import PHASES
from hvdtrain.runtime.progress import Progress

_SAVING = ("saving a checkpoint", "waiting for a checkpoint to be on the disk",
           "writing the figures")


class StepClock:
    """The clock of this rank; `lap` gives the seconds of each phase since the last one."""

    def __init__(self, collective: Collective, progress: Progress) -> None:
        self._collective, self._progress = collective, progress
        self._counts_itself = isinstance(collective, ArrayCollective)
        self._base = time.time()
        self._one_step = True  # in a call of the train function
        with tf.device("CPU:0"):  # sums over steps of seconds since `_base`, and a count
            self._began, self._ready, self._reduced, self._reductions = (
                tf.Variable(0.0, dtype=tf.float64, trainable=False) for _ in range(4))
        self._own: dict[str, float] = defaultdict(float)
        self._before: dict[str, float] = {}
        self._lap_began = time.perf_counter()

    @contextmanager
    def traced(self, model: Any) -> Iterator[None]:
        """While entered, train steps that are traced note their times. Enter it last."""
        def train_step(original: Any, data: Any) -> Any:
            return original(self._noted(data))
        GradientReducer.observer = self
        try:
            with hooked(model, train_step=train_step):
                yield
        finally:
            GradientReducer.observer = None

    def timing(self, model: Any, *, is_new: bool) -> None:
        """Time the calls of a model's train function; `is_new`: it is traced in the first."""
        self._one_step = model.steps_per_execution == 1
        self._forget()
        self._own.clear()
        self._before = dict(self._progress.seconds)
        self._lap_began = time.perf_counter()
        model.train_function = self._timed(model.train_function, is_new=is_new)

    def _timed(self, function: Callable[[Any], Any], *, is_new: bool) -> Callable[[Any], Any]:
        own, collective = self._own, self._collective
        first = is_new

        def timed(iterator: Any) -> Any:
            nonlocal first
            spent, waited = collective.spent_s, collective.waited_s
            now = time.time()
            begin = time.perf_counter()
            logs = function(iterator)  # raises at the end of data of unknown length
            took = time.perf_counter() - begin
            if first:
                first = False
                own["building"] += took
                self._forget()
            else:
                own["steps"] += took
                own["calls"] += 1
                own["starts"] += now - self._base
                own["spent"] += collective.spent_s - spent
                own["waited"] += collective.waited_s - waited
            return logs
        return timed

    def _forget(self) -> None:
        for variable in (self._began, self._ready, self._reduced, self._reductions):
            variable.assign(0.0)

    def _now(self, after: Any) -> Any:
        with tf.device("CPU:0"), tf.control_dependencies(
                [t for t in tf.nest.flatten(after, expand_composites=True) if tf.is_tensor(t)]):
            return tf.timestamp() - tf.constant(self._base, tf.float64)

    def _noted(self, data: Any) -> Any:
        now = self._now(data)
        self._began.assign_add(now)
        with tf.control_dependencies([now]):  # else TensorFlow may look at the clock later
            return tf.nest.map_structure(
                lambda each: tf.identity(each) if tf.is_tensor(each) else each, data)

    def gradients_ready(self, gradients: Sequence[Any]) -> None:
        """Called with this rank's gradients, while a step is traced."""
        # Where the collective counts itself, this would only make its first bucket wait.
        if not self._counts_itself:
            self._ready.assign_add(self._now(gradients))

    def reduced(self, gradients: Sequence[Any]) -> None:
        """Called with those of all ranks."""
        now = self._now(gradients)
        self._reduced.assign_add(now)
        with tf.control_dependencies([now]):  # not in a step that has no data
            self._reductions.assign_add(1.0)

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last lap; `waiting` and `moving` of Horovod together."""
        now, own = time.perf_counter(), defaultdict(float, self._own)
        began, ready, reduced, reductions = (float(variable.numpy()) for variable in (
            self._began, self._ready, self._reduced, self._reductions))
        self._forget()
        self._own.clear()
        spent = {name: self._progress.seconds[name] - self._before.get(name, 0.0)
                 for name in ("evaluating", *_SAVING)}
        self._before = dict(self._progress.seconds)
        found = dict.fromkeys(PHASES, 0.0) | {
            "building": own["building"], "evaluating": spent.pop("evaluating"),
            "saving": sum(spent.values())}
        if self._one_step:
            found["input"] = max(0.0, began - own["starts"])
        found["moving"] = own["spent"] if self._counts_itself else reduced - ready
        found["waiting"] = own["waited"]
        found["moving"] -= found["waiting"]
        # Else gradients are accumulated, or two models trained.
        if self._one_step and reductions == own["calls"]:
            found["updating"] = max(0.0, own["steps"] - found["input"] - (reduced - began))
        found["computing"] = max(0.0, own["steps"] - sum(
            found[name] for name in ("input", "waiting", "moving", "updating")))
        found["other"] = max(0.0, now - self._lap_began - own["steps"] - sum(
            found[name] for name in ("building", "evaluating", "saving")))
        self._lap_began = now
        return found

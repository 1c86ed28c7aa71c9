"""In which order gradients are computed and applied: modes `async` and `sync`. On the chief.

`async`: a worker applies its gradients as soon as it has them; closures have several batches. With
a bound on staleness a batch begins only when all but so many earlier ones are applied. That bounds
how many updates a gradient may be late: those in flight with it, before and after it.

`sync`: an update is the mean of R gradients on the same parameters, as with R ranks of allreduce
and in TensorFlow's SyncReplicasOptimizer (Chen et al., 2016, "Revisiting Distributed Synchronous
SGD"); but a gradient belongs to a batch, not to a worker. Each of a step's R batches has its own
accumulator on every server, which drops gradients of former steps. So a batch computed twice (by a
backup worker, or after a worker was lost) counts once, and backup workers never change a step's
samples. It costs the servers the memory of R gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.source import DataSplits
from hvdtrain.engine_config import PsConfig
from hvdtrain.engines.parameter_server import tf_seam
from hvdtrain.engines.parameter_server.feeding import read_batch
from hvdtrain.engines.parameter_server.keras_parts import ModelParts
from hvdtrain.engines.parameter_server.parameters import Array, Layout, ServerParameters
from hvdtrain.engines.parameter_server.step import (
    MetricStates,
    ServerOptimizer,
    StateVector,
    WorkerStep,
)
from hvdtrain.optim.reducer import merge_rows
from hvdtrain.train.schedule import LrPlan, multiplier

_CLOSURES_PER_WORKER = 4  # at least, in an epoch

OnSteps = Callable[[int, Array], bool]
"""Gets the epoch's steps done and the metrics' gain since; returns whether to go on."""


class Components:
    """What the modes use: everything on the servers, and a worker's step."""

    def __init__(self, coordinator: Any, model: Any, parts: ModelParts, layout: Layout,
                 splits: DataSplits, lr: LrPlan, config: PsConfig, workers: int) -> None:
        strategy = self.strategy = coordinator.strategy
        self.coordinator, self.workers, self.splits = coordinator, workers, splits
        self.parameters = ServerParameters(strategy, parts, layout, config.wire_dtype)
        self.optimizer = ServerOptimizer(strategy, self.parameters, model, multiplier(lr))
        self.state = StateVector(strategy, parts.state)
        self.metrics = MetricStates(model, parts.metrics)
        self.step = WorkerStep(model, self.parameters, self.state, self.metrics)
        self._most = config.steps_per_closure
        self._evaluation = tf.function(self._evaluate, autograph=False)

    def pull(self) -> None:
        """Copy all that a step changes from the servers to the model and its optimizer."""
        for part in (self.parameters, self.state, self.optimizer):
            part.pull()

    def push(self) -> None:
        """The inverse of `pull`."""
        for part in (self.parameters, self.state, self.optimizer):
            part.push()

    def over_batches(self, begin: Any, end: Any,
                     batch: Callable[[Any, list[Any]], list[Any]]) -> Any:
        """The metrics' gain over batches, in a closure; `batch` gives their states after one."""
        # One after the other: the next batch must see the update of this one.
        _, *states = tf.while_loop(
            lambda number, *_: number < end,
            lambda number, *states: [number + 1, *batch(number, list(states))],
            [begin, *self.metrics.begin()], parallel_iterations=1)
        return self.metrics.gained(states)

    def evaluate(self, batches: int) -> Array:
        """The metrics' gain over so many batches of the validation data, on the workers."""
        length = _closure_length(self._most, batches, self.workers)
        flying = tf_seam.InFlight(self.coordinator)
        for begin in range(0, batches, length):
            flying.send(begin, self._evaluation, _int64s(begin, min(batches, begin + length)))
        ordered = sorted(flying.drain(), key=lambda pair: pair[0])
        return sum((np.asarray(gained) for _, gained in ordered), self.metrics.nothing)

    def _evaluate(self, begin: Any, end: Any) -> Any:
        return self.over_batches(begin, end, lambda number, metrics: self.strategy.run(
            self.step.evaluate, args=(
                read_batch("validation", self.splits.validation, number), metrics)))


class Asynchronous:
    """Trains epochs in mode `async`."""

    def __init__(self, components: Components, config: PsConfig) -> None:
        self._c, self._staleness = components, config.staleness
        self._most = 1 if self._staleness is not None else config.steps_per_closure
        self._closure = tf.function(self._train, autograph=False)
        self.flying = tf_seam.InFlight(components.coordinator)

    def run(self, epoch: int, first_step: int, steps: int, steps_before: int,
            report: OnSteps) -> int:
        """Train on an epoch from `first_step`; gives the steps done, which are all that began.

        `steps` are those of a whole epoch, `steps_before` those of all epochs before, for seeds;
        `report` is called after each closure or update.
        """
        length = _closure_length(self._most, steps, self._c.workers)
        window = 2 * self._c.workers if self._staleness is None else self._staleness + 1
        begun = done = first_step
        goes_on = True
        while self.flying or (begun < steps and goes_on):
            while goes_on and begun < steps and len(self.flying) < window:
                end = min(steps, begun + length)
                self.flying.send(end - begun, self._closure, _int64s(
                    epoch, begun, end, steps_before))
                begun = end
            for count, gained in self.flying.take(in_order=self._staleness is not None):
                done += count
                goes_on = report(done, np.asarray(gained)) and goes_on
        return done

    def _train(self, epoch: Any, begin: Any, end: Any, steps_before: Any) -> Any:
        c = self._c

        def batch(step: Any, metrics: list[Any]) -> list[Any]:
            data = read_batch("train", c.splits.train, epoch, step, tf.constant(0, tf.int64), end)
            found: list[Any] = c.strategy.run(self._one, args=(data, steps_before + step, metrics))
            return found
        if self._most == 1:
            return c.metrics.gained(batch(begin, c.metrics.begin()))
        return c.over_batches(begin, end, batch)

    def _one(self, data: Any, number: Any, metrics: list[Any]) -> list[Any]:
        c, p = self._c, self._c.parameters
        found = c.step.gradients(data, number, metrics)
        # Clipped here, where the gradients are whole.
        clipped = c.optimizer.clip([*found.dense, *found.rows])
        sent = p.send(clipped[:len(found.dense)])
        for layer, rows in zip(p.parts.tables, clipped[len(found.dense):], strict=True):
            sent |= p.send_rows(layer, rows.indices, rows.values)
        c.optimizer.apply([p.received(holder, sent[holder]) for holder in range(len(p.holders))])
        c.state.add(found.state_change)
        return found.metrics


class Synchronous:
    """Trains epochs in mode `sync`; idle workers may recompute a missing batch."""

    def __init__(self, components: Components, config: PsConfig) -> None:
        self._c, self._backups = components, config.backup_workers > 0
        self._replicas = config.replicas(components.workers)
        holders = components.parameters.holders
        self._dense = {number: holder.variable.value for number, holder in enumerate(holders)
                       if not holder.is_table}
        self._accumulators = [[tf_seam.accumulator(v) for v in self._dense.values()]
                              for _ in range(self._replicas)]
        self._closure = tf.function(self._deliver, autograph=False)
        # The number of rows of embeddings is another one in every step.
        self._update = tf.function(self._apply, autograph=False, reduce_retracing=True)
        self._local_step = 0
        self.flying = tf_seam.InFlight(components.coordinator)

    def run(self, epoch: int, first_step: int, steps: int, steps_before: int,
            report: OnSteps) -> int:
        for step in range(first_step, steps):
            results = self._collect(epoch, step, steps_before)
            gains, changes, rows = zip(*(results[r] for r in range(self._replicas)), strict=True)
            self._update(tf.constant(np.mean(changes, axis=0)),
                         [[tf.constant(array) for array in own] for own in rows])
            self._local_step += 1
            if not report(step + 1, np.sum(gains, axis=0)):
                return step + 1
        return steps

    def _collect(self, epoch: int, step: int, steps_before: int) -> dict[int, Any]:
        copies: Counter[int] = Counter()
        results: dict[int, Any] = {}

        def send(replica: int) -> None:
            copies[replica] += 1
            number = (steps_before + step) * self._replicas + replica
            self.flying.send((self._local_step, replica), self._closure, [
                *_int64s(epoch, step, replica, self._local_step, number),
                [a.accumulator_ref for a in self._accumulators[replica]]])

        for replica in range(self._replicas):
            send(replica)
        while len(results) < self._replicas:
            while self._backups and len(self.flying) < self._c.workers:
                missing = [r for r in range(self._replicas) if r not in results]
                send(min(missing, key=lambda r: (copies[r], (r + step) % self._replicas)))
            for (local_step, replica), result in self.flying.take():
                if local_step == self._local_step:
                    results.setdefault(replica, result)
        return results

    def _deliver(self, epoch: Any, step: Any, replica: Any, local_step: Any, number: Any,
                 handles: list[Any]) -> tuple[Any, Any, list[Any]]:
        c = self._c

        def one() -> tuple[Any, Any, list[Any]]:
            data = read_batch("train", c.splits.train, epoch, step, replica, step + 1)
            found = c.step.gradients(data, number, c.metrics.begin())
            sent = c.parameters.send(found.dense)
            for handle, (holder, variable) in zip(handles, self._dense.items(), strict=True):
                with tf.device(variable.device):
                    tf.raw_ops.ResourceAccumulatorApplyGradient(
                        handle=handle, local_step=local_step, gradient=tf.cast(
                            sent[holder], tf_seam.accumulated_dtype(variable)))
            return (c.metrics.gained(found.metrics), found.state_change,
                    [tensor for rows in found.rows for tensor in (rows.indices, rows.values)])
        result: tuple[Any, Any, list[Any]] = c.strategy.run(one)
        return result

    def _apply(self, state_change: Any, rows: list[list[Any]]) -> None:
        c, p = self._c, self._c.parameters

        def update() -> None:
            gradients: dict[int, Any] = {}
            for position, (number, variable) in enumerate(self._dense.items()):
                with tf.device(variable.device):
                    taken = [own[position].take_grad(1) for own in self._accumulators]
                    mean = tf.cast(tf.add_n(taken) / len(taken), variable.dtype)
                mean.set_shape(variable.shape)
                gradients[number] = mean
            for i, layer in enumerate(p.parts.tables):
                merged = merge_rows(tf.IndexedSlices(tf.concat([r[2 * i + 1] for r in rows], 0),
                                                     tf.concat([r[2 * i] for r in rows], 0)))
                sent = p.send_rows(layer, merged.indices, merged.values / self._replicas)
                gradients |= {number: p.received(number, g) for number, g in sent.items()}
            ordered = [gradients[number] for number in range(len(p.holders))]
            c.optimizer.apply(c.optimizer.clip(ordered, [h.device for h in p.holders]))
        c.strategy.run(update)
        c.state.add(state_change)


MODES: dict[str, type[Asynchronous | Synchronous]] = {"async": Asynchronous, "sync": Synchronous}


def _closure_length(most: int, steps: int, workers: int) -> int:
    """Batches per closure: few enough that all workers take part in the epoch."""
    return max(1, min(most, steps // (_CLOSURES_PER_WORKER * workers)))


def _int64s(*values: int) -> list[Any]:
    return [tf.constant(value, tf.int64) for value in values]

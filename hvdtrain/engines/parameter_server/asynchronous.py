"""Mode `async`: a worker applies its gradients itself, as soon as it has them.

The chief hands out closures of several batches. With a bound on staleness a batch is begun only
when all but so many of the batches before it have been applied, which bounds by how many updates
any gradient may be late: the ones in flight when it was computed, before and after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.engines.parameter_server.closures import InFlight
from hvdtrain.engines.parameter_server.feeding import Feed
from hvdtrain.engines.parameter_server.parameters import Array, ServerParameters
from hvdtrain.engines.parameter_server.server_optimizer import ServerOptimizer
from hvdtrain.engines.parameter_server.step import Gradients, MetricStates, StateVector, WorkerStep

_SHARE = 4
"""An epoch is cut into at least so many closures per worker."""


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """What both modes work with."""

    strategy: Any
    coordinator: Any
    parameters: ServerParameters
    optimizer: ServerOptimizer
    state: StateVector
    metrics: MetricStates
    step: WorkerStep
    feed: Feed
    workers: int


Report = Callable[[int, Array], bool]
"""Called with how many steps of the epoch are done and what the metrics gained since; returns
whether to go on."""


class Asynchronous:
    """Trains epochs. On the chief.

    Args:
        machinery: The parts.
        steps_per_closure: Integer, the most batches in a closure.
        staleness: Integer or None, batches in flight beside the oldest one.
    """

    replicas = 1

    def __init__(self, machinery: Machinery, *, steps_per_closure: int,
                 staleness: int | None) -> None:
        self._m = machinery
        self._steps_per_closure = 1 if staleness is not None else steps_per_closure
        self._staleness = staleness
        self._closure = tf.function(self._train, autograph=False)
        self._flying = InFlight(machinery.coordinator)

    def run(self, epoch: int, first_step: int, steps: int, steps_before: int,
            report: Report) -> int:
        """Train on the steps of an epoch.

        Args:
            epoch: Integer, from 0.
            first_step: Integer, where to begin.
            steps: Integer, steps of the whole epoch.
            steps_before: Integer, steps of all epochs before, for seeds.
            report: Callable, after each closure.

        Returns:
            How many steps of the epoch are done; all that were begun are.
        """
        length = share_of(self._steps_per_closure, steps, self._m.workers)
        window = 2 * self._m.workers if self._staleness is None else self._staleness + 1
        begun = done = first_step
        goes_on = True
        while self._flying or (begun < steps and goes_on):
            while goes_on and begun < steps and len(self._flying) < window:
                end = min(steps, begun + length)
                self._flying.send(end - begun, self._closure, [
                    tf.constant(v, tf.int64) for v in (epoch, begun, end, steps_before)])
                begun = end
            for count, gained in self._flying.take(in_order=self._staleness is not None):
                done += count
                goes_on = report(done, np.asarray(gained)) and goes_on
        return done

    def _train(self, epoch: Any, begin: Any, end: Any, steps_before: Any) -> Any:
        m = self._m

        def batch(step: Any, *metrics: Any) -> list[Any]:
            data = m.feed.train(epoch, step, tf.constant(0, tf.int64), end)
            found: list[Any] = m.strategy.run(
                self._one, args=(data, steps_before + step, list(metrics)))
            return [step + 1, *found]

        states = m.metrics.begin()
        if self._steps_per_closure == 1:
            return m.metrics.gained(batch(begin, *states)[1:])
        # One after the other: the next batch must see the update of this one.
        _, *states = tf.while_loop(lambda step, *_: step < end, batch, [begin, *states],
                                   parallel_iterations=1)
        return m.metrics.gained(states)

    def _one(self, data: Any, number: Any, metrics: list[Any]) -> list[Any]:
        m = self._m
        found = m.step.gradients(data, number, metrics)
        m.optimizer.apply(self._for_servers(found))
        m.state.add(found.state_change)
        return found.metrics

    def _for_servers(self, found: Gradients) -> list[Any]:
        """Clipped here, where the gradients are whole, and then sent."""
        p, tables = self._m.parameters, self._m.parameters.parts.tables
        slices = [tf.IndexedSlices(values, rows,
                                   tf.constant(tuple(layer._embeddings.shape), tf.int64))
                  for layer, (rows, values) in zip(tables, found.rows, strict=True)]
        clipped = self._m.optimizer.clip([*found.dense, *slices])
        sent = p.send(clipped[:len(found.dense)])
        for layer, rows in zip(tables, clipped[len(found.dense):], strict=True):
            sent |= p.send_rows(layer, rows.indices, rows.values)
        return [p.received(number, sent[number]) for number in range(len(p.holders))]


def share_of(most: int, steps: int, workers: int) -> int:
    """Batches in a closure: few enough that all workers have a share of the epoch."""
    return max(1, min(most, steps // (_SHARE * workers)))

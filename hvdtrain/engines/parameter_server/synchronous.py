"""Mode `sync`: an update is the mean of R gradients that were computed on the same parameters.

That is what R ranks of allreduce do, and what TensorFlow's SyncReplicasOptimizer did (Chen et al.,
2016, "Revisiting Distributed Synchronous SGD"), with one difference: a gradient belongs to a batch
and not to a worker. Each of the R batches of a step has an accumulator of its own on every server.
So a batch that was computed twice, by a backup worker or because a worker was lost after it had
delivered, counts once; and a backup worker never changes which samples are in a step.

An accumulator drops what was computed for a former step. It costs the servers the memory of R
gradients.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.engines.parameter_server import tf_seam
from hvdtrain.engines.parameter_server.asynchronous import Machinery, Report
from hvdtrain.engines.parameter_server.closures import InFlight
from hvdtrain.engines.parameter_server.parameters import Array
from hvdtrain.optim.reducer import merge_rows


class Synchronous:
    """Trains epochs. On the chief.

    Args:
        machinery: The parts.
        replicas: Integer, gradients per update.
        backups: Boolean, whether workers without a batch compute one again that is missing.
    """

    def __init__(self, machinery: Machinery, *, replicas: int, backups: bool) -> None:
        self._m = machinery
        self.replicas = replicas
        self._backups = backups
        self._dense = [number for number, holder in enumerate(machinery.parameters.holders)
                       if not holder.is_table]
        self._accumulators = [
            [tf_seam.accumulator(machinery.parameters.holders[number].variable.value)
             for number in self._dense] for _ in range(replicas)]
        self._closure = tf.function(self._deliver, autograph=False)
        self._update = tf.function(self._apply, autograph=False)
        self._local_step = 0
        self._flying = InFlight(machinery.coordinator)

    def run(self, epoch: int, first_step: int, steps: int, steps_before: int,
            report: Report) -> int:
        """As `Asynchronous.run`; `report` is called after each update."""
        for step in range(first_step, steps):
            results = self._collect(epoch, step, steps_before)
            ordered = [results[replica] for replica in range(self.replicas)]
            self._update(tf.constant(np.mean([r[1] for r in ordered], axis=0)),
                         [[tf.constant(a) for a in r[2]] for r in ordered])
            self._local_step += 1
            if not report(step + 1, np.sum([r[0] for r in ordered], axis=0)):
                return step + 1
        return steps

    def drain(self) -> None:
        """Wait for closures whose gradients are no longer needed."""
        self._flying.drain()

    def _collect(self, epoch: int, step: int, steps_before: int) -> dict[int, Any]:
        """Results of all replicas for one step."""
        copies: Counter[int] = Counter()
        results: dict[int, Any] = {}

        def send(replica: int) -> None:
            copies[replica] += 1
            arguments = [tf.constant(v, tf.int64) for v in (
                epoch, step, replica, self._local_step,
                (steps_before + step) * self.replicas + replica)]
            handles = [a.accumulator_ref for a in self._accumulators[replica]]
            self._flying.send((self._local_step, replica), self._closure, [*arguments, handles])

        for replica in range(self.replicas):
            send(replica)
        while len(results) < self.replicas:
            while self._backups and len(self._flying) < self._m.workers:
                missing = [r for r in range(self.replicas) if r not in results]
                send(min(missing, key=lambda r: (copies[r], (r + step) % self.replicas)))
            for (local_step, replica), result in self._flying.take():
                if local_step == self._local_step:
                    results.setdefault(replica, result)
        return results

    def _deliver(self, epoch: Any, step: Any, replica: Any, local_step: Any, number: Any,
                 handles: list[Any]) -> tuple[Any, Any, list[Array]]:
        m = self._m

        def one() -> tuple[Any, Any, list[Any]]:
            data = m.feed.train(epoch, step, replica, step + 1)
            found = m.step.gradients(data, number, m.metrics.begin())
            sent = m.parameters.send(found.dense)
            for handle, holder in zip(handles, self._dense, strict=True):
                variable = m.parameters.holders[holder].variable.value
                with tf.device(variable.device):
                    tf.raw_ops.ResourceAccumulatorApplyGradient(
                        handle=handle, local_step=local_step, gradient=tf.cast(
                            sent[holder], tf_seam.accumulated_dtype(variable)))
            return (m.metrics.gained(found.metrics), found.state_change,
                    [tensor for pair in found.rows for tensor in pair])
        result: tuple[Any, Any, list[Any]] = m.strategy.run(one)
        return result

    def _apply(self, state_change: Any, rows: list[list[Any]]) -> None:
        m, p = self._m, self._m.parameters

        def update() -> None:
            gradients: dict[int, Any] = {}
            for position, number in enumerate(self._dense):
                with tf.device(p.holders[number].device):
                    taken = [own[position].take_grad(1) for own in self._accumulators]
                    mean = tf.cast(tf.add_n(taken) / len(taken),
                                   p.holders[number].variable.value.dtype)
                mean.set_shape(p.holders[number].variable.shape)
                gradients[number] = mean
            for i, layer in enumerate(p.parts.tables):
                merged = merge_rows(tf.IndexedSlices(tf.concat([r[2 * i + 1] for r in rows], 0),
                                                     tf.concat([r[2 * i] for r in rows], 0)))
                sent = p.send_rows(layer, merged.indices, merged.values / self.replicas)
                gradients |= {number: p.received(number, g) for number, g in sent.items()}
            ordered = [gradients[number] for number in range(len(p.holders))]
            m.optimizer.apply(m.optimizer.clip(ordered, [h.device for h in p.holders]))
        m.strategy.run(update)
        m.state.add(state_change)

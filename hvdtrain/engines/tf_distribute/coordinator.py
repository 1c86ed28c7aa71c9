"""`StrategyCoordinator`: what all replicas do together during `fit`, before any other callback.

As the `Coordinator` of allreduce; but metrics are summed over all replicas by the strategy
itself, wherever one of their variables is read, so that all processes read them together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.single import SingleCollective
from hvdtrain.engines.tf_distribute import replicas
from hvdtrain.errors import TrainingError
from hvdtrain.optim import keras_seam, state
from hvdtrain.train.callbacks.coordinator import Coordinator
from hvdtrain.train.callbacks.mid_epoch import StopSaver
from hvdtrain.train.checkpoint import RunState
from hvdtrain.train.chief import on_chief
from hvdtrain.train.metrics import merged_results, merged_states

_SUMMED = SingleCollective()
"""For metrics: what is read is over all replicas already."""


class StrategyCoordinator(Coordinator):
    """The first callback on every process.

    Args:
        strategy: The strategy.
        others: As for `Coordinator`.
    """

    def __init__(self, strategy: Any, **others: Any) -> None:
        super().__init__(**others)
        self._strategy = strategy

    def _results(self) -> dict[str, float]:
        return merged_results(_SUMMED, self.model)

    def _merge(self, figures: dict[str, Any]) -> None:
        """Bring statistics together, and put figures of all replicas in place of this process'."""
        replicas.average_statistics(self._strategy, self._collective, self.model)
        merged = self._results()
        known = {k: v for k, v in merged.items() if k in figures or not figures}
        # A custom train_step may report figures of its own: their mean over the processes.
        others = sorted(set(figures) - set(known))
        if others:
            mine = tf.constant([float(np.mean(figures[name])) for name in others], tf.float64)
            means = self._collective.reduce([mine], name="figures", op="average")[0].numpy()
            known.update(zip(others, map(float, means), strict=True))
        figures.update(known)

    def _agree(self) -> None:
        """As allreduce does; and look at the loss, which is of all replicas."""
        super()._agree()
        if not self._stop_on_nan or self._steps_seen == 0:
            return
        loss = next((m for m in self.model.metrics if m.name == "loss"), None)
        if loss is not None and not np.isfinite(float(loss.result())):
            raise TrainingError(
                "The loss is not finite (NaN or infinity), seen after step "
                f"{keras_seam.steps_done(self.model.optimizer)}. Training was stopped before "
                "anything was saved: checkpoints that were written are from before. Look at the "
                "data of these steps, lower the learning rate, or add clipping "
                "(global_clipnorm=1.0).")

    def _compare_weights(self, when: str) -> None:
        super()._compare_weights(when)
        replicas.check_replicas_equal(
            self._strategy, [*self.model.trainable_variables,
                             *keras_seam.shared_variables(self.model.optimizer)], when=when)


class StrategyStopSaver(StopSaver):
    """Writes the checkpoint of a run that was told to stop.

    Args:
        strategy: The strategy.
        others: As for `StopSaver`.
    """

    def __init__(self, strategy: Any, **others: Any) -> None:
        super().__init__(**others)
        self._strategy = strategy

    def save(self, model: Any, epoch: int, step: int) -> str:
        """See `StopSaver.save`. All processes."""
        with self._progress.phase("saving a checkpoint"):
            replicas.average_statistics(self._strategy, self._collective, model)
            run_state = RunState(
                epoch=epoch, step=keras_seam.steps_done(model.optimizer),
                ranks=self._shards.size, lr_scale=self._lr_scale, version=self._version,
                seeds=state.seeds_of(state.training_state(model)),
                samples=self._shards.samples_before(step),
                metrics=merged_states(_SUMMED, model))
            return on_chief(self._collective, lambda: str(self._store.save(model, run_state)))

"""`StrategyCoordinator`: what all replicas do together during `fit`, before any other callback.

As the `Coordinator` of allreduce; but metrics are summed over all replicas by the strategy
itself, wherever one of their variables is read, so that all processes read them together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.collectives.single import SingleCollective
from hvdtrain.engines.tf_distribute import replicas
from hvdtrain.errors import NotFiniteError
from hvdtrain.optim import keras_seam
from hvdtrain.train.callbacks.coordinator import Coordinator
from hvdtrain.train.callbacks.saver import METRICS, CheckpointSaver
from hvdtrain.train.metrics import merged_logs, merged_states

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

    def _figures(self, logs: Any) -> dict[str, Any]:
        return merged_logs(self._collective, self.model, logs, metrics=_SUMMED)

    def _average_statistics(self) -> None:
        replicas.average_statistics(self._strategy, self._collective, self.model)

    def _agree(self) -> None:
        """As allreduce does; and look at the loss, which is of all replicas."""
        super()._agree()
        if not self._stop_on_nan or self._steps_seen == 0:
            return
        loss = next((m for m in self.model.metrics if m.name == "loss"), None)
        if loss is not None and not np.isfinite(float(loss.result())):
            raise NotFiniteError(
                "The loss is not finite (NaN or infinity), seen after step "
                f"{keras_seam.steps_done(self.model.optimizer)}. Training was stopped before "
                "anything was saved: checkpoints that were written are from before. Look at the "
                "data of these steps, lower the learning rate, or add clipping "
                "(global_clipnorm=1.0).")

    def compare_weights(self, when: str) -> None:
        """As there, and between the replicas of this process."""
        super().compare_weights(when)
        if not self._check_weights:
            return
        replicas.check_replicas_equal(
            self._strategy, [*self.model.trainable_variables,
                             *keras_seam.shared_variables(self.model.optimizer)], when=when)


class StrategySaver(CheckpointSaver):
    """Writes checkpoints within an epoch.

    Args:
        strategy: The strategy.
        others: As for `CheckpointSaver`.
    """

    def __init__(self, strategy: Any, **others: Any) -> None:
        super().__init__(**others)
        self._strategy = strategy

    def _before(self, model: Any) -> None:
        replicas.average_statistics(self._strategy, self._collective, model)

    def _metrics(self, model: Any) -> METRICS:
        return merged_states(_SUMMED, model)

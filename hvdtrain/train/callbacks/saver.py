"""`CheckpointSaver`: writes the checkpoint of a moment; `SaveTimes`: at which moments."""

from __future__ import annotations

import time
from typing import Any

from hvdtrain.collectives.base import Collective
from hvdtrain.data.batch_plan import BatchPlan
from hvdtrain.data.shard import ShardPlan
from hvdtrain.data.stream_plan import StreamPlan
from hvdtrain.optim import keras_seam
from hvdtrain.optim.kept_back_files import collect_kept_back
from hvdtrain.optim.state import (
    average_accumulators,
    average_statistics,
    gather_states_of_samples,
    seeds_of,
    training_state,
)
from hvdtrain.optim.zero_files import consolidated
from hvdtrain.runtime.progress import Progress
from hvdtrain.train.callbacks.state import CallbackStates
from hvdtrain.train.checkpoint import CheckpointStore
from hvdtrain.train.checkpoint_file import RunState
from hvdtrain.train.chief import on_chief
from hvdtrain.train.metrics import merged_states

METRICS = tuple[tuple[float, ...], ...]


class SaveTimes:
    """When a checkpoint is due beside the ends of epochs. Of the steps, equal on all ranks.

    Args:
        every_steps: Integer; 0 for never.
        every_s: Float, seconds; 0 for never. Only the chief's clock counts.
    """

    def __init__(self, *, every_steps: int = 0, every_s: float = 0.0) -> None:
        self._every_steps = every_steps
        self._every_s = every_s
        self._step: int | None = None
        self._at = time.monotonic()
        self.now = 0
        """Steps that were done, after the one that runs."""

    def begin(self, step: int) -> None:
        """Training begins, or a checkpoint was written, after so many steps."""
        self._step, self._at = step, time.monotonic()

    def by_steps(self, step: int) -> bool:
        """Whether one is due after so many steps."""
        if not self._every_steps or self._step is None:
            return False
        return step // self._every_steps > self._step // self._every_steps

    def by_clock(self) -> bool:
        """Whether one is due by this rank's clock."""
        return bool(self._every_s) and time.monotonic() - self._at >= self._every_s


class CheckpointSaver:
    """Writes checkpoints at the end of an epoch or within one. On every rank.

    Args:
        collective: The collective of the run.
        progress: Of this rank, for the watchdog: all ranks wait while the chief saves.
        store: Where checkpoints go.
        shards: Which samples belong to which step, and how many gradients an update has.
        version: String, this hvdtrain.
        states: What the user's callbacks remember; None to keep nothing of them.
    """

    def __init__(self, *, collective: Collective, progress: Progress, store: CheckpointStore,
                 shards: ShardPlan | StreamPlan | BatchPlan, version: str,
                 states: CallbackStates | None = None) -> None:
        self._collective = collective
        self._progress = progress
        self._store = store
        self._shards = shards
        self._version = version
        self._states = states

    def save(self, model: Any, epoch: int, step: int = 0) -> str:
        """Write one; returns its path. All ranks.

        Args:
            model: The model.
            epoch: Integer, epochs that were completed.
            step: Integer, steps of the next one that were done.

        Raises:
            CheckpointError: On every rank, if the chief could not write it, or the one before.
        """
        with self._progress.phase("saving a checkpoint"):
            self._before(model)
            state = RunState(
                epoch=epoch, step=keras_seam.steps_done(keras_seam.optimizers_of(model)),
                ranks=self._shards.size, version=self._version,
                seeds=seeds_of(training_state(model)),
                samples=self._shards.samples_before(step) if step else 0,
                metrics=self._metrics(model) if step else (),
                callbacks=self._states.collect() if self._states is not None else (),
                stream_order=getattr(self._shards, "stream_order", ""),
                rank_states=gather_states_of_samples(self._collective, model),
                kept_back=collect_kept_back(keras_seam.optimizers_of(model)))
            with consolidated(keras_seam.optimizers_of(model)):
                return on_chief(self._collective, lambda: str(self._store.save(model, state)))

    def wait(self) -> None:
        """Return when the last one is on the disk. All ranks.

        Raises:
            CheckpointError: On every rank, if it could not be written.
        """
        with self._progress.phase("waiting for a checkpoint to be on the disk"):
            on_chief(self._collective, self._store.wait)

    def _before(self, model: Any) -> None:
        """What all ranks do before the chief writes."""
        average_statistics(self._collective, model)
        average_accumulators(self._collective, model.optimizer)

    def _metrics(self, model: Any) -> METRICS:
        """The states of the metrics over all ranks."""
        return merged_states(self._collective, model)

"""A Python job: another job's first steps, with the clock at the end of each.

`HVDTRAIN_SHORT_JOB` is JSON with `job`, its name; `folder`, in which each rank writes
`steps-<rank>.json`; `seconds`, after which it stops, and `steps`, which it trains at least;
`pinned`, whether each rank is bound to one core of this machine. It works with every engine and any
number of ranks, where `fit hvdtrain.bench.short_job` is started.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from hvdtrain.entry import load_job
from hvdtrain.job import SHORT_JOB_VARIABLE, Job
from hvdtrain.world import detect_world

_EPOCHS = 1_000_000


def job() -> Job:
    """The job, which trains without checkpoints and evaluation until its time is over."""
    told = json.loads(os.environ[SHORT_JOB_VARIABLE])
    if told.get("pinned"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[detect_world(os.environ).rank % len(cores)]})
    found = load_job(told["job"])

    def data() -> Any:
        from hvdtrain.data.source import DataSplits, splits_of
        return DataSplits(train=splits_of(found.data()).train)

    return dataclasses.replace(
        found, name="short", data=data, callbacks=lambda: [*found.callbacks(), _clock(told)],
        config=dataclasses.replace(found.config, epochs=_EPOCHS, checkpoint_every_epochs=0,
                                   checkpoint_every_steps=0, checkpoint_every_s=0.0))


def _clock(told: dict[str, Any]) -> Any:
    import keras

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        """Notes the ends of steps, by epoch, and stops the training."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.ends: list[list[float]] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.ends.append([])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.ends[-1].append(time.time())
            first = self.ends[0]
            # The first steps are traced, and settle.
            if (sum(map(len, self.ends)) >= told["steps"]
                    and time.time() - first[min(len(first), 3) - 1] > told["seconds"]):
                self.model.stop_training = True

        def on_train_end(self, logs: Any = None) -> None:
            from hvdtrain.collectives import current
            from hvdtrain.errors import CollectiveError
            try:
                rank = current().rank
            except CollectiveError:
                rank = 0  # the chief of engine ps, which alone has callbacks
            path = Path(told["folder"]) / f"steps-{rank}.json"
            path.write_text(json.dumps(self.ends))
    return Clock()

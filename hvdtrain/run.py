"""`run_job`: one rank's whole run of a job, as `hvdtrain fit` does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.job import Job, refuse_in_job
from hvdtrain.session import Session

DEFAULT_OUTPUT = Path("runs")


def with_default_output(job: Job, changes: dict[str, Any]) -> TrainConfig:
    """The job's settings with the command line's changes; output defaults to `runs/<job>`."""
    refuse_in_job(changes)
    if job.config.output is None:
        changes = {"output": DEFAULT_OUTPUT / job.name, **changes}
    return job.config.with_options(changes)


def run_job(job: Job, config: TrainConfig, session: Session, *,
            stop_asked: Callable[[], bool] | None = None, dry_run: bool = False) -> Any:
    """Build the job's model and data, make its optimizer distributed, and train. All ranks.

    Args:
        job: What to train.
        config: Settings, in place of the job's own.
        session: This rank.
        stop_asked: Callable that tells whether this process was told to stop.
        dry_run: Boolean; print the plan and return.

    Returns:
        A `RunResult`.
    """
    import keras

    from hvdtrain.data.source import splits_of
    from hvdtrain.train.feed import SourceFeed
    from hvdtrain.train.fit import Run
    keras.utils.set_random_seed(config.seed or 0)
    with session.progress.phase("building data and model"):
        splits = splits_of(job.data())
        model = job.model()
    run = Run(model=model, session=session, config=config, name=job.name,
              callbacks=keras.tree.flatten(list(job.callbacks())),
              stop_asked=stop_asked or (lambda: False))
    validation = (None if splits.validation is None else
                  SourceFeed(splits.validation, session, config))
    return run.fit(SourceFeed(splits.train, session, config), validation, dry_run=dry_run)

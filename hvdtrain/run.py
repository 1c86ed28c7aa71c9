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
        A `FitResult`.
    """
    import keras

    from hvdtrain.data.source import splits_of
    from hvdtrain.train.fit import fit_job
    keras.utils.set_random_seed(config.seed or 0)
    with session.progress.phase("building data and model"):
        splits = splits_of(job.data())
        model = job.model()
    return fit_job(model, splits.train, validation=splits.validation, config=config,
               callbacks=tuple(job.callbacks()), session=session, job=job.name,
               stop_asked=stop_asked, dry_run=dry_run)

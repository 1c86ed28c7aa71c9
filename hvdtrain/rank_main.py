"""One rank of `hvdtrain fit`, from the bare process to its exit code."""

from __future__ import annotations

import os
from typing import Any

from hvdtrain.entry import load_job
from hvdtrain.run import run_job, with_default_output
from hvdtrain.runtime import guard
from hvdtrain.world.detect import detect_world


def fit_on_this_rank(target: str, changes: dict[str, Any], *, dry_run: bool) -> None:
    """Load the job, meet the other ranks, train, and say what came of it. Every rank.

    Args:
        target: String, the job as typed.
        changes: Settings given on the command line; None where not given.
        dry_run: Boolean; print the plan and return.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with guard.install(detect_world(os.environ), os.environ) as guarded:
        # Before TensorFlow is loaded, so that a mistake in a job file is told at once.
        job = load_job(target)
        config = with_default_output(job, changes)
        from hvdtrain.session import init
        session = init(collective=config.collective, hang_timeout_s=config.hang_timeout_s)
        result = run_job(job, config, session, dry_run=dry_run,
                         stop_asked=lambda: guarded.stop.requested)
        if session.world.is_chief and not dry_run:
            print(summary(result), flush=True)  # noqa: T201 - promised output
        session.collective.barrier()


def summary(result: Any) -> str:
    """The last figures and where the files are, as text."""
    last = {name: values[-1] for name, values in result.history.items() if values}
    figures = ", ".join(f"{name} {value:.4g}" for name, value in last.items())
    lines = [f"hvdtrain: {figures}" if figures else "hvdtrain: nothing left to train"]
    if result.model_path is not None:
        output = result.model_path.parent
        lines.append(f"hvdtrain: model {result.model_path}, checkpoints {output}/checkpoints, "
                     f"figures {output}/metrics.jsonl")
    return "\n".join(lines)

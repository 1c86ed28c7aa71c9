"""One rank of `hvdtrain fit`, from the bare process to its exit code."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from hvdtrain.bench.usage import start_usage
from hvdtrain.commit_names import ENDING_VARIABLE, refuse_engine
from hvdtrain.config import TrainConfig
from hvdtrain.engines.parameter_server import supervisor
from hvdtrain.engines.parameter_server.child import world_of_child
from hvdtrain.entry import load_job
from hvdtrain.job import Job, with_default_output
from hvdtrain.runtime import guard
from hvdtrain.world import World
from hvdtrain.world.detect import detect_world

ENGINES = {
    "allreduce": "hvdtrain.rank_main:fit_by_allreduce",
    "ps": "hvdtrain.engines.parameter_server.supervisor:fit_on_servers",
    "tf": "hvdtrain.engines.tf_distribute:fit_with_strategy",
}
"""Engine to `module:function`, called with the job, its settings, the `World` and `Guard` of this
process, and `dry_run`. It loads TensorFlow if it needs it, and returns a `RunResult`, or None where
another process has the result."""


def fit_on_this_rank(target: str | None, changes: dict[str, Any], *, dry_run: bool) -> None:
    """Load the job, meet the other ranks, train, and print the result. Every rank."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    world = world_of_child(os.environ) or detect_world(os.environ, parameter_servers=True)
    with guard.install(world, os.environ) as guarded:
        if (config := supervisor.settings_of_former_self()) is not None:
            supervisor.supervise(config, world, guarded)
            return
        # Before TensorFlow is loaded, so that a mistake in a job file is told at once.
        job = load_job(target)
        config = with_default_output(job, changes)
        refuse_engine(config.engine, os.environ)
        module, _, function = ENGINES[config.engine].partition(":")
        fit = getattr(import_module(module), function)
        result = fit(job, config, world, guarded, dry_run=dry_run)
        if result is not None and world.is_chief and not dry_run:
            print(summary(result), flush=True)  # noqa: T201 - promised output


def fit_by_allreduce(job: Job, config: TrainConfig, world: World, guarded: guard.Guard, *,
                     dry_run: bool) -> Any:
    """Engine `allreduce`. All ranks."""
    start_usage(f"rank{world.rank}", os.environ)
    from hvdtrain.session import init
    from hvdtrain.train.fit import run_job
    session = init(collective=config.collective, hang_timeout_s=config.hang_timeout_s,
                   timeline=config.timeline)
    result = run_job(job, config, session, dry_run=dry_run,
                     stop_asked=lambda: guarded.stop.requested or ENDING_VARIABLE in os.environ)
    session.collective.barrier()
    return result


def summary(result: Any) -> str:
    """The last metrics and where the files are, as text."""
    last = {name: values[-1] for name, values in result.history.items()
            if values and isinstance(values[-1], (int, float))}
    figures = ", ".join(f"{name} {value:.4g}" for name, value in last.items())
    lines = [f"hvdtrain: {figures}" if figures else "hvdtrain: nothing left to train"]
    if result.model_path is not None:
        output = result.model_path.parent
        lines.append(f"hvdtrain: model {result.model_path}, checkpoints {output}/checkpoints, "
                     f"figures {output}/metrics.jsonl")
    return "\n".join(lines)

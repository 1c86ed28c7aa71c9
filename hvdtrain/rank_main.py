"""One rank of `hvdtrain fit`, from the bare process to its exit code."""

from __future__ import annotations

import os
import sys
from typing import Any

from hvdtrain.config import TrainConfig, config_from_json, config_to_json
from hvdtrain.entry import load_job
from hvdtrain.job import Job
from hvdtrain.preload.child import is_forked
from hvdtrain.run import run_job, with_default_output
from hvdtrain.runtime import guard
from hvdtrain.runtime.usage import start_usage
from hvdtrain.world import World
from hvdtrain.world.detect import detect_world

SETTINGS_VARIABLE = "HVDTRAIN_PS_SETTINGS"
"""Holds a `TrainConfig` as JSON, for a supervisor that has begun anew."""


def fit_on_this_rank(target: str | None, changes: dict[str, Any], *, dry_run: bool) -> None:
    """Load the job, meet the other ranks, train, and say what came of it. Every rank.

    Args:
        target: String, the job as typed, or None.
        changes: Settings given on the command line; None where not given.
        dry_run: Boolean; print the plan and return.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    world, assignment = _who_am_i()
    with guard.install(world, os.environ) as guarded:
        if SETTINGS_VARIABLE in os.environ:
            _supervise(config_from_json(os.environ.pop(SETTINGS_VARIABLE)), world, guarded,
                       dry_run=dry_run)
            return
        # Before TensorFlow is loaded, so that a mistake in a job file is told at once.
        job = load_job(target)
        config = with_default_output(job, changes)
        if config.engine == "ps":
            result = _with_servers(job, config, world, assignment, guarded, dry_run=dry_run)
        elif config.engine == "tf":
            from hvdtrain.engines.tf_distribute.engine import fit_with_strategy
            start_usage(f"rank{world.rank}", os.environ)
            result = fit_with_strategy(job, config, detect_world(os.environ), os.environ,
                                       stop_asked=lambda: guarded.stop.requested,
                                       dry_run=dry_run)
        else:
            start_usage(f"rank{world.rank}", os.environ)
            result = _with_allreduce(job, config, guarded, dry_run=dry_run)
        if result is not None and world.is_chief and not dry_run:
            print(summary(result), flush=True)  # noqa: T201 - promised output


def _who_am_i() -> tuple[World, Any]:
    """This rank; or the process of a role, which the rank's supervisor has started."""
    from hvdtrain.engines.parameter_server.supervisor import ASSIGNMENT_VARIABLE
    text = os.environ.get(ASSIGNMENT_VARIABLE)
    if text is None:
        return detect_world(os.environ, parameter_servers=True), None
    from hvdtrain.engines.parameter_server.child import end_with_parent, world_of
    from hvdtrain.engines.parameter_server.roles import Assignment
    end_with_parent()
    assignment = Assignment.from_json(text)
    return world_of(assignment), assignment


def _with_servers(job: Job, config: TrainConfig, world: World, assignment: Any,
                  guarded: guard.Guard, *, dry_run: bool) -> Any:
    """A rank only supervises; the process of its role comes here again, with its assignment."""
    if assignment is not None:
        from hvdtrain.engines.parameter_server.child import run_child
        return run_child(assignment, job, config, guarded, dry_run=dry_run)
    if "tensorflow" in sys.modules and not is_forked():
        # A Python job has loaded it, and it takes half a gigabyte. The same process begins anew.
        os.environ[SETTINGS_VARIABLE] = config_to_json(config)
        os.execv(sys.executable, _own_command())  # noqa: S606 - the command of this process
    return _supervise(config, world, guarded, dry_run=dry_run)


def _supervise(config: TrainConfig, world: World, guarded: guard.Guard, *,
               dry_run: bool) -> None:
    from hvdtrain import log
    from hvdtrain.engines.parameter_server.rank import supervise_role
    log.configure(log.rank_prefix(world.rank, world.size, world.host))
    code = supervise_role(config, world, os.environ, _own_command(), guarded.stop,
                          dry_run=dry_run)
    if code:
        guarded.leave(code)


def _own_command() -> list[str]:
    return [sys.executable, "-m", "hvdtrain", *sys.argv[1:]]


def _with_allreduce(job: Job, config: TrainConfig, guarded: guard.Guard, *, dry_run: bool) -> Any:
    from hvdtrain.session import init
    session = init(collective=config.collective, hang_timeout_s=config.hang_timeout_s,
                   timeline=config.timeline)
    result = run_job(job, config, session, dry_run=dry_run,
                     stop_asked=lambda: guarded.stop.requested)
    session.collective.barrier()
    return result


def summary(result: Any) -> str:
    """The last figures and where the files are, as text."""
    last = {name: values[-1] for name, values in result.history.items()
            if values and isinstance(values[-1], (int, float))}
    figures = ", ".join(f"{name} {value:.4g}" for name, value in last.items())
    lines = [f"hvdtrain: {figures}" if figures else "hvdtrain: nothing left to train"]
    if result.model_path is not None:
        output = result.model_path.parent
        lines.append(f"hvdtrain: model {result.model_path}, checkpoints {output}/checkpoints, "
                     f"figures {output}/metrics.jsonl")
    return "\n".join(lines)

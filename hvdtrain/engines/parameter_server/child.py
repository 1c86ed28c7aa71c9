"""The process of one role: what `hvdtrain fit` does where it finds an assignment."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain import log
from hvdtrain.config import TrainConfig
from hvdtrain.engines.parameter_server.hang import HangWatch
from hvdtrain.engines.parameter_server.roles import Assignment
from hvdtrain.errors import EXIT_PARAMETERS_LOST, EXIT_RUN_FAILED
from hvdtrain.job import Job
from hvdtrain.optional import require
from hvdtrain.runtime.admission import admit_only
from hvdtrain.runtime.guard import Guard
from hvdtrain.runtime.progress import Progress
from hvdtrain.runtime.usage import start_usage
from hvdtrain.settings import replace
from hvdtrain.world.world import World

FEED = "hvdtrain"
"""The name under which the worker of a process reads data."""
_PR_SET_PDEATHSIG = 1
_MARK = ".hvdtrain-ps-run"


def world_of(assignment: Assignment) -> World:
    """Which rank this process works for."""
    return World(rank=assignment.rank, size=assignment.size, local_rank=0, local_size=1,
                 host=assignment.host, starter="ps", rendezvous="none")


def end_with_parent() -> None:
    """Be killed when the supervisor ends, however it ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(EXIT_RUN_FAILED)


def run_child(assignment: Assignment, job: Job, config: TrainConfig, guarded: Guard, *,
              dry_run: bool) -> Any:
    """Do the work of a role.

    Args:
        assignment: The role, and where the others are.
        job: What to train.
        config: Settings, in place of the job's own.
        guarded: The guard of this process.
        dry_run: Boolean, for the chief; print the plan and return.

    Returns:
        The chief's `RunResult`; None for the evaluator. Workers and servers do not return.
    """
    role = assignment.role
    log.configure(f"{log.rank_prefix(assignment.rank, assignment.size, assignment.host)} {role}")
    start_usage(role.file_name, os.environ)
    if role.kind == "evaluator":
        return _evaluate(assignment, job, config)
    require("tensorflow", "training")
    require("keras", "training")
    if role.kind != "chief":
        _serve(assignment, job, config)
    return _train(assignment, job, config, guarded, dry_run=dry_run)


def _evaluate(assignment: Assignment, job: Job, config: TrainConfig) -> None:
    """Before the libraries are loaded no checkpoint can be of this run."""
    former: set[tuple[str, int]] = set()
    if config.output is not None and not config.resume and not assignment.starts:
        former = {(path.name, path.stat().st_mtime_ns)
                  for path in (config.output / "checkpoints").glob("*.keras")}
        (config.output / "evaluation.jsonl").unlink(missing_ok=True)
    ended = input_has_ended()
    from hvdtrain.engines.parameter_server.evaluator import evaluate_checkpoints
    evaluate_checkpoints(job, config, ended, former)


def _serve(assignment: Assignment, job: Job, config: TrainConfig) -> NoReturn:
    """Serve until the supervisor closes the input."""
    from hvdtrain.engines.parameter_server import tf_seam
    if assignment.role.kind == "worker":
        from hvdtrain.data.source import splits_of
        from hvdtrain.engines.parameter_server.feeding import Reader
        Reader(splits_of(job.data()), config,
               config.ps.replicas(assignment.workers)).register(FEED)
    server = tf_seam.serve(assignment.cluster, assignment.role.kind, assignment.role.index,
                           threads=assignment.threads)
    if assignment.admitted:
        own = assignment.cluster[assignment.role.kind][assignment.role.index]
        admit_only(int(own.rpartition(":")[2]), assignment.admitted)
    sys.stdin.read()
    del server
    sys.stdout.flush()
    os._exit(0)  # TensorFlow has no way to end a server


def _train(assignment: Assignment, job: Job, config: TrainConfig, guarded: Guard, *,
           dry_run: bool) -> Any:
    from hvdtrain.engines.parameter_server import tf_seam
    from hvdtrain.engines.parameter_server.chief import Cluster, train
    if assignment.starts and has_begun(config.output, assignment.run):
        # What was begun goes on, and nothing of it is deleted.
        config = replace(config, resume=True, overwrite=False)
    names = ["the chief", *(f"worker {i}" for i in range(assignment.workers)),
             *(f"server {i}" for i in range(assignment.servers)), "the evaluator"]
    cluster = Cluster(
        addresses=assignment.cluster, task="chief", feed=FEED, admitted=assignment.admitted,
        texts=tuple(f"{host} ({name})" for host, name in zip(
            assignment.hosts, names, strict=False)))
    progress = Progress()
    world = world_of(assignment)
    watch = HangWatch(
        progress, world, config.hang_timeout_s, start_limit_s=config.ps.start_timeout_s,
        peers=dict(zip(
            names[1:], [*assignment.cluster["worker"], *assignment.cluster["ps"]], strict=False)))
    watch.start()
    try:
        return train(job, config, cluster, world=world, progress=progress,
                     stop_asked=lambda: guarded.stop.requested, dry_run=dry_run,
                     opened=lambda: mark_begun(config.output, assignment.run))
    except Exception as error:
        if not tf_seam.means_lost_server(error):
            raise
        log.get_logger().warning("A server was lost, and the parameters on it: %s",
                                 " ".join(str(error).split())[:200])
        sys.stdout.flush()
        os._exit(EXIT_PARAMETERS_LOST)
    finally:
        watch.close()


def mark_begun(output: Path | None, run: str) -> None:
    """Note that this run has opened the output folder."""
    if output is not None:
        (output / _MARK).write_text(run)


def has_begun(output: Path | None, run: str) -> bool:
    """Whether this run, and not only a former one, has opened the output folder."""
    return output is not None and (output / _MARK).is_file() and (
        (output / _MARK).read_text() == run)


def input_has_ended() -> threading.Event:
    """An event that is set when the supervisor closes the input of this process."""
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()
    threading.Thread(target=wait, name="hvdtrain-input", daemon=True).start()
    return ended

"""The process of one role: what `hvdtrain fit` does if it finds an assignment; whether it answers.

`Health` is for supervisors. A process that is stopped, or whose network threads hang, keeps its
connections, and TensorFlow waits forever. But a gRPC server sends an HTTP/2 SETTINGS frame on every
new connection (RFC 9113, 3.4), however busy the process is.

`hang_watch` is for the chief, which alone knows how far training is. Supervisors kill and restart
frozen servers and workers earlier; waiting for a restart is no hang.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from hvdtrain import log
from hvdtrain.bench.usage import start_usage
from hvdtrain.config import TrainConfig
from hvdtrain.engines.parameter_server.roles import ASSIGNMENT_VARIABLE, Assignment, roles_in
from hvdtrain.errors import EXIT_PARAMETERS_LOST, EXIT_RUN_FAILED, CheckpointError, ConfigError
from hvdtrain.job import Job
from hvdtrain.optional import require
from hvdtrain.runtime.admission import admit_only
from hvdtrain.runtime.guard import Guard
from hvdtrain.runtime.progress import Progress
from hvdtrain.runtime.watchdog import leave, report_of
from hvdtrain.runtime.watchdog_judge import Verdict
from hvdtrain.settings import replace
from hvdtrain.world import World

_EVALUATIONS, _POLL_S = "evaluation.jsonl", 0.5
_PR_SET_PDEATHSIG = 1
_MARK = ".hvdtrain-ps-run"
_EVERY_S, _ANSWER_S = 2.0, 1.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HEADER_BYTES, _SETTINGS = 9, 4
_LOOKS_PER_LIMIT, _LONGEST_PAUSE_S = 20, 1.0


def world_of_child(environ: Mapping[str, str]) -> World | None:
    """The rank this process works for, if a supervisor started it; it is then killed with it."""
    text = environ.get(ASSIGNMENT_VARIABLE)
    if text is None:
        return None
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(EXIT_RUN_FAILED)
    return Assignment.from_json(text).world


def run_child(assignment: Assignment, job: Job, config: TrainConfig, guarded: Guard, *,
              dry_run: bool) -> Any:
    """Do the work of a role; for arguments and result see `supervisor.fit_on_servers`."""
    role = assignment.role
    log.configure(f"{log.rank_prefix(assignment.rank, assignment.size, assignment.host)} {role}")
    is_only = role.kind in ("chief", "evaluator")
    start_usage(role.kind if is_only else f"{role.kind}{role.index}", os.environ)
    if role.kind == "evaluator":
        return _evaluate(assignment, job, config)
    require("tensorflow", "training")
    require("keras", "training")
    if role.kind != "chief":
        _serve(assignment, job, config)
    return _train(assignment, job, config, guarded, dry_run=dry_run)


def _evaluate(assignment: Assignment, job: Job, config: TrainConfig) -> None:
    """Evaluate each checkpoint as it appears, until stdin is closed and none is left.

    It has no connection to the other roles, but reads the output folder on a shared file system,
    and writes `epoch`, `step` and metrics to `evaluation.jsonl`, a line per checkpoint.
    """
    if config.output is None or not config.checkpoint_every_epochs:
        raise ConfigError("The evaluator reads checkpoints. Give --output and "
                          "--checkpoint-every-epochs 1 or more, or leave --evaluator out.")
    file = config.output / _EVALUATIONS
    # Checkpoints from before the libraries are loaded cannot be of this run.
    former: set[tuple[str, int]] = set()
    if not config.resume and not assignment.starts:
        former = {(path.name, path.stat().st_mtime_ns)
                  for path in (config.output / "checkpoints").glob("*.keras")}
        file.unlink(missing_ok=True)
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()  # to its end: the supervisor closes it
        ended.set()
    threading.Thread(target=wait, name="hvdtrain-input", daemon=True).start()
    from hvdtrain.train.checkpoint import CheckpointStore
    model, dataset = _model_and_validation(job, config)
    store = CheckpointStore(config.output / "checkpoints", keep=config.keep_checkpoints)
    lines = file.read_text().splitlines() if file.is_file() else []
    seen = {json.loads(line)["checkpoint"] for line in lines if line}
    while True:
        is_last = ended.is_set()
        for path in store.paths():
            changed = 0
            with suppress(OSError):
                changed = path.stat().st_mtime_ns
            if path.name not in seen and (path.name, changed) not in former:
                seen.add(path.name)
                _evaluate_one(model, dataset, path, file)
        if is_last:
            return
        ended.wait(_POLL_S)


def _model_and_validation(job: Job, config: TrainConfig) -> tuple[Any, Any]:
    import keras
    import numpy as np

    from hvdtrain.data.pipeline import evaluation_dataset
    from hvdtrain.data.source import one_sample, splits_of
    from hvdtrain.train.plan import build_model
    keras.utils.set_random_seed(config.seed or 0)
    splits = splits_of(job.data())
    if splits.validation is None:
        raise ConfigError("The evaluator has no validation data: the job's data() gives none. "
                          "Return DataSplits(train=..., validation=...), or leave --evaluator out.")
    model = job.model()
    build_model(model, lambda: one_sample(splits.train))
    return model, evaluation_dataset(
        splits.validation, np.arange(len(splits.validation)), config.rank_batch(1))


def _evaluate_one(model: Any, dataset: Any, path: Path, file: Path) -> None:
    from hvdtrain.train.checkpoint import read_state
    try:
        state = read_state(path)
        model.load_weights(path)
    except (CheckpointError, OSError) as error:
        # The chief keeps only the newest ones, and may have been faster.
        log.get_logger().warning("%s was not evaluated: %s", path.name, error)
        return
    figures = {name: float(value) for name, value in model.evaluate(
        dataset, verbose=0, return_dict=True).items()}
    line = {"checkpoint": path.name, "epoch": state.epoch, "step": state.step, **figures}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    log.get_logger().info("epoch %d: %s", state.epoch, ", ".join(
        f"{name} {value:.4g}" for name, value in figures.items()))


def _serve(assignment: Assignment, job: Job, config: TrainConfig) -> NoReturn:
    """Serve until the supervisor closes stdin."""
    from hvdtrain.engines.parameter_server import tf_seam
    role = assignment.role
    if role.kind == "worker":
        from hvdtrain.data.source import splits_of
        from hvdtrain.engines.parameter_server.feeding import Reader
        Reader(splits_of(job.data()), config, config.ps.replicas(assignment.workers)).register()
    server = tf_seam.serve(assignment.cluster, role.kind, role.index, threads=assignment.threads)
    if assignment.admitted:
        admit_only(int(assignment.address.rpartition(":")[2]), assignment.admitted)
    sys.stdin.read()
    del server
    sys.stdout.flush()
    os._exit(0)  # TensorFlow has no way to end a server


def _train(assignment: Assignment, job: Job, config: TrainConfig, guarded: Guard, *,
           dry_run: bool) -> Any:
    from hvdtrain.engines.parameter_server import tf_seam
    from hvdtrain.engines.parameter_server.chief import train
    mark = None if config.output is None else config.output / _MARK
    if (assignment.starts and mark is not None and mark.is_file()
            and mark.read_text() == assignment.run):
        # What this run, and not only a former one, has begun goes on: nothing of it is deleted.
        config = replace(config, resume=True, overwrite=False)

    def opened() -> None:
        if mark is not None:
            mark.write_text(assignment.run)
    progress, cluster = Progress(), assignment.cluster
    peers = {str(role): cluster[role.kind][role.index] for role in roles_in(cluster)[1:]}
    try:
        with hang_watch(progress, assignment.world, config.hang_timeout_s, peers=peers,
                        start_limit_s=config.ps.start_timeout_s):
            return train(job, config, assignment, progress=progress, dry_run=dry_run,
                         stop_asked=lambda: guarded.stop.requested, opened=opened)
    except Exception as error:
        if not tf_seam.means_lost_server(error):
            raise
        log.get_logger().warning("A server was lost, and the parameters on it: %s",
                                 " ".join(str(error).split())[:200])
        sys.stdout.flush()
        os._exit(EXIT_PARAMETERS_LOST)


class Health:
    """Watches a process that serves at `HOST:PORT`, or nowhere ("").

    Frozen after `hang_s` / 2 (0: never), before the chief, which waits for it, counts as hung.
    """

    def __init__(self, address: str, hang_s: float) -> None:
        self._address, self._limit_s = address, hang_s / 2
        self._next_s, self._well_s = 0.0, time.monotonic()
        self._served = False

    def is_frozen(self, pid: int) -> bool:
        """Whether it has not answered for too long. Asks at most every two seconds."""
        now = time.monotonic()
        if not self._limit_s or now < self._next_s:
            return False
        self._next_s = now + _EVERY_S
        answers = bool(self._address) and greets(self._address)
        self._served = self._served or answers
        # Until it has served once it may still be loading its libraries.
        if (answers or not self._served) and not is_stopped(pid):
            self._well_s = now
        return now - self._well_s > self._limit_s


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal. Linux."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def greets(address: str) -> bool:
    """Whether a gRPC server at `HOST:PORT` greets a new connection within a second."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_S) as connection:
            connection.settimeout(_ANSWER_S)
            connection.sendall(_PREFACE)
            header = connection.recv(_HEADER_BYTES, socket.MSG_WAITALL)
            return len(header) == _HEADER_BYTES and header[3] == _SETTINGS
    except OSError:
        return False


@contextmanager
def hang_watch(progress: Progress, world: World, limit_s: float, *, peers: Mapping[str, str],
               start_limit_s: float) -> Iterator[None]:
    """End the chief if nothing happens for `limit_s` (0: never) outside known slow phases.

    `peers` are workers' and servers' addresses by name; each may take `start_limit_s` to restart.
    """
    closing = threading.Event()

    def watch() -> None:
        count, since_s, silent_s = -1, time.monotonic(), None
        while not closing.wait(min(_LONGEST_PAUSE_S, limit_s / _LOOKS_PER_LIMIT)):
            now, time_s = progress.snapshot(), time.monotonic()
            if now.count != count or now.slow:
                count, since_s, silent_s = now.count, time_s, None
            elif time_s - since_s > limit_s:
                silent = [name for name, address in peers.items() if not greets(address)]
                silent_s = (silent_s or since_s) if silent else None
                if silent_s is None or time_s - silent_s > start_limit_s:
                    why = (
                        f"{', '.join(silent)} did not answer in that time. Look at their hosts."
                        if silent else "All workers and servers answer. A worker may hang in "
                        "reading its data; --hang-timeout sets the limit.")
                    leave(Verdict(kind="deadlock", causes=(world.rank,), text=(
                        f"no worker has finished a batch for {time_s - (silent_s or since_s):.0f} "
                        f"s, at {report_of(progress, with_place=True).at}. {why}")),
                        world, os.environ)
                since_s = time_s

    thread = threading.Thread(target=watch, name="hvdtrain-hang", daemon=True)
    if limit_s > 0:
        thread.start()
    try:
        yield
    finally:
        closing.set()
        if thread.is_alive():
            thread.join()

"""Runs a plan and makes the report. Loads no TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from hvdtrain import __version__
from hvdtrain.bench import measure
from hvdtrain.bench.forecast import measure as measure_profile
from hvdtrain.bench.forecast import predicted_s
from hvdtrain.bench.options import ENGINES, PlanOptions
from hvdtrain.bench.plan import HOST_NAMES, ComparePlan, EngineRun
from hvdtrain.bench.profile import Profile
from hvdtrain.bench.virtual_hosts import VirtualHosts, check_machine
from hvdtrain.errors import EXIT_SIGNALLED, ConfigError, LaunchError
from hvdtrain.preload.client import SOCKET_VARIABLE, Preloader, Process, start_program
from hvdtrain.preload.server import server_command
from hvdtrain.process import SignalInbox, answer_in

RunStatus = Literal["ok", "failed", "timeout", "interrupted"]

_JOB_LIMIT_S = 300.0
_POLL_S = 0.5
_GRACE_S = 30.0
_SHOWN_LINES, _SHOWN_BYTES = 12, 1 << 14
_LAUNCH_HOST = "login"  # where `launch` runs: a host without ranks, so that none is nearer to it
_LAST_LINES = 4
_PACKAGES = ("hvdtrain", "tensorflow", "tensorflow-cpu", "keras", "horovod", "mpi4py", "numpy")


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How a run ended; `wall_s` is from the start of its command."""

    status: RunStatus
    exit_code: int
    wall_s: float
    lines: tuple[str, ...]


def run_once(command: Sequence[str], *, folder: Path, env: Mapping[str, str], timeout_s: float,
             inbox: SignalInbox) -> RunEnd:
    """Run a command, stopped by `timeout_s` or by signals to this process; logs to `folder`.

    It runs in a fork if `env` names a preloaded process.
    """
    log = folder / "output.log"
    began = time.monotonic()
    with log.open("wb") as stream:
        process = start_program(command, env=env, stdin=subprocess.DEVNULL,
                                stdout=stream.fileno(), stderr=subprocess.STDOUT)
        try:
            stopped = _wait(process, began + timeout_s, inbox)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    lines = [line.rpartition("\r")[2].rstrip() for line in
             log.read_bytes()[-_SHOWN_BYTES:].decode("utf-8", "replace").split("\n")]
    return RunEnd(status=stopped or ("ok" if code == 0 else "failed"),
                  exit_code=EXIT_SIGNALLED - code if code < 0 else code,
                  wall_s=time.monotonic() - began,
                  lines=tuple([line for line in lines if line][-_SHOWN_LINES:]))


def _wait(process: Process, deadline: float, inbox: SignalInbox) -> RunStatus | None:
    """Wait until the process ends, or was told to and had its time; returns why it was told."""
    stopped: RunStatus | None = None
    with (selectors.DefaultSelector() as selector,
          open(os.pidfd_open(process.pid), "rb", buffering=0) as ended):
        selector.register(inbox, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while process.poll() is None:
            selector.select(_POLL_S)
            for number in inbox.take():
                if number in (signal.SIGINT, signal.SIGTERM):
                    if stopped is None:
                        deadline = time.monotonic() + _GRACE_S
                    stopped = "interrupted"
                    _tell(process, number)
            if time.monotonic() > deadline:
                if stopped is not None:
                    return stopped
                stopped, deadline = "timeout", time.monotonic() + _GRACE_S
                _tell(process, signal.SIGTERM)
    return stopped


def _tell(process: Process, number: int) -> None:
    """Signal the command; on a virtual host the program that `nsenter` runs."""
    import psutil
    with contextlib.suppress(psutil.NoSuchProcess):
        told = psutil.Process(process.pid)
        if process.args[0] == "nsenter":  # type: ignore[index]
            told = next(iter(told.children()), told)
        told.send_signal(number)


JobFacts = Mapping[str, int]  # what `job_probe.py` tells


def ask_job(job: str, environ: Mapping[str, str], inbox: SignalInbox) -> JobFacts:
    """Build a job once and count; takes the seconds of importing TensorFlow."""
    with tempfile.TemporaryDirectory() as folder:
        end = run_once([sys.executable, "-m", "hvdtrain.bench.job_probe", job], folder=Path(folder),
                       env={"TF_CPP_MIN_LOG_LEVEL": "2", **environ}, timeout_s=_JOB_LIMIT_S,
                       inbox=inbox)
    if end.status == "interrupted":
        raise KeyboardInterrupt
    if end.status == "timeout":
        raise LaunchError(
            f"The job {job} was not built in {_JOB_LIMIT_S:g} s. Expected that its model and "
            f"data are made in less; train it alone first: hvdtrain fit {job}")
    said = "\n".join(end.lines)
    facts: JobFacts | None = answer_in(said)
    if facts is None:
        raise LaunchError(f"The job {job} cannot be built (exit code {end.exit_code}):\n{said}")
    return facts


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run that has ended; `problem` is why a command that succeeded left no figures."""

    run: EngineRun
    end: RunEnd
    figures: measure.RunFigures | None = None
    epochs: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""

    @property
    def status(self) -> str:
        """`ok`, `failed`, `timeout` or `interrupted`."""
        return "failed" if self.end.status == "ok" and not self.figures else self.end.status

    def __str__(self) -> str:
        if self.figures is not None:
            return f"{self.figures.samples_per_s:.0f} samples/s, {self.end.wall_s:.1f} s in all"
        return (f"{self.status.upper()}: {self.problem or f'exit code {self.end.exit_code}'}. "
                f"{' / '.join(self.end.lines[-_LAST_LINES:])}")


def compare(plan: ComparePlan, environ: Mapping[str, str],
            say: Callable[[str], None]) -> dict[str, Any]:
    """Run everything and write `report.json`, whose values are returned.

    SIGINT and SIGTERM end the run in progress; the report then holds what there is. ConfigError if
    the output folder holds another comparison, or for a single epoch; LaunchError if the job cannot
    be built; MachineError if this machine cannot have virtual hosts.
    """
    _open_folder(plan)
    if plan.hosts:
        check_machine()
    profiles = {job: measure_profile(_plan_options(plan, job), environ, say) for job in (
        dict.fromkeys(point.job for point in plan.points) if plan.options.predict else ())}
    with contextlib.ExitStack() as stack:
        environ = stack.enter_context(_preloaded(plan, environ))
        inbox = stack.enter_context(SignalInbox())
        facts = {}
        for job in dict.fromkeys(point.job for point in plan.points):
            say(f"counting the parameters of {job}")
            facts[job] = ask_job(job, environ, inbox)
            if plan.options.epochs is None and facts[job]["epochs"] < 2:
                raise ConfigError(f"The job {job} trains for {facts[job]['epochs']} epoch, and the "
                                  "first one is not measured. Give --epochs 2 or more.")
        hosts = stack.enter_context(VirtualHosts([*HOST_NAMES[:plan.hosts], _LAUNCH_HOST])) \
            if plan.hosts else None
        done: list[MeasuredRun] = []
        for number, run in enumerate(plan.runs, start=1):
            say(f"[{number}/{len(plan.runs)}] round {run.round}, "
                f"{plan.points[run.point].label}, {run.engine}")
            done.append(_do(plan, run, facts, environ, inbox, hosts))
            say(f"[{number}/{len(plan.runs)}] {done[-1]}")
            if done[-1].status == "interrupted":
                break
    report = make_report(plan, facts, done, machine=machine_facts(), profiles=profiles)
    (plan.options.folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def _plan_options(plan: ComparePlan, job: str) -> PlanOptions:
    """What is measured of a job for predictions."""
    kinds = {"ring": "allreduce", "ps": "ps-sync"}
    return PlanOptions(
        job=job, batch_per_rank=plan.options.batch_per_rank,
        engines=tuple(dict.fromkeys(kinds[kind] for name in plan.options.engines
                                    if (kind := ENGINES[name].kind) in kinds)) or ("allreduce",),
        on=tuple(f"{point.workers}x1@{point.rate}" for point in plan.points))


def _open_folder(plan: ComparePlan) -> None:
    folder = plan.options.folder
    former = [path for name in ("report.json", "report.html", "runs", "jobs")
              if (path := folder / name).exists()]
    if former and not plan.options.overwrite:
        raise ConfigError(f"{folder} holds a former comparison ({former[0].name}). Delete it "
                          "(--overwrite), or give another folder (--output).")
    for path in former:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    for point in plan.points:
        if point.job_text is not None:
            Path(point.job).parent.mkdir(exist_ok=True)
            Path(point.job).write_text(point.job_text, encoding="utf-8")


@contextlib.contextmanager
def _preloaded(plan: ComparePlan, environ: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """The environment for all runs, which names a preloaded process, an existing or a new one."""
    # Not with virtual hosts: each would need one for its single rank.
    if plan.hosts or SOCKET_VARIABLE in environ:
        yield environ
        return
    env = {**environ, "OMP_NUM_THREADS": str(plan.threads)}
    with contextlib.closing(Preloader(server_command(), env)) as preloader:
        yield {**env, SOCKET_VARIABLE: preloader.path}


def _do(plan: ComparePlan, run: EngineRun, facts: Mapping[str, JobFacts],
        environ: Mapping[str, str], inbox: SignalInbox,
        hosts: VirtualHosts | None) -> MeasuredRun:
    point, options = plan.points[run.point], plan.options
    run.folder.mkdir(parents=True)
    command = list(run.command)
    if hosts is not None and run.in_network:
        hosts.rate(point.rate)
        command = hosts.enter(_LAUNCH_HOST, command)
    end = run_once(command, folder=run.folder, env={**environ, **run.env},
                   timeout_s=options.timeout_s, inbox=inbox)
    batches = measure.Batches(workers=point.workers, synchronous=ENGINES[run.engine].synchronous,
                      batch_per_rank=options.batch_per_rank or facts[point.job]["batch_per_rank"])
    ended_well = end.status == "ok"
    try:
        figures, epochs = measure.measure(run.folder, batches, options.wanted_target())
    except measure.NotMeasuredError as error:
        return MeasuredRun(run=run, end=end, problem=str(error) if ended_well else "")
    return MeasuredRun(run=run, end=end, epochs=epochs, figures=figures if ended_well else None)


def machine_facts() -> dict[str, Any]:
    """This machine and its package versions, without names of host or user."""
    import psutil
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {"cores": len(os.sched_getaffinity(0)),
            "processor": model[1].strip() if model else platform.machine(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "system": f"{platform.system()} {platform.release()}", "versions": versions}


def make_report(plan: ComparePlan, facts: Mapping[str, JobFacts], done: Sequence[MeasuredRun], *,
                machine: Mapping[str, Any],
                profiles: Mapping[str, Profile] | None = None) -> dict[str, Any]:
    """All results, as JSON values."""
    options, target = plan.options, plan.options.wanted_target()
    return {
        "hvdtrain": __version__, "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "job": options.job, "name": options.name, "rounds": options.rounds,
        "target": str(target) if target else None,
        "target_figure": target.figure if target else None,
        "target_value": target.value if target else None,
        "threads": plan.threads, "interrupted": any(one.status == "interrupted" for one in done),
        "failed": sum(one.figures is None for one in done), "runs": len(done),
        "planned_runs": len(plan.runs), "machine": dict(machine),
        "jobs": dict(facts),
        "points": [_point(plan, place, facts, done, profiles or {})
                   for place in range(len(plan.points))],
    }


def _point(plan: ComparePlan, place: int, facts: Mapping[str, JobFacts],
           done: Sequence[MeasuredRun], profiles: Mapping[str, Profile]) -> dict[str, Any]:
    point = plan.points[place]
    profile = profiles.get(point.job)
    # The speed of one process on the same job, from whichever point it was run at.
    single = measure.spread(one.figures.samples_per_s for one in done
                    if one.figures is not None and one.run.engine == "single"
                    and plan.points[one.run.point].job == point.job)
    engines = {}
    for engine in plan.options.engines:
        mine = [one for one in done if one.run.point == place and one.run.engine == engine]
        if mine:
            engines[engine] = {
                "kind": ENGINES[engine].kind, "says": ENGINES[engine].says,
                "computed": measure.computed(
                    engine, point, facts[point.job]["parameter_bytes"]) | {
                        "predicted_seconds": profile and predicted_s(engine, point, profile)},
                "summary": measure.summarize(
                    [one.figures for one in mine if one.figures is not None],
                    [one.end.wall_s for one in mine if one.figures is not None],
                    single=single["median"] if single else None,
                    workers=1 if engine == "single" else point.workers),
                "runs": [_run(one, plan.options.folder) for one in mine],
            }
    workers = f"{point.workers} workers"
    return {"label": point.label, "axes": dict(point.axes), "job": point.job,
            "heading": f"{point.label}: {workers}" if point.axes else workers,
            "workers": point.workers, "servers": point.servers, "rate": point.rate,
            "servers_on": point.servers_on if point.rate else None, "engines": engines}


def _run(one: MeasuredRun, folder: Path) -> dict[str, Any]:
    figures = one.figures
    return {
        "round": one.run.round, "folder": os.path.relpath(one.run.folder, folder),
        "command": one.run.render(), "status": one.status, "exit_code": one.end.exit_code,
        "wall_s": one.end.wall_s, "problem": one.problem,
        "last_lines": [] if figures else list(one.end.lines),
        "figures": {**asdict(figures), "steps_per_s": figures.steps_per_s} if figures else None,
        "epochs": one.epochs,
    }

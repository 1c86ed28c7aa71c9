"""Does a plan: starts the runs in turn and puts the report together. Loads no TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.bench.engines import ENGINES
from hvdtrain.bench.measure import Batches, Figures, NotMeasuredError, measure
from hvdtrain.bench.namespaces import check_machine
from hvdtrain.bench.plan import HOST_NAMES, ComparePlan, Point, Run
from hvdtrain.bench.probe import JobFacts, ask_job, check_epochs, machine_facts
from hvdtrain.bench.runner import Outcome, run_once
from hvdtrain.bench.summary import Spread, computed, spread, summarize
from hvdtrain.bench.virtual_hosts import VirtualHosts
from hvdtrain.errors import ConfigError
from hvdtrain.launch.signals import SignalInbox
from hvdtrain.preload.client import SOCKET_VARIABLE, Preloader
from hvdtrain.preload.server import server_command

REPORT_NAME = "report.json"
_LAUNCH_HOST = "login"
"""Where `launch` runs: a host without ranks, so that none of them is nearer to it."""
_MOST_LINES_OF_A_RUN = 4


@dataclass(frozen=True, kw_only=True)
class Done:
    """A run that has taken place."""

    run: Run
    outcome: Outcome
    figures: Figures | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Of its `metrics.jsonl`."""
    problem: str = ""
    """Why there are no figures, where the command itself ended well."""

    @property
    def failed(self) -> bool:
        """Whether it gave no figures."""
        return self.figures is None


def compare(plan: ComparePlan, environ: Mapping[str, str],
            say: Callable[[str], None]) -> dict[str, Any]:
    """Run everything and write `report.json`.

    SIGINT and SIGTERM end the run in progress; the report then holds what there is.

    Args:
        plan: From `make_plan`.
        environ: The environment of this process, which the runs get.
        say: Takes lines on the progress.

    Returns:
        The report, as JSON values.

    Raises:
        ConfigError: The output folder holds a former comparison, or an epoch is too few.
        LaunchError: The job cannot be built.
        MachineError: There can be no virtual hosts here.
    """
    _open_folder(plan)
    if plan.hosts:
        check_machine()
    with _preloaded(plan, environ) as env:
        return _compare(plan, env, say)


def _compare(plan: ComparePlan, environ: Mapping[str, str],
             say: Callable[[str], None]) -> dict[str, Any]:
    facts: dict[str, JobFacts] = {}
    for point in plan.points:
        if point.job not in facts:
            say(f"counting the parameters of {point.job}")
            facts[point.job] = ask_job(point.job, environ)
            check_epochs(point.job, facts[point.job], plan.options.epochs)
    done: list[Done] = []
    interrupted = False
    with _hosts(plan) as hosts, SignalInbox() as inbox:
        for number, run in enumerate(plan.runs, start=1):
            say(f"[{number}/{len(plan.runs)}] round {run.round}, "
                f"{plan.points[run.point].label}, {run.engine}")
            one = _do(plan, run, facts, environ, inbox, hosts)
            done.append(one)
            say(f"[{number}/{len(plan.runs)}] {_in_words(one)}")
            interrupted = one.outcome.status == "interrupted"
            if interrupted:
                break
    report = make_report(plan, facts, done, interrupted=interrupted, machine=machine_facts())
    path = plan.options.folder / REPORT_NAME
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def make_report(plan: ComparePlan, facts: Mapping[str, JobFacts], done: list[Done], *,
                interrupted: bool, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Pure: everything that was found, as JSON values."""
    options = plan.options
    target = options.wanted_target()
    return {
        "hvdtrain": __version__, "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "job": options.job, "name": options.name, "rounds": options.rounds,
        "target": str(target) if target else None,
        "target_figure": target.figure if target else None,
        "target_value": target.value if target else None,
        "threads": plan.threads, "interrupted": interrupted,
        "failed": sum(one.failed for one in done), "runs": len(done),
        "planned_runs": len(plan.runs), "machine": dict(machine),
        "jobs": {job: asdict(found) for job, found in facts.items()},
        "points": [_point(plan, place, facts, done) for place in range(len(plan.points))],
    }


def batches_of(plan: ComparePlan, run: Run, facts: Mapping[str, JobFacts]) -> Batches:
    """How the samples of a run become steps."""
    point = plan.points[run.point]
    return Batches(workers=point.workers, synchronous=ENGINES[run.engine].synchronous,
                   batch_per_rank=plan.options.batch_per_rank or facts[point.job].batch_per_rank)


def _point(plan: ComparePlan, place: int, facts: Mapping[str, JobFacts],
           done: list[Done]) -> dict[str, Any]:
    point = plan.points[place]
    single = _single(plan, point, done)
    engines = {}
    for engine in plan.options.engines:
        mine = [one for one in done if one.run.point == place and one.run.engine == engine]
        if not mine:
            continue
        good = [one for one in mine if one.figures is not None]
        engines[engine] = {
            "kind": ENGINES[engine].kind, "says": ENGINES[engine].says,
            "computed": computed(engine, point, facts[point.job].parameter_bytes),
            "summary": summarize([one.figures for one in good if one.figures is not None],
                                 [one.outcome.wall_s for one in good], single=single,
                                 workers=1 if engine == "single" else point.workers),
            "runs": [_run(one, plan.options.folder) for one in mine],
        }
    return {"label": point.label, "heading": _heading(point), "axes": dict(point.axes),
            "job": point.job, "workers": point.workers, "servers": point.servers,
            "rate": point.rate, "servers_on": point.servers_on if point.rate else None,
            "engines": engines}


def _heading(point: Point) -> str:
    return f"{point.label}: {point.workers} workers" if point.axes else f"{point.workers} workers"


def _single(plan: ComparePlan, point: Point, done: list[Done]) -> Spread | None:
    """The speed of one process on the same job, from whichever point it was run at."""
    return spread(one.figures.samples_per_s for one in done
                  if one.figures is not None and one.run.engine == "single"
                  and plan.points[one.run.point].job == point.job)


def _run(one: Done, folder: Path) -> dict[str, Any]:
    figures = None
    if one.figures is not None:
        figures = {**asdict(one.figures), "steps_per_s": one.figures.steps_per_s}
    return {
        "round": one.run.round, "folder": os.path.relpath(one.run.folder, folder),
        "command": one.run.render(), "status": _status(one), "exit_code": one.outcome.exit_code,
        "wall_s": one.outcome.wall_s, "problem": one.problem,
        "last_lines": list(one.outcome.lines) if one.failed else [],
        "figures": figures, "epochs": one.lines,
    }


def _status(one: Done) -> str:
    return "failed" if one.outcome.status == "ok" and one.failed else one.outcome.status


def _in_words(one: Done) -> str:
    if one.figures is not None:
        return f"{one.figures.samples_per_s:.0f} samples/s, {one.outcome.wall_s:.1f} s in all"
    last = " / ".join(one.outcome.lines[-_MOST_LINES_OF_A_RUN:])
    why = one.problem or f"exit code {one.outcome.exit_code}"
    return f"{_status(one).upper()}: {why}. {last}"


def _do(plan: ComparePlan, run: Run, facts: Mapping[str, JobFacts], environ: Mapping[str, str],
        inbox: SignalInbox, hosts: VirtualHosts | None) -> Done:
    """One run, and what it left."""
    point = plan.points[run.point]
    run.folder.mkdir(parents=True)
    command = list(run.command)
    env = {**environ, **run.env}
    if hosts is not None and run.in_network:
        hosts.rate(point.rate)
        command = hosts.enter(_LAUNCH_HOST, command)
    outcome = run_once(command, folder=run.folder, env=env, timeout_s=plan.options.timeout_s,
                       inbox=inbox)
    try:
        figures, lines = measure(run.folder, batches_of(plan, run, facts),
                                 plan.options.wanted_target())
    except NotMeasuredError as error:
        return Done(run=run, outcome=outcome,
                    problem=str(error) if outcome.status == "ok" else "")
    if outcome.status != "ok":
        return Done(run=run, outcome=outcome, lines=lines)
    return Done(run=run, outcome=outcome, figures=figures, lines=lines)


@contextlib.contextmanager
def _preloaded(plan: ComparePlan, environ: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """The environment for all runs, with a preloaded process from which they are forked.

    One that the environment names already serves as well. None is used with virtual hosts: each
    would need one of its own for its single rank.
    """
    if plan.hosts or SOCKET_VARIABLE in environ:
        yield environ
        return
    env = {**environ, "OMP_NUM_THREADS": str(plan.threads)}
    with contextlib.closing(Preloader(server_command(), env)) as preloader:
        yield {**env, SOCKET_VARIABLE: preloader.path}


@contextlib.contextmanager
def _hosts(plan: ComparePlan) -> Iterator[VirtualHosts | None]:
    """The virtual hosts of the plan, if it has a network."""
    if not plan.hosts:
        yield None
        return
    with VirtualHosts([*HOST_NAMES[:plan.hosts], _LAUNCH_HOST]) as hosts:
        yield hosts


def _open_folder(plan: ComparePlan) -> None:
    """Make the folder, and write the job files of a sweep."""
    folder = plan.options.folder
    former = [path for path in (folder / REPORT_NAME, folder / "report.html", folder / "runs",
                                folder / "jobs") if path.exists()]
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
            Path(point.job).parent.mkdir(parents=True, exist_ok=True)
            Path(point.job).write_text(point.job_text, encoding="utf-8")

"""`hvdtrain fit`, `plan`, `lr`, `compare`, `report`: train a job; look before and after."""

from __future__ import annotations

import csv
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main

from hvdtrain.bench.options import CompareOptions, PlanOptions
from hvdtrain.cli.settings import SETTINGS, with_settings
from hvdtrain.cli.words import given_of
from hvdtrain.errors import EXIT_RUN_FAILED, EXIT_SIGNALLED, ConfigError
from hvdtrain.job import DEFAULT_JOB, check_default_job, read_job_file, refuse_in_job
from hvdtrain.launch.options import RankCommand
from hvdtrain.settings import fields_of

Job = Annotated[str, typer.Argument(help="A .toml file, a .py file, or package.module.")]


@with_settings(SETTINGS.values())
def fit_command(
    job: Annotated[str | None, typer.Argument(
        help="A .toml file, a .py file, or package.module.",
        show_default="hvdtrain.toml of this folder")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan only.")] = False,
    *, given: dict[str, Any],
) -> None:
    """Train JOB. The same on one process and under every starter.

    hvdtrain fit JOB | hvdtrain launch -np 8 fit JOB | horovodrun -np 8 hvdtrain fit JOB |
    mpirun -np 8 hvdtrain fit JOB | srun hvdtrain fit JOB

    With parameter servers: hvdtrain launch -np 5 fit JOB --engine ps --ps 2

    The defaults are those of a job that says nothing else.
    """
    from hvdtrain.rank_main import fit_on_this_rank
    fit_on_this_rank(job, given, dry_run=dry_run)


def check_fit(words: Sequence[str], *, elsewhere: bool = False) -> dict[str, Any]:
    """Check a `fit` here, rather than on every rank; returns its settings by name.

    `words` follow `hvdtrain`, and only those of `fit` are checked; `elsewhere`: the job's files are
    on another machine.
    """
    if words[:1] != ("fit",):
        return {}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(fit_command)
    typed = typer.main.get_command(app).make_context("hvdtrain fit", list(words[1:])).params
    job, given = typed["job"], given_of(SETTINGS.values(), typed)
    refuse_in_job(given)
    for name, value in given.items():
        SETTINGS[name].check(value)
    if elsewhere:
        return given
    if job is None:
        check_default_job()
    path = Path(job or DEFAULT_JOB)
    if path.suffix == ".toml":
        read_job_file(path).train.with_options(given)
    elif path.suffix == ".py" and not path.is_file():
        raise ConfigError(f"The job file {path} does not exist. Give a .toml file, a .py "
                          "file or a module; examples/ has some of each.")
    return given


@with_settings(SETTINGS[name] for name in (
    "epochs", "batch_per_rank", "batch_global", "lr_scaling", "warmup_epochs"))
def lr_command(
    job: Job,
    ranks: Annotated[int, typer.Option("--ranks", "-np", min=1, help="Number of ranks.")] = 1,
    points: Annotated[int, typer.Option(min=2, help="Lines of the table.")] = 20,
    plot: Annotated[Path | None, typer.Option(
        metavar="FILE", help="Draw the curve: .png, .svg or .pdf.")] = None,
    to_csv: Annotated[Path | None, typer.Option(
        "--csv", metavar="FILE", help="Write every step to a CSV file.")] = None,
    *, given: dict[str, Any],
) -> None:
    """Print the learning rate of JOB on so many ranks, with scaling, warmup and schedule.

    hvdtrain lr JOB -np 8 --warmup-epochs 5 --plot lr.png
    """
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot is {str(plot)!r}. Expected a file name that ends in .png, .svg "
                          "or .pdf.")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from rich.console import Console
    from rich.table import Table
    curve = _curve(job, ranks, given)
    table = Table(title=f"Learning rate: {curve.description}", title_justify="left")
    for name in ("step", "epoch", "learning rate"):
        table.add_column(name, justify="right")
    for step in curve.points(points):
        table.add_row(f"{step + 1:,}", f"{step / curve.steps_per_epoch:.2f}",
                      f"{curve.rates[step]:.6g}")
    Console().print(table)
    if to_csv is not None:
        to_csv.parent.mkdir(parents=True, exist_ok=True)
        with to_csv.open("w", newline="") as stream:
            csv.writer(stream).writerows(
                [("step", "epoch", "learning_rate"),
                 *((step, step / curve.steps_per_epoch, rate)
                   for step, rate in enumerate(curve.rates))])
        print(f"hvdtrain lr: {to_csv}")
    if plot is not None:
        curve.draw(plot, f"{Path(job).name}, {ranks} ranks")
        print(f"hvdtrain lr: {plot}")


def _curve(target: str, ranks: int, given: dict[str, Any]) -> Any:
    from hvdtrain.entry import load_job
    job = load_job(target)
    config = job.config.with_options(given)
    from hvdtrain.collectives.single import SingleCollective
    from hvdtrain.data.source import one_sample, splits_of
    from hvdtrain.optim import DistributedOptimizer
    from hvdtrain.train.plan import build_model
    from hvdtrain.train.schedule import base_rate, learning_rates
    model, train = job.model(), splits_of(job.data()).train
    DistributedOptimizer(model.optimizer, collective=SingleCollective())
    build_model(model, lambda: one_sample(train))
    return learning_rates(model, train, config, size=ranks, base=base_rate(model.optimizer),
                          callbacks=job.callbacks())


@with_settings(fields_of(CompareOptions).values())
def compare_command(
    job: Job,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Print all command lines and do nothing.")] = False,
    *, given: dict[str, Any],
) -> None:
    """Train JOB with several engines in turn, and compare measured with computed values.

    hvdtrain compare JOB --engines single,allreduce-gloo,ps-async -np 2 --epochs 5

    hvdtrain compare JOB --network 100mbit,1gbit --hosts 2,3,4

    Exit code 0; 1 when a run failed; 130 after Ctrl-C.
    """
    from hvdtrain.bench.compare import compare
    from hvdtrain.bench.plan import make_plan
    from hvdtrain.bench.report import can_plot, show, write_page

    say = partial(print, "hvdtrain compare:", file=sys.stderr, flush=True)
    if "hosts" in given:
        try:
            given["hosts"] = tuple(map(int, given["hosts"]))
        except ValueError:
            raise ConfigError(f"--hosts is {','.join(given['hosts'])!r}. Expected whole numbers, "
                              "e.g. 2,3,4.") from None
    options = CompareOptions(job=job, **given)
    plan = make_plan(options, cores=len(os.sched_getaffinity(0)),
                     program=(sys.executable, "-m", "hvdtrain"), environ=os.environ)
    for run in plan.runs:
        words = RankCommand(words=tuple(run.command)).own_words
        check_fit(("fit", job, *words[words.index(plan.points[run.point].job) + 1:]))
    if dry_run:
        print(plan.render(), end="")
        return
    if not can_plot():
        say("there will be no plots in the report: matplotlib is not installed "
            "(pip install 'hvdtrain[plots]')")
    report = compare(plan, os.environ, say)
    page = write_page(report, options.folder)
    show(report)
    say(f"{page} and {options.folder / 'report.json'}")
    if report["interrupted"]:
        raise typer.Exit(EXIT_SIGNALLED + signal.SIGINT)
    raise typer.Exit(EXIT_RUN_FAILED if report["failed"] else 0)


@with_settings(fields_of(PlanOptions).values())
def plan_command(
    job: Job,
    to_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    *, given: dict[str, Any],
) -> None:
    """Predict the speed of JOB on other ranks and networks, from a measured run here.

    hvdtrain plan JOB --on 8x4@100gbit --on 64x8@200gbit,10us

    Nothing is trained to an end and no file of the job is written.
    """
    from rich.text import Text

    from hvdtrain.bench.forecast import as_json, forecast, measured_lines, table_of
    from hvdtrain.log import print_table, wide_console

    say = partial(print, "hvdtrain plan:", file=sys.stderr, flush=True)
    profile, predictions = forecast(PlanOptions(job=job, **given), os.environ, say)
    if to_json:
        print(as_json(profile, predictions))
        return
    console = wide_console()
    console.print(Text("Measured here", "bold"))
    for line in measured_lines(profile):
        console.print(Text(line), soft_wrap=True)
    table = table_of(predictions)
    console.print(Text(table.title, "bold"))
    print_table(console, table.columns, table.rows)


def report_command(
    runs: Annotated[list[Path], typer.Argument(
        metavar="RUN", help="Output folders of runs.")],
    output: Annotated[Path | None, typer.Option(
        "--output", "-o", metavar="FILE", help="Write the page to this file.",
        show_default="report.html in the first RUN")] = None,
) -> None:
    """Show what each RUN has reached and where its time went, on one page of HTML.

    hvdtrain report runs/digits_mlp

    hvdtrain report runs/two-ranks runs/four-ranks --output both.html
    """
    from hvdtrain.bench.report import can_plot
    from hvdtrain.bench.run_report import read_runs, write_page

    say = partial(print, "hvdtrain report:", file=sys.stderr, flush=True)
    found = read_runs(runs)
    for line in (remark for run in found for remark in run.remarks):
        say(line)
    if not can_plot():
        say("there will be no plots on the page: matplotlib is not installed "
            "(pip install 'hvdtrain[plots]')")
    page = output or runs[0] / "report.html"
    write_page(found, page)
    print(page)

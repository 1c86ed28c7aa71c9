"""`hvdtrain compare`: parse, run the plan, print the tables, write the report."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from hvdtrain.bench.options import PLACEMENTS, CompareOptions
from hvdtrain.errors import EXIT_RUN_FAILED, EXIT_SIGNALLED, ConfigError


def compare_command(
    job: Annotated[str, typer.Argument(help="A .toml file, a .py file, or package.module.")],
    engines: Annotated[str, typer.Option(
        metavar="NAME,...", help="In the order in which they take turns."
    )] = ",".join(CompareOptions.engines),
    workers: Annotated[int | None, typer.Option(
        "--workers", "-np", help="Processes that compute gradients, for every engine.",
        show_default="2, or one per host")] = None,
    ps: Annotated[int, typer.Option(help="Parameter servers.")] = CompareOptions.servers,
    epochs: Annotated[int | None, typer.Option(
        help="At least 2; the first one is not measured.", show_default="the job's")] = None,
    batch_per_rank: Annotated[int | None, typer.Option(
        help="Samples per batch of one worker.", show_default="the job's")] = None,
    rounds: Annotated[int, typer.Option(
        help="How often every engine takes its turn.")] = CompareOptions.rounds,
    threads: Annotated[int | None, typer.Option(
        help="OMP_NUM_THREADS of every process.", show_default="cores over workers")] = None,
    target: Annotated[str | None, typer.Option(
        metavar="FIGURE=VALUE", help="Report the time to it, e.g. val_accuracy=0.9.")] = None,
    network: Annotated[str | None, typer.Option(
        metavar="RATE,...", help="Run on virtual hosts with links of these speeds, e.g. "
        "100mbit,1gbit. Root only.")] = None,
    hosts: Annotated[str | None, typer.Option(
        metavar="N,...", help="With --network: numbers of hosts, with one worker on each.")] = None,
    servers_on: Annotated[str, typer.Option(
        help=f"With --network, where the parameter servers stand: {', '.join(PLACEMENTS)}."
    )] = CompareOptions.servers_on,
    sweep: Annotated[str | None, typer.Option(
        metavar="WHAT", help="Vary the data's size (data), the model's (model), the servers "
        "(roles), or a key of the job file (model.hidden=256,512).")] = None,
    output: Annotated[Path | None, typer.Option(
        "--output", "-o", help="Folder for reports and all runs.",
        show_default="runs/compare-<job>")] = None,
    overwrite: Annotated[bool, typer.Option(
        "--overwrite", help="Delete a former comparison there.")] = False,
    timeout: Annotated[float, typer.Option(
        "--timeout", metavar="SECONDS", help="Limit for one run.")] = CompareOptions.timeout_s,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Print all command lines and do nothing.")] = False,
) -> None:
    """Train JOB with several engines in turn, measure, and set it beside arithmetic.

    hvdtrain compare JOB --engines single,allreduce-gloo,ps-async -np 2 --epochs 5

    hvdtrain compare JOB --network 100mbit,1gbit --hosts 2,3,4

    Exit code 0; 1 when a run failed; 130 after Ctrl-C.
    """
    from hvdtrain.bench.compare import compare
    from hvdtrain.bench.page import can_plot, write_page
    from hvdtrain.bench.plan import make_plan
    from hvdtrain.bench.show import show
    from hvdtrain.cli.fit import check_fit
    from hvdtrain.launch.rank_command import own_words

    options = CompareOptions(
        job=job, engines=_words(engines), workers=workers, servers=ps, epochs=epochs,
        batch_per_rank=batch_per_rank, rounds=rounds, threads=threads, target=target,
        network=_words(network), hosts=_numbers("--hosts", hosts), servers_on=servers_on,
        sweep=sweep, output=output, overwrite=overwrite, timeout_s=timeout)
    plan = make_plan(options, cores=len(os.sched_getaffinity(0)),
                     program=(sys.executable, "-m", "hvdtrain"), environ=os.environ)
    for run in plan.runs:
        words = own_words(run.command)
        check_fit([job, *words[words.index(plan.points[run.point].job) + 1:]])
    if dry_run:
        print(plan.render(), end="")
        return
    if not can_plot():
        _say("there will be no plots in the report: matplotlib is not installed "
             "(pip install 'hvdtrain[plots]')")
    report = compare(plan, os.environ, _say)
    page = write_page(report, options.folder)
    show(report)
    _say(f"{page} and {options.folder / 'report.json'}")
    if report["interrupted"]:
        raise typer.Exit(EXIT_SIGNALLED + signal.SIGINT)
    raise typer.Exit(EXIT_RUN_FAILED if report["failed"] else 0)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise ConfigError(f"{option} is {text!r}. Expected whole numbers, e.g. 2,3,4.") from None


def _say(text: str) -> None:
    print(f"hvdtrain compare: {text}", file=sys.stderr, flush=True)

"""`hvdtrain compare`: parse, run the plan, print the tables, write the report."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from hvdtrain.bench.options import CompareOptions
from hvdtrain.cli.settings import with_settings
from hvdtrain.errors import EXIT_RUN_FAILED, EXIT_SIGNALLED, ConfigError
from hvdtrain.settings import fields_of


@with_settings(fields_of(CompareOptions).values())
def compare_command(
    job: Annotated[str, typer.Argument(help="A .toml file, a .py file, or package.module.")],
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Print all command lines and do nothing.")] = False,
    *, given: dict[str, Any],
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

    if "hosts" in given:
        given["hosts"] = _numbers("--hosts", given["hosts"])
    options = CompareOptions(job=job, **given)
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


def _numbers(option: str, words: Iterable[str]) -> tuple[int, ...]:
    try:
        return tuple(map(int, words))
    except ValueError:
        raise ConfigError(f"{option} is {','.join(words)!r}. Expected whole numbers, e.g. "
                          "2,3,4.") from None


def _say(text: str) -> None:
    print(f"hvdtrain compare: {text}", file=sys.stderr, flush=True)

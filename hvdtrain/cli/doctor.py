"""`hvdtrain doctor`: parse, call `examine`, print."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from hvdtrain.cli.settings import with_settings
from hvdtrain.doctor.options import DoctorOptions
from hvdtrain.errors import EXIT_MACHINE
from hvdtrain.settings import replace, settings_in


@with_settings(settings_in(DoctorOptions).values())
def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    *, given: dict[str, Any],
) -> None:
    """Check this machine, or each host of a job, and tell what repairs what is wrong.

    hvdtrain doctor

    hvdtrain doctor -H node1:4,node2:4

    Exit code 0, or 3 when a check failed.
    """
    from hvdtrain.doctor.examine import examine
    from hvdtrain.doctor.finding import any_failed
    from hvdtrain.doctor.show import as_json as to_json
    from hvdtrain.doctor.show import show

    options = replace(DoctorOptions(), **given)
    report = examine(options, os.environ, _say)
    if as_json:
        print(to_json(report))
    else:
        show(report)
    raise typer.Exit(EXIT_MACHINE if any_failed(report.findings) else 0)


def _say(text: str) -> None:
    print(f"hvdtrain doctor: {text}", file=sys.stderr, flush=True)

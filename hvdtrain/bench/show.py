"""A report as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdtrain.bench.tables import tables

_WIDTH = 160
"""In a file or a pipe."""
_SHORT_S = 5.0
"""Below it, two ends that are uncertain by a fifth of a second count for several percent."""


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the tables of each point, and what failed."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH, highlight=False)
    for point in report["points"]:
        if not point["engines"]:
            continue
        console.print(Text(point["heading"], "bold"))
        for content in tables(point, report["target"]):
            console.print(Text(content.title))  # a title of the table breaks at its width
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for column in content.columns:
                table.add_column(Text(column), overflow="fold")
            for row in content.rows:
                table.add_row(*map(Text, row))
            console.print(table)
    for line in [*remarks(report), *failures(report)]:
        console.print(Text(line), soft_wrap=True)


def remarks(report: Mapping[str, Any]) -> list[str]:
    """What the figures cannot be trusted for."""
    short = sorted({engine for point in report["points"]
                    for engine, told in point["engines"].items()
                    if told["summary"] and told["summary"]["measured_s"]["median"] < _SHORT_S})
    if not short:
        return []
    return [f"Measured for less than {_SHORT_S:g} s: {', '.join(short)}. Counters are read five "
            "times a second, so that bytes and CPU per step are uncertain. Give more --epochs."]


def failures(report: Mapping[str, Any]) -> list[str]:
    """The runs that gave no figures, and how they ended."""
    lines = []
    for point in report["points"]:
        for engine, told in point["engines"].items():
            for run in told["runs"]:
                if run["figures"] is not None:
                    continue
                why = f": {run['problem']}" if run["problem"] else ""
                lines.append(f"{engine} ({point['label']}, round {run['round']}): {run['status']}, "
                             f"exit code {run['exit_code']}{why}. Its last lines:")
                lines += [f"    {line}" for line in run["last_lines"]]
    if report["interrupted"]:
        lines.append(f"Interrupted after {report['runs']} of {report['planned_runs']} runs.")
    return lines

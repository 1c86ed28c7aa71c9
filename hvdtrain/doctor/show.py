"""A report as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdtrain import __version__
from hvdtrain.doctor.examine import Report
from hvdtrain.doctor.finding import Finding, any_failed

_WORDS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "failed": ("FAILED", "bold red"),
          "not_applicable": ("-", "dim")}
_WIDTH = 160
"""In a file or a pipe."""


def as_json(report: Report) -> str:
    """One JSON document."""
    return json.dumps({
        "hvdtrain": __version__, "hosts": list(report.hosts), "seconds": round(report.seconds, 1),
        "status": "failed" if any_failed(report.findings) else "ok",
        "checks": [asdict(finding) for finding in report.findings]}, indent=1)


def show(report: Report, console: Console | None = None) -> None:
    """Print the table and, below it, what repairs each warning and failure."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("", "check", "host"):
        table.add_column(title, no_wrap=title != "host")
    table.add_column("found", overflow="fold")
    for finding, hosts in grouped(report.findings):
        word, style = _WORDS[finding.status]
        table.add_row(Text(word, style), Text(finding.check), Text(", ".join(hosts)),
                      Text(finding.found, "dim" if finding.status == "not_applicable" else ""))
    console.print(table)
    for finding, hosts in grouped(report.findings):
        if finding.fix:
            word, style = _WORDS[finding.status]
            console.print(Text.assemble((word, style), f" {finding.check} on {', '.join(hosts)}, "
                                        f"expected: {finding.expected}"), soft_wrap=True)
            console.print(Text(f"    {finding.fix}"), soft_wrap=True)
    console.print(Text(summary(report)), soft_wrap=True)


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, list[str]]]:
    """Findings that differ in their host only become one, in the order of the checks."""
    findings = list(findings)
    order = list(dict.fromkeys(finding.check for finding in findings))
    rows: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
    for finding in sorted(findings, key=lambda finding: order.index(finding.check)):
        key = (finding.check, finding.status, finding.found, finding.fix)
        rows.setdefault(key, (finding, []))[1].append(finding.host)
    return list(rows.values())


def summary(report: Report) -> str:
    """The last line."""
    count = {status: sum(finding.status == status for finding in report.findings)
             for status in _WORDS}
    plural = "" if count["warning"] == 1 else "s"
    return (f"{count['failed']} failed, {count['warning']} warning{plural}, {count['ok']} ok, "
            f"{count['not_applicable']} not applicable, in {report.seconds:.1f} s")

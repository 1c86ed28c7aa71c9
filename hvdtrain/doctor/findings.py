"""`Finding`: what one check found on one host and what repairs it, and how findings are shown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from hvdtrain import __version__
from hvdtrain.doctor.facts import ProbeFacts
from hvdtrain.log import print_table, wide_console

if TYPE_CHECKING:
    from rich.console import Console

ALL_HOSTS = "all"  # as a host, for what concerns the hosts together
_WORDS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "failed": ("FAILED", "bold red"),
          "not_applicable": ("-", "dim")}


@dataclass(frozen=True)
class Finding:
    """One line of the table; the names of `check` stay the same from release to release.

    Each warning and failure has `expected` and `fix`, the command that repairs it.
    """

    status: Literal["ok", "warning", "failed", "not_applicable"]
    check: str
    host: str
    found: str
    expected: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status in ("warning", "failed") and not (self.fix and self.expected):
            raise ValueError(f"{self.check} {self.status} says neither what was expected nor what "
                             "to do")


ok = partial(Finding, "ok")
not_applicable = partial(Finding, "not_applicable")
#: Training runs, but worse than it could, or not everywhere.
warning = partial(Finding, "warning")
#: Training does not run like this.
failed = partial(Finding, "failed")


@dataclass(frozen=True, kw_only=True)
class HostView:
    """A host that answered: its facts, and what was measured from here.

    `slots` are the ranks that it is to take (None: not given); `noise` is what login scripts
    printed; its clock is ahead by `clock_offset_s`, with an error of up to `clock_error_s`.
    """

    name: str
    facts: ProbeFacts
    slots: int | None = None
    is_local: bool = False
    answer_s: float = 0.0
    noise: tuple[str, ...] = ()
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """The findings of all hosts."""

    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def has_failed(self) -> bool:
        """Whether a check failed."""
        return any(finding.status == "failed" for finding in self.findings)

    def as_json(self) -> str:
        """One JSON document."""
        return json.dumps({
            "hvdtrain": __version__, "hosts": self.hosts, "seconds": round(self.seconds, 1),
            "status": "failed" if self.has_failed else "ok",
            "checks": [asdict(finding) for finding in self.findings]}, indent=1)

    def show(self, console: Console | None = None) -> None:
        """Print the table and, below it, what repairs each warning and failure."""
        from rich.text import Text

        console, rows, fixes = wide_console(console), [], []
        for finding, hosts in grouped(self.findings):
            word, named = _WORDS[finding.status], ", ".join(hosts)
            rows.append((Text(*word), finding.check, named, Text(
                finding.found, "dim" if finding.status == "not_applicable" else "")))
            if finding.fix:
                fixes.append(Text.assemble(word, f" {finding.check} on {named}, expected: "
                                                 f"{finding.expected}\n    {finding.fix}"))
        print_table(console, ("", "check", "host", "found"), rows, unbroken=("", "check"))
        console.print(*fixes, sep="\n", soft_wrap=True)
        count = Counter(finding.status for finding in self.findings)
        plural = "" if count["warning"] == 1 else "s"
        console.print(f"{count['failed']} failed, {count['warning']} warning{plural}, "
                      f"{count['ok']} ok, {count['not_applicable']} not applicable, in "
                      f"{self.seconds:.1f} s", soft_wrap=True)


def grouped(findings: Sequence[Finding]) -> list[tuple[Finding, list[str]]]:
    """Merge findings that differ only in their host, in the order of the checks."""
    order = list(dict.fromkeys(one.check for one in findings))
    rows: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
    for one in sorted(findings, key=lambda one: order.index(one.check)):
        key = (one.check, one.status, one.found, one.fix)
        rows.setdefault(key, (one, []))[1].append(one.host)
    return list(rows.values())

"""`Finding`: what one check found on one host, and what repairs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed", "not_applicable"]

ALL_HOSTS = "all"
"""In place of a host, for what concerns the hosts together."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor's table."""

    check: str
    """A name that stays the same from release to release, e.g. `horovod-loads`."""
    host: str
    status: Status
    found: str
    expected: str = ""
    fix: str = ""
    """The command that repairs it; never empty for a warning or a failure."""

    def __post_init__(self) -> None:
        """Check that the reader is not left alone.

        Raises:
            ValueError: Something is wrong and nothing says what to do.
        """
        if self.status in ("warning", "failed") and not (self.fix and self.expected):
            raise ValueError(f"{self.check} {self.status} says neither what was expected nor what "
                             "to do")


def ok(check: str, host: str, found: str) -> Finding:
    """All is well."""
    return Finding(check=check, host=host, status="ok", found=found)


def not_applicable(check: str, host: str, why: str) -> Finding:
    """There is nothing to check, and why."""
    return Finding(check=check, host=host, status="not_applicable", found=why)


def warning(check: str, host: str, found: str, *, expected: str, fix: str) -> Finding:
    """Training runs, but worse than it could, or not everywhere."""
    return Finding(check=check, host=host, status="warning", found=found, expected=expected,
                   fix=fix)


def failed(check: str, host: str, found: str, *, expected: str, fix: str) -> Finding:
    """Training does not run like this."""
    return Finding(check=check, host=host, status="failed", found=found, expected=expected,
                   fix=fix)


def any_failed(findings: Sequence[Finding]) -> bool:
    """Whether one of them failed."""
    return any(finding.status == "failed" for finding in findings)

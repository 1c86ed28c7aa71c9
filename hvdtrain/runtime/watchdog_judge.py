"""Rank 0's decisions on the reports: for whom the others wait, and whether the run is over.

Pure functions. Ranks pass the same points in the same order, so the others wait for the rank that
has passed the fewest; if that rank is in a phase that is known to be slow, it does not hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hvdtrain.runtime.progress import IDLE, RankReport

LOST_GRACE_S = 3.0  # the launcher or the rank itself may report first why it is gone
_FIRST_WARNING_S = 60.0
_NAMED_RANKS = 8

Kind = Literal["deadlock", "silent", "lost"]
State = Literal["awaited", "watched", "silent", "lost", "left"]


@dataclass(kw_only=True)
class RankView:
    """What rank 0 knows of a rank, until now. Times are by rank 0's clock.

    `state` since `since_s` is `awaited` before it has connected, `silent` when it does not report,
    `lost` if its connection ended without a goodbye, `left` after its goodbye. At `changed_s` its
    count was last seen to grow.
    """

    rank: int
    host: str
    state: State = "awaited"
    since_s: float = 0.0
    heard_s: float = 0.0
    changed_s: float = 0.0
    report: RankReport = RankReport()

    @property
    def name(self) -> str:
        """Rank and host."""
        return f"rank {self.rank} on {self.host}"

    def set_state(self, state: State, now_s: float) -> None:
        """Note what has become of it."""
        self.state, self.since_s = state, now_s

    def update(self, report: RankReport, now_s: float) -> None:
        """Take its report."""
        if report.count != self.report.count:
            self.changed_s = now_s
        self.report, self.heard_s = report, now_s


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The run is over."""

    kind: Kind
    causes: tuple[int, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class Stall:
    """No rank makes progress; `slow` if for a phase that is known to be slow."""

    since_s: float
    slow: bool
    causes: tuple[int, ...]
    text: str


def judge(now_s: float, views: Sequence[RankView], hang_timeout_s: float) -> Verdict | None:
    """Whether the run is over, and who is the cause; with a limit of 0 never."""
    if hang_timeout_s <= 0:
        return None
    lost = [v for v in views if v.state == "lost" and now_s - v.since_s >= LOST_GRACE_S]
    if lost:
        return Verdict(kind="lost", causes=_ranks(lost), text=(
            f"{_names(lost)} ended without a word (killed, or its connection was cut), so the "
            "others cannot go on. Look at its output and the log of its host."))
    silent = [v for v in views if v.state == "watched" and now_s - v.heard_s >= hang_timeout_s]
    if silent:
        return Verdict(kind="silent", causes=_ranks(silent), text=(
            f"{_names(silent)} did not answer for {hang_timeout_s:g} s: it is stopped, its host or "
            "network is down, or native code holds Python's lock. Look at that host."))
    stall = find_stall(now_s, views, hang_timeout_s)
    if stall is None or stall.slow or now_s - stall.since_s < hang_timeout_s:
        return None
    return Verdict(kind="deadlock", causes=stall.causes, text=(
        f"{stall.text}. The stacks of all ranks are in their output. If that may take "
        f"so long, raise hang_timeout_s, which is {hang_timeout_s:g}."))


def first_warning_s(stall: Stall, hang_timeout_s: float) -> float:
    """After how long a stall is reported for the first time."""
    return hang_timeout_s if stall.slow else min(_FIRST_WARNING_S, hang_timeout_s / 2)


def find_stall(now_s: float, views: Sequence[RankView], hang_timeout_s: float) -> Stall | None:
    """Since when no rank makes progress, and for whom they wait."""
    # None where nobody is training, and while the end of a lost rank may still be explained.
    watched = [v for v in views if v.state == "watched"]
    if not watched or any(v.state == "lost" for v in views):
        return None
    fewest, since_s = min(v.report.count for v in watched), max(v.changed_s for v in watched)
    behind = [v for v in watched if v.report.count == fewest]
    slow = [v for v in behind if v.report.slow]
    if any(v.report.at == IDLE for v in slow):
        return None
    quiet = [v for v in watched if now_s - v.heard_s >= hang_timeout_s / 2]
    if slow:
        causes = slow
    elif quiet and len(quiet) < len(watched):
        causes = [replace(v, state="silent") for v in quiet]
    else:
        causes = _suspects(views, watched, behind)
    return Stall(since_s=since_s, slow=bool(slow), causes=_ranks(causes),
                 text=_describe(now_s - since_s, causes, watched))


def _suspects(views: Sequence[RankView], watched: list[RankView],
              behind: list[RankView]) -> list[RankView]:
    """Best evidence first; where there is none, all ranks."""
    if left := [v for v in views if v.state == "left"]:
        return left
    reading = [v for v in watched if v.report.busy]
    working = [v for v in watched if v.report.place and not v.report.waits]
    return next((some for some in (behind, reading, working) if 0 < len(some) < len(watched)),
                watched)


def _describe(seconds: float, causes: list[RankView], watched: list[RankView]) -> str:
    first, ranks = causes[0], {v.rank for v in causes}
    others = [v.report for v in watched if v.rank not in ranks]
    have, it = ("has", "it") if len(causes) == 1 else ("have", "them")
    if first.state == "left":
        return (f"{_names(causes)} {have} ended, and the others have been waiting at "
                f"{others[0].at} for {seconds:.0f} s")
    who = _names(causes) if others else f"all {len(causes)} ranks that report"
    if first.state == "silent":
        return f"{who} {have} not answered; the others have waited for {seconds:.0f} s"
    as_far = bool(others) and others[0].count == first.report.count
    doing = (first.report.at if first.report.slow else
             first.report.busy if first.report.busy and as_far else f"at {first.report.at}")
    place = f" in {first.report.place}" if first.report.place else ""
    text = f"{who} {have} been {doing} for {seconds:.0f} s{place}"
    return f"{text}; the others wait for {it} at {others[0].at}" if others else text


def _names(views: Sequence[RankView]) -> str:
    more = f" and {len(views) - _NAMED_RANKS} more" if len(views) > _NAMED_RANKS else ""
    return ", ".join(v.name for v in views[:_NAMED_RANKS]) + more


def _ranks(views: Sequence[RankView]) -> tuple[int, ...]:
    return tuple(v.rank for v in views)

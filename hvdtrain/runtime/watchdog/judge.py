"""What rank 0 makes of the reports: who is waited for, and whether that is the end. Pure.

Ranks pass the same points in the same order. So the others wait for the rank that has passed
the fewest; if that rank is in a phase that is known to be slow, it is slow and does not hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from hvdtrain.runtime.progress import IDLE

LOST_GRACE_S = 3.0
"""A rank that is gone: the launcher or the failing rank itself may tell the true cause first."""

_FIRST_WARNING_S = 60.0
_NAMED_RANKS = 8

Kind = Literal["deadlock", "silent", "lost"]
State = Literal["awaited", "watched", "silent", "lost", "left"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank tells of itself."""

    count: int = 0
    at: str = IDLE
    slow: bool = True
    busy: str = ""
    place: str = ""
    """The function in which it is, e.g. `load (data.py:12)`; told after a while only."""
    waits: bool = False
    """Whether that place belongs to TensorFlow or a collective."""


@dataclass(frozen=True, kw_only=True)
class RankView:
    """What rank 0 knows of a rank. Times are by rank 0's clock."""

    rank: int
    host: str
    state: State = "awaited"
    """`awaited` before it has connected, `silent` when it does not report, `lost` if its
    connection ended without a goodbye, `left` after its goodbye."""
    since_s: float = 0.0
    """When it came into this state."""
    heard_s: float = 0.0
    changed_s: float = 0.0
    """When its count was last seen to grow."""
    report: Report = Report()

    @property
    def name(self) -> str:
        """Rank and host."""
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True, kw_only=True)
class Stall:
    """No rank goes on."""

    since_s: float
    slow: bool
    """Whether that is for a phase that is known to be slow."""
    causes: tuple[int, ...]
    text: str
    """`rank 3 on hostb has been at step 41 for 60 s; the others wait for it at step 42`"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The run is over."""

    kind: Kind
    causes: tuple[int, ...]
    text: str

    def to_message(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Verdict:
        """The reverse of `to_message`."""
        return cls(kind=message["kind"], causes=tuple(message["causes"]), text=message["text"])


def judge(now_s: float, views: Sequence[RankView], hang_timeout_s: float) -> Verdict | None:
    """Whether the run is over, and who is the cause.

    Args:
        now_s: Float, the time by the clock of `views`.
        views: All ranks, in order.
        hang_timeout_s: Float, how long nothing may happen. 0: never over.
    """
    if hang_timeout_s <= 0:
        return None
    lost = [v for v in views if v.state == "lost" and now_s - v.since_s >= LOST_GRACE_S]
    if lost:
        return Verdict(kind="lost", causes=_ranks(lost), text=(
            f"{_names(lost)} ended without a word (killed, or its connection was cut), so the "
            "others cannot go on. Look at its output and the log of its host."))
    silent = [v for v in views if v.state == "watched" and now_s - v.heard_s >= hang_timeout_s]
    if silent:
        return silence(silent, hang_timeout_s)
    stall = find_stall(now_s, views, hang_timeout_s)
    if stall is None or stall.slow or now_s - stall.since_s < hang_timeout_s:
        return None
    return Verdict(kind="deadlock", causes=stall.causes, text=(
        f"{stall.text}. The stacks of all ranks are in their output. If that may take "
        f"so long, raise hang_timeout_s, which is {hang_timeout_s:g}."))


def silence(silent: Sequence[RankView], hang_timeout_s: float) -> Verdict:
    """The verdict on ranks that do not answer."""
    return Verdict(kind="silent", causes=_ranks(silent), text=(
        f"{_names(silent)} did not answer for {hang_timeout_s:g} s: it is stopped, its host or "
        "network is down, or native code holds Python's lock. Look at that host."))


def first_warning_s(stall: Stall, hang_timeout_s: float) -> float:
    """After how long a stall is told for the first time."""
    if stall.slow:
        return hang_timeout_s
    return min(_FIRST_WARNING_S, hang_timeout_s / 2)


def find_stall(now_s: float, views: Sequence[RankView], hang_timeout_s: float) -> Stall | None:
    """Since when no rank goes on, and for whom they wait.

    None where nobody is training, and while the end of a lost rank may yet be explained.
    """
    watched = [v for v in views if v.state == "watched"]
    if not watched or any(v.state == "lost" for v in views):
        return None
    fewest = min(v.report.count for v in watched)
    behind = [v for v in watched if v.report.count == fewest]
    since_s = max(v.changed_s for v in watched)
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
    left = [v for v in views if v.state == "left"]
    if left:
        return left
    reading = [v for v in watched if v.report.busy]
    working = [v for v in watched if v.report.place and not v.report.waits]
    for some in (behind, reading, working):
        if some and len(some) < len(watched):
            return some
    return watched


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
    """`rank 3 on hostb`; of many ranks the first few."""
    names = [v.name for v in views[:_NAMED_RANKS]]
    more = len(views) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _ranks(views: Sequence[RankView]) -> tuple[int, ...]:
    return tuple(v.rank for v in views)

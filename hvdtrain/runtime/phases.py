"""The phases of a training's time, of all ranks: sums, a table, the slowest rank. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

PHASES = ("building", "input", "computing", "waiting", "moving", "updating", "evaluating", "saving",
          "other")
"""`building`: the first step, which is traced; `waiting`: for other ranks; `moving`: gradients."""
SLOW = 0.1
"""A rank is named where the others wait for it for so much of the time."""
Times = Mapping[str, Sequence[float]]


def of_all_ranks(laps: Sequence[Mapping[str, float]], tells_waiting: bool) -> dict[str, Any]:  # noqa: FBT001
    """For each phase the seconds of every rank. Pure.

    `tells_waiting` is False where a collective does not tell waiting from moving (Horovod, MPI):
    the rank that was last never waits, so that its time is that of moving.
    """
    found = {name: [round(lap[name], 4) for lap in laps] for name in PHASES}
    if not tells_waiting:
        moving = min(found["moving"])
        found["waiting"] = [round(both - moving, 4) for both in found["moving"]]
        found["moving"] = [moving] * len(laps)
    return found


def added(times: Sequence[Times]) -> dict[str, list[float]]:
    """The sum over epochs of what `of_all_ranks` gave."""
    return {name: [sum(each) for each in zip(*(epoch[name] for epoch in times), strict=True)]
            for name in PHASES}


def total_of(times: Times) -> float:
    """The seconds of all phases of the rank that has most. Pure."""
    return max(map(sum, zip(*times.values(), strict=True)))


def spread(seconds: Sequence[float]) -> tuple[float, int, int]:
    """The median of what the ranks have spent, the rank with the least and that with most. Pure."""
    low, high = (pick(range(len(seconds)), key=seconds.__getitem__) for pick in (min, max))
    return statistics.median(seconds), low, high


def slowest(times: Times, hosts: Sequence[str] = ()) -> str:
    """The rank for which the others wait, and why it is slow; "" if there is none. Pure.

    `hosts` are those of all ranks, where they are known.
    """
    total, waiting = total_of(times), times["waiting"]
    if len(waiting) < 2 or not total:
        return ""
    rank = min(range(len(waiting)), key=waiting.__getitem__)
    others = [seconds for r, seconds in enumerate(waiting) if r != rank]
    if statistics.median(others) - waiting[rank] < SLOW * total:
        return ""
    more = {name: times[name][rank] - statistics.median(
        seconds for r, seconds in enumerate(times[name]) if r != rank)
        for name in PHASES if name != "waiting"}
    phase = max(more, key=more.__getitem__)
    where = f" on {hosts[rank]}" if hosts else ""
    return (f"rank {rank}{where} spends {times[phase][rank] / total:.0%} of the time on {phase}; "
            f"the others spend {statistics.median(others) / total:.0%} waiting for it")


def table(times: Times, hosts: Sequence[str] = ()) -> str:
    """A run's phases as text: the median of the ranks, the least and the most. Pure."""
    total = total_of(times) or 1.0
    lines = [f"hvdtrain time     {total:.1f} s"]
    for name in PHASES:
        seconds = times[name]
        median, low, high = spread(seconds)
        if seconds[high] < 0.005 * total:
            continue
        line = f"  {name:<14} {median / total:4.0%}"
        if len(seconds) > 1:
            line += (f"   from {seconds[low] / total:.0%} (rank {low}) to "
                     f"{seconds[high] / total:.0%} (rank {high})")
        lines.append(line)
    return "\n".join([*lines, *filter(None, [slowest(times, hosts)])])

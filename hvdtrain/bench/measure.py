"""From the files of one run to its figures.

The measured time lies between the end of the first epoch, in which TensorFlow traces, and the end
of the last. An epoch holds its validation. Counters are read at these two moments, between two
lines of the usage files in proportion to the time.
"""

from __future__ import annotations

import bisect
import json
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.bench.options import Target

COUNTERS = ("cpu_s", "bytes_sent", "bytes_received")
_NEEDED = ("epoch", "samples", "seconds", "time_s")
_NOT_FIGURES = (*_NEEDED, "samples_per_s", "learning_rate")
_ROLE_NAMES = {"ps": "server"}
"""What TensorFlow calls a parameter server, and its files after it."""
_LEAST_LINES = 2


class NotMeasuredError(Exception):
    """A run left no figures; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How the samples of an epoch become steps. A step is one batch of every worker."""

    workers: int
    batch_per_rank: int
    synchronous: bool = True
    """Whether the workers take their batches together, as one update."""

    def steps(self, samples: int) -> float:
        """Steps of an epoch; a smaller last batch counts as one, since it moves as many bytes."""
        if self.synchronous:
            return math.ceil(samples / (self.workers * self.batch_per_rank))
        return math.ceil(samples / self.batch_per_rank) / self.workers


@dataclass(frozen=True, kw_only=True)
class RoleUsage:
    """What the processes of one role used, per step."""

    processes: int
    cpu_ms: float
    """Of all of them together."""
    bytes_sent: float
    """Of each, on average."""
    bytes_received: float
    """Of each, on average."""
    peak_mb: float
    """Of the one with most memory, over its whole life."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One run in figures. A step is one batch of every worker."""

    measured_s: float
    steps: float
    """In the measured time."""
    samples_per_s: float
    train_s: float
    """From the beginning of the first epoch to the end of the last."""
    target_s: float | None
    """From the beginning of the first epoch to the end of the first that reaches the target."""
    target_epoch: int | None
    final: Mapping[str, float]
    """Loss and metrics of the last epoch."""
    usage: Mapping[str, RoleUsage]
    """By role: `rank`, `chief`, `worker`, `server`."""

    @property
    def steps_per_s(self) -> float:
        """Steps per second."""
        return self.steps / self.measured_s


def measure(folder: Path, batches: Batches,
            target: Target | None = None) -> tuple[Figures, list[dict[str, Any]]]:
    """Read what a run left.

    Args:
        folder: Path of the run's own folder, with `train/metrics.jsonl` and `usage/`.
        batches: How samples become steps.
        target: What is to be reached.

    Returns:
        The figures, and the lines of `metrics.jsonl`.

    Raises:
        NotMeasuredError: There are no figures.
    """
    lines = _read_lines(folder / "train" / "metrics.jsonl")
    if len(lines) < _LEAST_LINES:
        raise NotMeasuredError(f"metrics.jsonl has {len(lines)} epochs; at least {_LEAST_LINES} "
                               "are needed")
    missing = [name for name in _NEEDED if any(name not in line for line in lines)]
    if missing:
        raise NotMeasuredError(f"metrics.jsonl has no {', '.join(missing)}")
    series = {path.stem: read_series(_read_lines(path))
              for path in sorted((folder / "usage").glob("*.jsonl"))}
    return figures_of(lines, series, batches, target), lines


def figures_of(lines: Sequence[Mapping[str, Any]], series: Mapping[str, Series],
               batches: Batches, target: Target | None = None) -> Figures:
    """Pure: the figures of a run.

    Args:
        lines: Of `metrics.jsonl`, two or more.
        series: Of each process, by its name.
        batches: As for `measure`.
        target: As for `measure`.
    """
    begin_s, end_s = lines[0]["time_s"], lines[-1]["time_s"]
    samples = [line["samples"] for line in lines[1:]]
    steps = sum(map(batches.steps, samples))
    start_s = begin_s - lines[0]["seconds"]
    hit = next((line for line in lines if target is not None and target.reached(dict(line))), None)
    roles: dict[str, list[Series]] = {}
    for name, one in series.items():
        role = name.rstrip(string.digits)
        roles.setdefault(_ROLE_NAMES.get(role, role), []).append(one)
    return Figures(
        measured_s=end_s - begin_s, steps=steps, samples_per_s=sum(samples) / (end_s - begin_s),
        train_s=end_s - start_s,
        target_s=hit["time_s"] - start_s if hit else None,
        target_epoch=int(hit["epoch"]) if hit else None,
        final={name: value for name, value in lines[-1].items() if name not in _NOT_FIGURES},
        usage={role: _role_usage(found, begin_s, end_s, steps)
               for role, found in sorted(roles.items()) if all(one.times for one in found)})


@dataclass(frozen=True, kw_only=True)
class Series:
    """The counters of one process over time, which only grow."""

    times: tuple[float, ...]
    counters: Mapping[str, tuple[float, ...]]
    peak_mb: float

    def at(self, counter: str, time_s: float) -> float:
        """A counter at a moment: in proportion between two readings, else the nearest one."""
        values = self.counters[counter]
        after = bisect.bisect_left(self.times, time_s)
        if after == 0:
            return values[0]
        if after == len(values):
            return values[-1]
        span = self.times[after] - self.times[after - 1]
        share = (time_s - self.times[after - 1]) / span if span > 0 else 1.0
        return values[after - 1] + share * (values[after] - values[after - 1])


def read_series(lines: Sequence[Mapping[str, Any]]) -> Series:
    """Put the lines of one usage file together.

    A process that was started again begins at 0; its counters go on from those of the former one.
    """
    counters: dict[str, list[float]] = {name: [] for name in COUNTERS}
    base = dict.fromkeys(COUNTERS, 0.0)
    last: Mapping[str, Any] = dict.fromkeys(COUNTERS, 0.0)
    for line in lines:
        if line["cpu_s"] < last["cpu_s"]:
            base = {name: base[name] + last[name] for name in COUNTERS}
        for name in COUNTERS:
            counters[name].append(base[name] + line[name])
        last = line
    return Series(times=tuple(line["time_s"] for line in lines),
                  counters={name: tuple(values) for name, values in counters.items()},
                  peak_mb=max((line["rss_mb"] for line in lines), default=0.0))


def _role_usage(found: Sequence[Series], begin_s: float, end_s: float, steps: float) -> RoleUsage:
    def used(counter: str) -> float:
        return sum(one.at(counter, end_s) - one.at(counter, begin_s) for one in found) / steps

    return RoleUsage(processes=len(found), cpu_ms=1000 * used("cpu_s"),
                     bytes_sent=used("bytes_sent") / len(found),
                     bytes_received=used("bytes_received") / len(found),
                     peak_mb=max(one.peak_mb for one in found))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON objects; one that was cut off at the end is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found

"""Figures from the files of the runs, and the bytes that must travel, computed.

The measured time lies between the end of the first epoch, in which TensorFlow traces, and the end
of the last; an epoch includes its validation. Counters at these two moments are interpolated
between two lines of the usage files.

A *step* is one batch of each of N workers. M is the size of all trainable parameters as float32. A
link carries its bandwidth b in both directions at the same time.

Ring allreduce (Patarasuk and Yuan, 2009): each rank sends and receives 2 (N - 1) / N * M. Parameter
servers: each worker receives M (parameters) and sends M (gradients), so that 2 N M pass through all
servers together, half in each direction. A synchronous step pulls first and then pushes, so that
its links are half idle.
"""

from __future__ import annotations

import json
import math
import statistics
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.bench.options import ENGINES, FigureTarget, bits_per_s
from hvdtrain.bench.plan import Point

_COUNTERS = ("cpu_s", "bytes_sent", "bytes_received")
_NEEDED = ("epoch", "samples", "seconds", "time_s")
_NOT_FIGURES = (*_NEEDED, "samples_per_s", "learning_rate", "time")
_LEAST_LINES = 2
_ROLE_ORDER = ("rank", "chief", "worker", "server")


class NotMeasuredError(Exception):
    """A run left no figures; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How samples become steps; `synchronous` workers make one update of their batches."""

    workers: int
    batch_per_rank: int
    synchronous: bool = True

    def steps(self, samples: int) -> float:
        """Per epoch; a smaller last batch counts as one, since it moves as many bytes."""
        if self.synchronous:
            return math.ceil(samples / (self.workers * self.batch_per_rank))
        return math.ceil(samples / self.batch_per_rank) / self.workers


@dataclass(frozen=True, kw_only=True)
class RoleUsage:
    """What the processes of one role used per step: CPU in all, bytes of each on average.

    The memory is the largest that one of them had in its life.
    """

    processes: int
    cpu_ms: float
    bytes_sent: float
    bytes_received: float
    peak_mb: float


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One run in figures; times are from the beginning of the first epoch.

    `train_s` is to the end of the last epoch, `target_s` to that of the first that reaches the
    target. `final` are loss and metrics of the last epoch; `usage` is by role: `rank`, `chief`,
    `worker`, `server`.
    """

    measured_s: float
    steps: float
    samples_per_s: float
    train_s: float
    target_s: float | None
    target_epoch: int | None
    final: Mapping[str, float]
    usage: Mapping[str, RoleUsage]

    @property
    def steps_per_s(self) -> float:
        """Steps per second."""
        return self.steps / self.measured_s


def measure(folder: Path, batches: Batches,
            target: FigureTarget | None = None) -> tuple[RunFigures, list[dict[str, Any]]]:
    """The figures of a run, and the lines of its `metrics.jsonl`, or NotMeasuredError."""
    lines = read_lines(folder / "train" / "metrics.jsonl")
    if len(lines) < _LEAST_LINES:
        raise NotMeasuredError(f"metrics.jsonl has {len(lines)} epochs; at least {_LEAST_LINES} "
                               "are needed")
    missing = [name for name in _NEEDED if any(name not in line for line in lines)]
    if missing:
        raise NotMeasuredError(f"metrics.jsonl has no {', '.join(missing)}")
    series = {path.stem: read_series(read_lines(path))
              for path in sorted((folder / "usage").glob("*.jsonl"))}
    return figures_of(lines, series, batches, target), lines


def figures_of(lines: Sequence[Mapping[str, Any]], series: Mapping[str, Series],
               batches: Batches, target: FigureTarget | None = None) -> RunFigures:
    """The figures from the lines of `metrics.jsonl` and the counters of the processes."""
    begin_s, end_s = lines[0]["time_s"], lines[-1]["time_s"]
    start_s = begin_s - lines[0]["seconds"]
    samples = [line["samples"] for line in lines[1:]]
    steps = sum(map(batches.steps, samples))
    hit = next((line for line in lines if target is not None and target.reached(line)), None)
    roles: dict[str, list[Series]] = {}
    for name, one in series.items():
        role = name.rstrip(string.digits)
        roles.setdefault("server" if role == "ps" else role, []).append(one)  # `ps` of TensorFlow
    return RunFigures(
        measured_s=end_s - begin_s, steps=steps, samples_per_s=sum(samples) / (end_s - begin_s),
        train_s=end_s - start_s, target_s=hit["time_s"] - start_s if hit else None,
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
        """A counter at a moment, interpolated; beyond the readings the nearest one."""
        import numpy as np
        return float(np.interp(time_s, self.times, self.counters[counter]))


def read_series(lines: Sequence[Mapping[str, Any]]) -> Series:
    """Join the lines of one usage file; counters continue when a process restarts at 0."""
    counters: dict[str, list[float]] = {name: [] for name in _COUNTERS}
    base = dict.fromkeys(_COUNTERS, 0.0)
    last: Mapping[str, Any] = base
    for line in lines:
        if line["cpu_s"] < last["cpu_s"]:
            base = {name: base[name] + last[name] for name in _COUNTERS}
        for name in _COUNTERS:
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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, without a last line that was cut off."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Several measurements of one thing: median and range; None where nothing was measured."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "least": min(known), "most": max(known),
            "count": len(known)}


def summarize(figures: Sequence[RunFigures], walls_s: Sequence[float], *,
              single: float | None, workers: int) -> dict[str, Any]:
    """The rounds of one engine at one point that ended well, as JSON values.

    `walls_s` are of whole commands; `single` is the samples per second of one process.
    """
    if not figures:
        return {}
    told = {name: spread(getattr(one, name) for one in figures) for name in (
        "samples_per_s", "steps_per_s", "measured_s", "train_s", "target_s")}
    rate = told["samples_per_s"]
    told |= {"step_ms": spread(1000 / one.steps_per_s for one in figures),
             "wall_s": spread(walls_s)}
    roles = {role for one in figures for role in one.usage}
    known = [role for role in _ROLE_ORDER if role in roles]
    return {
        **told,
        "target_reached": sum(one.target_s is not None for one in figures),
        "efficiency": rate["median"] / (workers * single) if rate and single else None,
        "final": {name: value for name in figures[0].final
                  if (value := spread(one.final.get(name) for one in figures))},
        "roles": {role: _role(role, figures) for role in (*known, *sorted(roles - set(known)))},
    }


def _role(role: str, figures: Sequence[RunFigures]) -> dict[str, Any]:
    found = [one.usage[role] for one in figures if role in one.usage]
    return {"processes": max(one.processes for one in found)} | {
        name: value for name in ("cpu_ms", "bytes_sent", "bytes_received", "peak_mb")
        if (value := spread(getattr(one, name) for one in found))}


def computed(engine: str, point: Point, parameter_bytes: float) -> dict[str, Any]:
    """What must travel per step, and the least time for it, as JSON values.

    `roles` are the bytes that each process of a role sends, and as many receives; `seconds` and
    `busiest_host_bytes` need the speed of the network; `expected_seconds` is rarely known.
    """
    kind, size, workers = ENGINES[engine].kind, parameter_bytes, point.workers
    found: dict[str, Any] = {"roles": {}, "busiest_host_bytes": None, "seconds": None,
                             "expected_seconds": None}
    expected: float | None
    if kind == "single":
        return found
    if kind == "ring":
        busiest = traffic = expected = 2 * (workers - 1) / workers * size
        found["roles"] = {"rank": busiest, "worker": busiest}
    else:
        links = link_bytes(workers, point.server_hosts, size)
        busiest = traffic = expected = max(map(sum, links))
        if engine == "ps-sync":
            # All workers pull, and then all push: a link is used in one direction at a time.
            traffic = expected = 2 * max(map(max, links))
        elif point.servers == 1 and point.server_hosts[0] >= workers:
            # Workers do not wait for each other. Each pulls M over one direction of the server's
            # link, then pushes M over the other, and the N workers share both: a closed queueing
            # network with two stations of the same demand s = M / b and N customers, whose
            # throughput is N / ((N + 1) s) (Zahorjan et al., 1982, "Balanced job bound analysis
            # of queueing networks"). N batches take (N + 1) M / b, between the bound N M / b and
            # the 2 N M / b of synchronous workers.
            expected = (workers + 1) * size
        else:
            expected = None
        found["roles"] = {"worker": size, "server": workers * size / point.servers}
    if point.rate is None:
        return found
    bytes_per_s = bits_per_s(point.rate) / 8
    return found | {"busiest_host_bytes": busiest, "seconds": traffic / bytes_per_s,
                    "expected_seconds": None if expected is None else expected / bytes_per_s}


def link_bytes(workers: int, server_hosts: Sequence[int],
               parameter_bytes: float) -> list[tuple[float, float]]:
    """Bytes per step that each host's worker pulls over its link, and that its servers send.

    It sends their sum, and receives as many. Worker i is on host i, servers on `server_hosts`;
    traffic within a host does not count.
    """
    share = parameter_bytes / len(server_hosts)
    found = []
    for host in range(max(workers, max(server_hosts) + 1)):
        here, has_worker = server_hosts.count(host), host < workers
        found.append(((len(server_hosts) - here) * share * has_worker,
                      here * share * (workers - has_worker)))
    return found

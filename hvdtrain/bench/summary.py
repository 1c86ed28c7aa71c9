"""Rounds of one engine put together, and set beside what arithmetic says."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.bench import arithmetic
from hvdtrain.bench.engines import ENGINES
from hvdtrain.bench.measure import Figures
from hvdtrain.bench.options import bits_per_s
from hvdtrain.bench.plan import Point

_BITS_PER_BYTE = 8
_RING_ROLES = ("rank", "worker")
_ROLE_ORDER = ("rank", "chief", "worker", "server")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    least: float
    most: float
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median and range; None where nothing was measured."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(median=statistics.median(known), least=min(known), most=max(known),
                  count=len(known))


def summarize(figures: Sequence[Figures], walls_s: Sequence[float], *,
              single: Spread | None, workers: int) -> dict[str, Any]:
    """The rounds of one engine at one point, as JSON values.

    Args:
        figures: One per round that ended well.
        walls_s: From start to end of their commands.
        single: The samples per second of one process, where they were measured.
        workers: Integer, of this engine.
    """
    if not figures:
        return {}
    rate = spread(one.samples_per_s for one in figures)
    told = {
        "samples_per_s": rate,
        "steps_per_s": spread(one.steps_per_s for one in figures),
        "step_ms": spread(1000 / one.steps_per_s for one in figures),
        "measured_s": spread(one.measured_s for one in figures),
        "train_s": spread(one.train_s for one in figures),
        "target_s": spread(one.target_s for one in figures),
        "wall_s": spread(walls_s),
    }
    roles = sorted({role for one in figures for role in one.usage}, key=_place)
    return {
        **{name: asdict(value) if value else None for name, value in told.items()},
        "target_reached": sum(one.target_s is not None for one in figures),
        "efficiency": (rate.median / (workers * single.median)
                       if rate and single and single.median else None),
        "final": {name: asdict(value) for name in figures[0].final
                  if (value := spread(one.final.get(name) for one in figures))},
        "roles": {role: _role(role, figures) for role in roles},
    }


def _place(role: str) -> tuple[int, str]:
    return (_ROLE_ORDER.index(role) if role in _ROLE_ORDER else len(_ROLE_ORDER)), role


def _role(role: str, figures: Sequence[Figures]) -> dict[str, Any]:
    found = [one.usage[role] for one in figures if role in one.usage]
    return {"processes": max(one.processes for one in found)} | {
        name: asdict(value) for name in ("cpu_ms", "bytes_sent", "bytes_received", "peak_mb")
        if (value := spread(getattr(one, name) for one in found))}


def computed(engine: str, point: Point, parameter_bytes: float) -> dict[str, Any]:
    """What must travel per step, and the least time for it, as JSON values.

    Returns:
        `roles`: the bytes that each process of a role sends, and as many receives; `seconds` and
        `busiest_host_bytes` where the speed of the network is known, else None;
        `expected_seconds`: the time to be expected, where that is known too.
    """
    kind = ENGINES[engine].kind
    nothing = {"busiest_host_bytes": None, "seconds": None, "expected_seconds": None}
    if kind == "single":
        return {"roles": {}, **nothing}
    if kind == "ring":
        each = arithmetic.ring_bytes(point.workers, parameter_bytes)
        roles, busiest = dict.fromkeys(_RING_ROLES, each), each
    else:
        roles = {"worker": arithmetic.worker_bytes(parameter_bytes),
                 "server": arithmetic.server_bytes(point.workers, point.servers, parameter_bytes)}
        busiest = max(arithmetic.host_bytes(point.workers, point.server_hosts, parameter_bytes))
    if point.rate is None:
        return {"roles": roles, **nothing}
    bytes_per_s = bits_per_s(point.rate) / _BITS_PER_BYTE
    seconds = (arithmetic.ring_seconds(point.workers, parameter_bytes, bytes_per_s)
               if kind == "ring" else arithmetic.server_seconds(
                   point.workers, point.server_hosts, parameter_bytes, bytes_per_s,
                   in_phases=engine == "ps-sync"))
    expected: float | None = seconds
    if engine == "ps-async":  # known for one server apart only
        alone = point.servers == 1 and point.server_hosts[0] >= point.workers
        expected = (arithmetic.shared_server_seconds(point.workers, parameter_bytes, bytes_per_s)
                    if alone else None)
    return {"roles": roles, "busiest_host_bytes": busiest, "seconds": seconds,
            "expected_seconds": expected}


def ratio(measured: Mapping[str, Any] | None, expected: float | None) -> float | None:
    """A measured median over what was computed."""
    if not measured or not expected:
        return None
    return float(measured["median"]) / expected

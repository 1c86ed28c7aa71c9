"""The tables of a report as values: titles and rows of text. The terminal and the page show them.

Each takes one point of the report's `points`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.bench.engines import ENGINES
from hvdtrain.bench.summary import ratio
from hvdtrain.bench.words import (
    NONE,
    bytes_text,
    median_bytes,
    number,
    percent,
    ratio_text,
    spread_text,
)

_UNSEEN = ("by shared memory", NONE)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(point: Mapping[str, Any], target: str | None) -> list[Table]:
    """All tables of a point that have rows."""
    found = [speed(point, target), roles(point), traffic(point), network(point), final(point)]
    return [table for table in found if table.rows]


def speed(point: Mapping[str, Any], target: str | None) -> Table:
    """How fast, and how long to the target, where there is one."""
    columns = ["engine", "runs", "samples/s", "steps/s", "efficiency",
               *([f"s to {target}"] if target else []), "measured s", "wall s in all"]
    rows = []
    for engine, told in point["engines"].items():
        summary, runs = told["summary"], told["runs"]
        bad = [run["status"] for run in runs if run["figures"] is None]
        good = len(runs) - len(bad)
        word = "interrupted" if set(bad) == {"interrupted"} else "failed"
        state = f"{word} {len(bad)} of {len(runs)}" if bad else "ok"
        if not summary:
            rows.append((engine, state, *[NONE] * (len(columns) - 2)))
            continue
        rows.append((engine, state, spread_text(summary["samples_per_s"]),
                     spread_text(summary["steps_per_s"]), percent(summary["efficiency"]),
                     *([_to_target(summary, good)] if target else []),
                     spread_text(summary["measured_s"]), spread_text(summary["wall_s"])))
    return Table(title="Speed: median (least-most)", columns=tuple(columns), rows=tuple(rows))


def _to_target(summary: Mapping[str, Any], runs: int) -> str:
    text = spread_text(summary["target_s"])
    if summary["target_reached"] < runs:
        text += f" [reached in {summary['target_reached']} of {runs}]"
    return text


def roles(point: Mapping[str, Any]) -> Table:
    """What the processes used."""
    rows = []
    for engine, role, used, processes in _roles(point):
        rows.append((engine, f"{role} x {processes}", spread_text(used["cpu_ms"]),
                     median_bytes(used["bytes_sent"]), median_bytes(used["bytes_received"]),
                     spread_text(used["peak_mb"])))
    return Table(title="Per step and role (bytes: each process; CPU: all of the role together)",
                 columns=("engine", "role", "CPU ms", "sent", "received", "peak memory MB"),
                 rows=tuple(rows))


def traffic(point: Mapping[str, Any]) -> Table:
    """Bytes beside what arithmetic says."""
    rows = []
    for engine, role, used, _ in _roles(point):
        expected = point["engines"][engine]["computed"]["roles"].get(role)
        if not expected:
            continue
        if ENGINES[engine].shared_memory and point["rate"] is None:
            rows.append((engine, role, bytes_text(expected), *_UNSEEN, *_UNSEEN))
            continue
        rows.append((engine, role, bytes_text(expected), median_bytes(used["bytes_sent"]),
                     ratio_text(ratio(used["bytes_sent"], expected)),
                     median_bytes(used["bytes_received"]),
                     ratio_text(ratio(used["bytes_received"], expected))))
    return Table(title="Bytes per step of each process: measured beside computed",
                 columns=("engine", "role", "computed, each way", "sent", "ratio", "received",
                          "ratio"), rows=tuple(rows))


def network(point: Mapping[str, Any]) -> Table:
    """Time of a step beside the least that the network allows."""
    rows = []
    for engine, told in point["engines"].items():
        least, summary = told["computed"]["seconds"], told["summary"]
        if least is None or not summary:
            continue
        expected = told["computed"]["expected_seconds"]
        expected_ms = None if expected is None else 1000 * expected
        rows.append((engine, bytes_text(told["computed"]["busiest_host_bytes"]),
                     number(1000 * least), number(expected_ms), spread_text(summary["step_ms"]),
                     ratio_text(ratio(summary["step_ms"], 1000 * least)),
                     ratio_text(ratio(summary["step_ms"], expected_ms))))
    return Table(title=f"Step time beside the bound of the network ({point['rate']})",
                 columns=("engine", "bytes of the busiest host, each way", "bound ms",
                          "expected ms", "measured ms", "over the bound", "over the expected"),
                 rows=tuple(rows))


def final(point: Mapping[str, Any]) -> Table:
    """Loss and metrics after the last epoch."""
    names = list(dict.fromkeys(name for told in point["engines"].values()
                               for name in told["summary"].get("final", {})))
    rows = tuple((engine, *(_figure(told["summary"]["final"].get(name)) for name in names))
                 for engine, told in point["engines"].items() if told["summary"])
    return Table(title="After the last epoch: median (least-most)", columns=("engine", *names),
                 rows=rows if names else ())


def _figure(value: Mapping[str, Any] | None) -> str:
    if not value:
        return NONE
    if value["least"] == value["most"]:
        return f"{value['median']:.4g}"
    return f"{value['median']:.4g} ({value['least']:.4g}-{value['most']:.4g})"


def _roles(point: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any], int]]:
    for engine, told in point["engines"].items():
        for role, used in told["summary"].get("roles", {}).items():
            yield engine, role, used, used["processes"]

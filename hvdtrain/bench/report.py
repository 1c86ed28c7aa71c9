"""Shows a report: tables on the terminal, and one self-contained page of HTML.

A *point* is one of the report's `points`.
"""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from rich.console import Console
from rich.text import Text

from hvdtrain.bench.options import ENGINES
from hvdtrain.log import print_table, wide_console

NONE = "-"
_UNITS = ("B", "kB", "MB", "GB", "TB")
_SHORT_S = 5.0  # below it, ends uncertain by 0.2 s count for several percent


def show(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the tables of each point, and what failed."""
    console = wide_console(console)
    for point in report["points"]:
        if not point["engines"]:
            continue
        console.print(Text(point["heading"], "bold"))
        for table in tables(point, report["target"]):
            console.print(Text(table.title))  # a table's own title breaks at its width
            print_table(console, table.columns, table.rows)
    for line in [*remarks(report), *failures(report)]:
        console.print(Text(line), soft_wrap=True)


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_page(report: Mapping[str, Any], folder: Path) -> Path:
    """Write `report.html`, with plots if matplotlib is installed; returns its path."""
    plots: list[tuple[str, str, bytes]] = []
    if can_plot():
        from hvdtrain.bench.plots import draw
        plots = draw(report)
    path = folder / "report.html"
    path.write_text(render(report, plots), encoding="utf-8")
    return path


def render(report: Mapping[str, Any], plots: Iterable[tuple[str, str, bytes]] = ()) -> str:
    """The page of a report of `compare`; `plots` are as from `plots.draw`."""
    return fill_page(
        "report.html.j2", report=report, plots=list(plots), tables=tables, bytes_text=bytes_text,
        remarks=remarks(report), failures=failures(report),
        engines={name: engine for name, engine in ENGINES.items()
                 if any(name in point["engines"] for point in report["points"])})


def fill_page(template: str, **values: Any) -> str:
    """A page from a template of this folder; text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode("ascii")
    return environment.get_template(template).render(values)


class ReportTable(NamedTuple):
    """Text in rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(point: Mapping[str, Any], target: str | None) -> list[ReportTable]:
    """All tables of a point that have rows."""
    names = list(dict.fromkeys(name for told in point["engines"].values()
                               for name in told["summary"].get("final", {})))
    found = [
        ("Speed: median (least-most)",
         ("engine", "runs", "samples/s", "steps/s", "efficiency",
          *((f"s to {target}",) if target else ()), "measured s", "wall s in all"),
         _speed(point, has_target=bool(target))),
        ("Per step and role (bytes: each process; CPU: all of the role together)",
         ("engine", "role", "CPU ms", "sent", "received", "peak memory MB"),
         ((engine, f"{role} x {used['processes']}", spread_text(used["cpu_ms"]),
           _median_bytes(used["bytes_sent"]), _median_bytes(used["bytes_received"]),
           spread_text(used["peak_mb"])) for engine, role, used in _roles(point))),
        ("Bytes per step of each process: measured beside computed",
         ("engine", "role", "computed, each way", "sent", "ratio", "received", "ratio"),
         _traffic(point)),
        (f"Step time beside the bound of the network ({point['rate']})",
         ("engine", "bytes of the busiest host, each way", "bound ms", "expected ms",
          "predicted ms", "measured ms", "over the bound", "over the expected",
          "over the predicted"), _network(point)),
        ("After the last epoch: median (least-most)", ("engine", *names),
         ((engine, *(spread_text(told["summary"]["final"].get(name), "{:.4g}".format)
                     for name in names))
          for engine, told in point["engines"].items() if told["summary"] and names)),
    ]
    return [ReportTable(title, columns, rows) for title, columns, lines in found
            if (rows := tuple(lines))]


def _speed(point: Mapping[str, Any], *, has_target: bool) -> Iterator[tuple[str, ...]]:
    for engine, told in point["engines"].items():
        summary, runs = told["summary"], told["runs"]
        bad = [run["status"] for run in runs if run["figures"] is None]
        word = "interrupted" if set(bad) == {"interrupted"} else "failed"
        state = f"{word} {len(bad)} of {len(runs)}" if bad else "ok"
        if not summary:
            yield (engine, state, *[NONE] * (5 + has_target))
            continue
        efficiency = summary["efficiency"]
        to_target, good = spread_text(summary["target_s"]), len(runs) - len(bad)
        if summary["target_reached"] < good:
            to_target += f" [reached in {summary['target_reached']} of {good}]"
        yield (engine, state, spread_text(summary["samples_per_s"]),
               spread_text(summary["steps_per_s"]),
               NONE if efficiency is None else f"{100 * efficiency:.0f} %",
               *((to_target,) if has_target else ()),
               spread_text(summary["measured_s"]), spread_text(summary["wall_s"]))


def _traffic(point: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for engine, role, used in _roles(point):
        expected = point["engines"][engine]["computed"]["roles"].get(role)
        if not expected:
            continue
        if ENGINES[engine].shared_memory and point["rate"] is None:
            yield (engine, role, bytes_text(expected), *("by shared memory", NONE) * 2)
            continue
        yield (engine, role, bytes_text(expected),
               _median_bytes(used["bytes_sent"]), _ratio(used["bytes_sent"], expected),
               _median_bytes(used["bytes_received"]), _ratio(used["bytes_received"], expected))


def _network(point: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for engine, told in point["engines"].items():
        computed, summary = told["computed"], told["summary"]
        if computed["seconds"] is None or not summary:
            continue
        limits_ms = [None if computed[name] is None else 1000 * computed[name]
                     for name in ("seconds", "expected_seconds", "predicted_seconds")]
        yield (engine, bytes_text(computed["busiest_host_bytes"]), *map(number, limits_ms),
               spread_text(summary["step_ms"]),
               *(_ratio(summary["step_ms"], limit) for limit in limits_ms))


def _roles(point: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for engine, told in point["engines"].items():
        for role, used in told["summary"].get("roles", {}).items():
            yield engine, role, used


def remarks(report: Mapping[str, Any]) -> list[str]:
    """What the figures cannot be trusted for."""
    short = sorted({engine for point in report["points"]
                    for engine, told in point["engines"].items()
                    if told["summary"] and told["summary"]["measured_s"]["median"] < _SHORT_S})
    if not short:
        return []
    return [f"Measured for less than {_SHORT_S:g} s: {', '.join(short)}. Counters are read five "
            "times a second, so that bytes and CPU per step are uncertain. Give more --epochs."]


def failures(report: Mapping[str, Any]) -> list[str]:
    """The runs without figures, and how they ended."""
    lines = []
    for point in report["points"]:
        for engine, told in point["engines"].items():
            for run in told["runs"]:
                if run["figures"] is not None:
                    continue
                why = f": {run['problem']}" if run["problem"] else ""
                lines.append(f"{engine} ({point['label']}, round {run['round']}): {run['status']}, "
                             f"exit code {run['exit_code']}{why}. Its last lines:")
                lines += [f"    {line}" for line in run["last_lines"]]
    if report["interrupted"]:
        lines.append(f"Interrupted after {report['runs']} of {report['planned_runs']} runs.")
    return lines


def number(value: float | None) -> str:
    """About three digits."""
    if value is None:
        return NONE
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def spread_text(value: Mapping[str, Any] | None, text: Callable[[float], str] = number) -> str:
    """Median and range, as in `812 (790-833)`; one number where they are equal."""
    if not value:
        return NONE
    median, least, most = (text(value[name]) for name in ("median", "least", "most"))
    return median if value["least"] == value["most"] else f"{median} ({least}-{most})"


def bytes_text(value: float | None) -> str:
    """Bytes with a decimal unit."""
    if value is None:
        return NONE
    power = 0
    while abs(value) >= 1000 and power < len(_UNITS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_UNITS[power]}" if power else f"{value:.0f} B"


def _median_bytes(value: Mapping[str, Any] | None) -> str:
    return bytes_text(value["median"]) if value else NONE


def _ratio(measured: Mapping[str, Any] | None, expected: float | None) -> str:
    return f"{measured['median'] / expected:.2f}" if measured and expected else NONE

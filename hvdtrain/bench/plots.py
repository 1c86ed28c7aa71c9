"""The plots of a report, as SVG files. Needs matplotlib, which only this module loads."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hvdtrain.bench.options import ENGINES

Plot = tuple[str, str, bytes]  # label of the point ("": several), title, SVG
Told = Mapping[str, Any]  # a part of the report

_COLORS = dict(zip(ENGINES, ("#555555", "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73"),
                   strict=True))
_ENGINE_STYLES = {"allreduce-mpi": "--", "ps-sync": "--"}
"""Their results may equal those of the engine before, and hide its line."""
_ROLE_STYLES = {"rank": "-", "worker": "-", "server": "--", "chief": ":"}
_PREFERRED = ("val_accuracy", "accuracy", "val_loss", "loss")
_MOST_MARKERS = 30


def draw(report: Told) -> list[Plot]:
    """All plots of a report: those of each point, then those over points."""
    plots: list[Plot] = []
    points = [point for point in report["points"]
              if any(told["summary"] for told in point["engines"].values())]
    # The figure of the target, else the best known one that is there.
    there = {name for point in points for told in point["engines"].values()
             for name in told["summary"].get("final", {})}
    figure = next((name for name in (report["target_figure"], *_PREFERRED, *sorted(there))
                   if name in there), None)
    target = report["target_value"] if report["target_figure"] == figure else None
    for point in points:
        label = point["label"]
        if figure is not None:
            plots += [(label, f"{figure} against {x}", svg(_curves, point, figure, x, target))
                      for x in ("epochs", "seconds of training")]
        plots += [
            (label, "samples per second: median, least and most", svg(_speeds, point)),
            (label, "processor time per step, by role",
             svg(_stacked, point, _cpu, "CPU ms per step")),
            (label, "bytes sent per step, by role, all its processes together",
             svg(_stacked, point, _sent, "MB per step"))]
    return plots + list(_over_points(points))


def _over_points(points: Sequence[Told]) -> Iterator[Plot]:
    """Time, CPU and bytes against each axis with several numbers, all else being equal."""
    for axis in dict.fromkeys(name for point in points for name in point["axes"]):
        groups: dict[str, list[tuple[float, Told]]] = {}
        for point in points:
            if isinstance(point["axes"].get(axis), (int, float)):
                rest = "".join(f", {name} {value}" for name, value in point["axes"].items()
                               if name != axis)
                groups.setdefault(rest, []).append((point["axes"][axis], point["engines"]))
        for rest, pairs in groups.items():
            if len(pairs) < 2:
                continue
            group, of = dict(sorted(pairs, key=lambda pair: pair[0])), f"against {axis}{rest}"
            yield ("", f"step time {of} (dotted: bound of the network)",
                   svg(_step_times, group, axis))
            yield ("", f"processor time per step and role {of}",
                   svg(_role_lines, group, axis, _cpu, "CPU ms per step"))
            yield ("", f"bytes sent per step and role {of}",
                   svg(_role_lines, group, axis, _sent, "MB per step"))


def _curves(axes: Axes, point: Told, figure: str, x: str, target: float | None) -> None:
    for engine, told in point["engines"].items():
        label: str | None = plain(engine)
        for run in told["runs"]:
            lines = [line for line in run["epochs"] if figure in line] if run["figures"] else []
            if not lines:
                continue
            start_s = run["epochs"][0]["time_s"] - run["epochs"][0]["seconds"]
            xs = [line["epoch"] if x == "epochs" else line["time_s"] - start_s for line in lines]
            axes.plot(xs, [line[figure] for line in lines], color=_COLORS[engine], label=label,
                      linestyle=_ENGINE_STYLES.get(engine, "-"), linewidth=1.4, alpha=0.8,
                      marker="." if len(xs) < _MOST_MARKERS else "")
            label = None
    if target is not None:
        axes.axhline(target, color="#999999", linewidth=0.8, linestyle=":")
    axes.set(xlabel=x, ylabel=plain(figure))
    axes.legend(fontsize="small")


def _speeds(axes: Axes, point: Told) -> None:
    names = [name for name, told in point["engines"].items() if told["summary"]]
    rates = [point["engines"][name]["summary"]["samples_per_s"] for name in names]
    axes.barh(names, [rate["median"] for rate in rates], color=[_COLORS[name] for name in names],
              error_kw={"capsize": 4, "linewidth": 1}, xerr=_ranges(rates))
    axes.invert_yaxis()
    axes.set_xlabel("samples/s")


def _ranges(spreads: Sequence[Told]) -> tuple[list[float], list[float]]:
    return ([spread["median"] - spread["least"] for spread in spreads],
            [spread["most"] - spread["median"] for spread in spreads])


def _cpu(used: Told) -> float:
    return float(used["cpu_ms"]["median"])


def _sent(used: Told) -> float:
    return float(used["bytes_sent"]["median"]) * float(used["processes"]) / 1e6


def _stacked(axes: Axes, point: Told, value: Callable[[Told], float], label: str) -> None:
    used = {name: told["summary"]["roles"] for name, told in point["engines"].items()
            if told["summary"].get("roles")}
    left = dict.fromkeys(used, 0.0)
    for role in dict.fromkeys(role for roles in used.values() for role in roles):
        sizes = {name: value(roles[role]) for name, roles in used.items() if role in roles}
        axes.barh(list(sizes), list(sizes.values()), left=[left[name] for name in sizes],
                  label=plain(role))
        left |= {name: left[name] + size for name, size in sizes.items()}
    axes.invert_yaxis()
    axes.set_xlabel(label)
    if used:
        axes.legend(fontsize="small")


def _step_times(axes: Axes, group: Mapping[float, Told], axis: str) -> None:
    for engine, found in _by_engine(group):
        times = [told["summary"]["step_ms"] for told in found.values()]
        axes.errorbar(list(found), [time["median"] for time in times], marker=".",
                      color=_COLORS[engine], label=plain(engine), yerr=_ranges(times), capsize=3)
        bounds = [told["computed"]["seconds"] for told in found.values()]
        if None not in bounds:
            axes.plot(list(found), [1000 * bound for bound in bounds], ":", color=_COLORS[engine])
    _finish(axes, group, axis, "ms per step")


def _role_lines(axes: Axes, group: Mapping[float, Told], axis: str, value: Callable[[Told], float],
                label: str) -> None:
    for engine, found in _by_engine(group):
        used = {x: told["summary"]["roles"] for x, told in found.items()}
        for role in dict.fromkeys(role for roles in used.values() for role in roles):
            line = {x: value(roles[role]) for x, roles in used.items() if role in roles}
            axes.plot(list(line), list(line.values()), marker=".", color=_COLORS[engine],
                      linestyle=_ROLE_STYLES.get(role, "-."), label=plain(f"{engine}, {role}"))
    _finish(axes, group, axis, label)


def _by_engine(group: Mapping[float, Told]) -> Iterator[tuple[str, dict[float, Told]]]:
    """The results of each engine that has at least two values of an axis."""
    for engine in _COLORS:
        found = {x: engines[engine] for x, engines in group.items()
                 if engines.get(engine, {}).get("summary")}
        if len(found) > 1:
            yield engine, found


def _finish(axes: Axes, group: Mapping[float, Told], axis: str, label: str) -> None:
    axes.set_ylim(bottom=0)
    axes.set_xticks(list(group))
    axes.set(xlabel=plain(axis), ylabel=label)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))  # many lines


def plain(text: str) -> str:
    """Without the characters that begin formulas."""
    return text.replace("$", r"\$")


def svg(fill: Callable[..., None], *arguments: Any, height: float = 3.8) -> bytes:
    """A picture of what `fill` draws; the same figures give the same bytes. Height in inches."""
    with mpl.rc_context({"svg.hashsalt": "hvdtrain", "axes.spines.top": False,
                         "axes.spines.right": False, "axes.grid": True, "grid.color": "#eeeeee",
                         "axes.axisbelow": True}):
        figure = Figure(figsize=(6.4, height), layout="constrained")
        fill(figure.add_subplot(), *arguments)
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()

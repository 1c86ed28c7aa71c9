"""The plots of a report, as SVG files. Needs matplotlib, which is loaded here only."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hvdtrain.bench.engines import ENGINES

Plot = tuple[str, str, bytes]
"""The label of its point ("" for one over several points), a title, an SVG file."""

_COLORS = dict(zip(ENGINES, ("#555555", "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73"),
                   strict=True))
_ENGINE_STYLES = {"allreduce-mpi": "--", "ps-sync": "--"}
"""Their results may be those of the engine before, and hide its line."""
_ROLE_STYLES = {"rank": "-", "worker": "-", "server": "--", "chief": ":"}
_SIZE = (6.4, 3.8)
_PREFERRED = ("val_accuracy", "accuracy", "val_loss", "loss")
_MEGA = 1e6
_MOST_MARKERS = 30
_ERROR = {"capsize": 4, "linewidth": 1}


def draw(report: Mapping[str, Any]) -> list[Plot]:
    """All plots of a report: those of each point, then those over points."""
    plots: list[Plot] = []
    figure = _figure_name(report)
    target = report["target_value"] if report["target_figure"] == figure else None
    points = [point for point in report["points"]
              if any(told["summary"] for told in point["engines"].values())]
    for point in points:
        label = point["label"]
        if figure is not None:
            for x, title in (("epoch", "epochs"), ("time", "seconds of training")):
                plots.append((label, f"{figure} against {title}", _svg(
                    _curves, point, figure, x, title, target)))
        plots.append((label, "samples per second: median, least and most",
                      _svg(_speeds, point)))
        plots.append((label, "processor time per step, by role",
                      _svg(_stacked, point, _cpu, "CPU ms per step")))
        plots.append((label, "bytes sent per step, by role, all its processes together",
                      _svg(_stacked, point, _sent, "MB per step")))
    return plots + _over_points(points)


def _over_points(points: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """For each axis with several numbers, all else being equal: time, CPU and bytes against it."""
    plots: list[Plot] = []
    for axis in dict.fromkeys(name for point in points for name in point["axes"]):
        groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for point in points:
            if isinstance(point["axes"].get(axis), (int, float)):
                rest = tuple((k, v) for k, v in point["axes"].items() if k != axis)
                groups.setdefault(rest, []).append(point)
        for rest, group in groups.items():
            if len(group) < 2:
                continue
            group.sort(key=lambda point: float(point["axes"][axis]))
            where = "".join(f", {name} {value}" for name, value in rest)
            plots += [
                ("", f"step time against {axis}{where} (dotted: bound of the network)",
                 _svg(_step_times, group, axis)),
                ("", f"processor time per step and role against {axis}{where}",
                 _svg(_role_lines, group, axis, _cpu, "CPU ms per step")),
                ("", f"bytes sent per step and role against {axis}{where}",
                 _svg(_role_lines, group, axis, _sent, "MB per step")),
            ]
    return plots


def _figure_name(report: Mapping[str, Any]) -> str | None:
    """The figure to plot: that of the target, else the best known one that is there."""
    there = {name for point in report["points"] for told in point["engines"].values()
             for name in told["summary"].get("final", {})}
    wanted = (report["target_figure"], *_PREFERRED, *sorted(there))
    return next((name for name in wanted if name in there), None)


def _curves(axes: Axes, point: Mapping[str, Any], figure: str, x: str, title: str,
            target: float | None) -> None:
    for engine, told in point["engines"].items():
        label: str | None = _plain(engine)
        for run in told["runs"]:
            lines = [line for line in run["epochs"] if figure in line] if run["figures"] else []
            if not lines:
                continue
            start_s = run["epochs"][0]["time_s"] - run["epochs"][0]["seconds"]
            xs = [line["epoch"] if x == "epoch" else line["time_s"] - start_s for line in lines]
            axes.plot(xs, [line[figure] for line in lines], color=_COLORS[engine], label=label,
                      linestyle=_ENGINE_STYLES.get(engine, "-"), linewidth=1.4, alpha=0.8,
                      marker="." if len(xs) < _MOST_MARKERS else "")
            label = None
    if target is not None:
        axes.axhline(target, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xlabel(title)
    axes.set_ylabel(_plain(figure))
    axes.legend(fontsize="small")


def _speeds(axes: Axes, point: Mapping[str, Any]) -> None:
    names = [name for name, told in point["engines"].items() if told["summary"]]
    rates = [point["engines"][name]["summary"]["samples_per_s"] for name in names]
    medians = [rate["median"] for rate in rates]
    axes.barh(names, medians, color=[_COLORS[name] for name in names], error_kw=_ERROR,
              xerr=([m - r["least"] for m, r in zip(medians, rates, strict=True)],
                    [r["most"] - m for m, r in zip(medians, rates, strict=True)]))
    axes.invert_yaxis()
    axes.set_xlabel("samples/s")


def _cpu(used: Mapping[str, Any]) -> float:
    return float(used["cpu_ms"]["median"])


def _sent(used: Mapping[str, Any]) -> float:
    return float(used["bytes_sent"]["median"]) * float(used["processes"]) / _MEGA


def _stacked(axes: Axes, point: Mapping[str, Any], value: Callable[[Mapping[str, Any]], float],
             label: str) -> None:
    names = [name for name, told in point["engines"].items() if told["summary"].get("roles")]
    left = dict.fromkeys(names, 0.0)
    roles = dict.fromkeys(role for name in names
                          for role in point["engines"][name]["summary"]["roles"])
    for role in roles:
        having = [name for name in names if role in point["engines"][name]["summary"]["roles"]]
        sizes = [value(point["engines"][name]["summary"]["roles"][role]) for name in having]
        axes.barh(having, sizes, left=[left[name] for name in having], label=_plain(role))
        for name, size in zip(having, sizes, strict=True):
            left[name] += size
    axes.invert_yaxis()
    axes.set_xlabel(label)
    if roles:
        axes.legend(fontsize="small")


def _step_times(axes: Axes, group: Sequence[Mapping[str, Any]], axis: str) -> None:
    for engine, points in _by_engine(group):
        xs = [point["axes"][axis] for point in points]
        times = [point["engines"][engine]["summary"]["step_ms"] for point in points]
        medians = [time["median"] for time in times]
        axes.errorbar(xs, medians, marker=".", color=_COLORS[engine], label=_plain(engine),
                      yerr=([m - t["least"] for m, t in zip(medians, times, strict=True)],
                            [t["most"] - m for m, t in zip(medians, times, strict=True)]),
                      capsize=3)
        bounds = [point["engines"][engine]["computed"]["seconds"] for point in points]
        if all(bound is not None for bound in bounds):
            axes.plot(xs, [1000 * bound for bound in bounds], ":", color=_COLORS[engine])
    axes.set_ylim(bottom=0)
    _finish(axes, group, axis, "ms per step")


def _role_lines(axes: Axes, group: Sequence[Mapping[str, Any]], axis: str,
                value: Callable[[Mapping[str, Any]], float], label: str) -> None:
    for engine, points in _by_engine(group):
        roles = dict.fromkeys(role for point in points
                              for role in point["engines"][engine]["summary"]["roles"])
        for role in roles:
            found = [(point["axes"][axis], value(used)) for point in points
                     if (used := point["engines"][engine]["summary"]["roles"].get(role))]
            axes.plot([x for x, _ in found], [y for _, y in found], marker=".",
                      color=_COLORS[engine], linestyle=_ROLE_STYLES.get(role, "-."),
                      label=_plain(f"{engine}, {role}"))
    axes.set_ylim(bottom=0)
    _finish(axes, group, axis, label)


def _by_engine(group: Sequence[Mapping[str, Any]]) -> Iterable[
        tuple[str, list[Mapping[str, Any]]]]:
    """The points at which each engine was measured; two at least."""
    for engine in _COLORS:
        points = [point for point in group
                  if point["engines"].get(engine, {}).get("summary")]
        if len(points) > 1:
            yield engine, points


def _finish(axes: Axes, group: Sequence[Mapping[str, Any]], axis: str, label: str) -> None:
    axes.set_xticks([point["axes"][axis] for point in group])
    axes.set_xlabel(_plain(axis))
    axes.set_ylabel(label)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))  # many lines


def _plain(text: str) -> str:
    """Text without the signs that begin formulas."""
    return text.replace("$", r"\$")


def _svg(fill: Callable[..., None], *arguments: Any) -> bytes:
    """Draw one plot; the same figures give the same bytes."""
    with mpl.rc_context({"svg.hashsalt": "hvdtrain"}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(visible=True, color="#eeeeee")
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        fill(axes, *arguments)
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()

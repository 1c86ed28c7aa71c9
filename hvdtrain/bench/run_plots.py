"""The plots of `hvdtrain report`. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes

from hvdtrain.bench.plots import Plot, plain, svg
from hvdtrain.bench.run_report import ReadRun, figures_of, is_number
from hvdtrain.runtime.phases import PHASES

_MOST_MARKERS = 30  # and bars that stand apart
_LINE_INCHES, _MOST_CHARS = 0.18, 60  # of a legend


def draw(runs: Sequence[ReadRun]) -> list[Plot]:
    """Curves of all runs beside each other, and for each run its time by phase."""
    curves: list[Plot] = [
        ("", " and ".join(names), svg(_curves, runs, names,
                                      height=3.8 + _LINE_INCHES * len(runs) * len(names)))
        for names in figures_of(runs).values()]
    return curves + [(run.label, "shares of the time by phase (medians of the ranks)",
                      svg(_shares, run)) for run in runs if run.timed]


def _curves(axes: Axes, runs: Sequence[ReadRun], names: Sequence[str]) -> None:
    for number, run in enumerate(runs):
        for name in names:
            points = {line["epoch"]: line[name] for line in run.epochs if is_number(line.get(name))}
            if points:
                axes.plot(list(points), list(points.values()), color=f"C{number}", linewidth=1.4,
                          alpha=0.8, linestyle="--" if name.startswith("val_") else "-",
                          marker="." if len(points) < _MOST_MARKERS else "",
                          # The space: "_..." is hidden. Longer names leave no place for curves.
                          label=plain(f" {name} of {run.label[-_MOST_CHARS:]}"))
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="epoch", ylabel=plain(names[0]))
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.16))


def _shares(axes: Axes, run: ReadRun) -> None:
    epochs = [line["epoch"] for line in run.timed]
    medians = {name: [max(0.0, statistics.median(line["time"][name])) for line in run.timed]
               for name in PHASES}
    totals = [sum(each) or 1.0 for each in zip(*medians.values(), strict=True)]
    reached, width = [0.0] * len(epochs), 0.9 if len(epochs) < _MOST_MARKERS else 1.0
    for number, name in enumerate(PHASES):
        shares = [100 * seconds / total
                  for seconds, total in zip(medians[name], totals, strict=True)]
        if any(shares):
            axes.bar(epochs, shares, bottom=reached, width=width, color=f"C{number}", label=name)
        reached = [low + share for low, share in zip(reached, shares, strict=True)]
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel="epoch", ylabel="% of the time")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1), reverse=True)

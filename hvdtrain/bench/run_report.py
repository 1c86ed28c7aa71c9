"""`hvdtrain report`: what runs have written to `metrics.jsonl`, on one page of HTML."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from hvdtrain.bench.report import NONE, ReportTable, can_plot, fill_page
from hvdtrain.errors import ConfigError, NotWrittenError
from hvdtrain.runtime.phases import PHASES, SLOW, Times, added, slowest, spread, total_of
from hvdtrain.whole_file import whole_file

_NO_CURVE = ("epoch", "seconds", "time_s", "samples")
_PLACES = {"loss": 0, "learning_rate": 2, "samples_per_s": 3}


@dataclass(frozen=True, kw_only=True)
class ReadRun:
    """A run: its lines of `metrics.jsonl`, by epoch, and what is to be said of them."""

    label: str
    folder: Path
    epochs: Sequence[Mapping[str, Any]]
    remarks: list[str]

    @property
    def timed(self) -> list[Mapping[str, Any]]:
        """The epochs with seconds by phase."""
        return [line for line in self.epochs if isinstance(line.get("time"), dict)]

    @property
    def ranks(self) -> int:
        """How many ranks the last of them had; 0 if there is none."""
        return len(self.timed[-1]["time"]["input"]) if self.timed else 0

    @property
    def times(self) -> list[Times]:
        """The seconds by phase of the epochs on so many ranks."""
        return [line["time"] for line in self.timed if len(line["time"]["input"]) == self.ranks]


def read_runs(folders: Iterable[Path]) -> list[ReadRun]:
    """Read runs, each once, from their output folders; ConfigError if one is not whole."""
    typed = {Path(os.path.realpath(folder)): folder for folder in folders}
    runs = []
    for folder, label in zip(typed.values(), labels(list(typed)), strict=True):
        path = folder / "metrics.jsonl"
        try:
            epochs, remarks = read_epochs(path.read_bytes(), path)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror or error}. Expected the file that "
                "`hvdtrain fit` writes to its output folder after each epoch. Give the folder of "
                "a run that has ended an epoch.") from error
        runs.append(ReadRun(label=label, folder=folder, epochs=epochs, remarks=remarks))
    return runs


def labels(folders: Sequence[Path]) -> list[str]:
    """For each of several folders its name, after as many of its parents as tell it apart."""
    def tail(folder: Path, parts: int) -> str:
        return str(Path(*folder.parts[-parts:]))
    return [next(tail(folder, parts) for parts in count(1) if sum(
        tail(other, parts) == tail(folder, parts) for other in folders) == 1)
        for folder in folders]


def read_epochs(data: bytes, path: Path) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The epochs in the content of `metrics.jsonl`, and remarks; ConfigError if it is damaged."""
    epochs: dict[int, Mapping[str, Any]] = {}
    remarks = []
    lines = data.split(b"\n")
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            problem = _problem(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                remarks.append(f"{path}: line {number}, the last one, is not whole, as after a "
                               "kill, and is left out.")
                continue
            line, problem = None, "no JSON"
        if problem:
            found = text[:40].decode("utf-8", "replace")
            raise ConfigError(
                f"{path}, line {number}: found {problem} in {found!r}. Expected the JSON object "
                "of an epoch, as `hvdtrain fit` writes it. Remove that line, or leave out the run.")
        epochs[line["epoch"]] = line
    if not epochs:
        raise ConfigError(f"{path} has no epoch. Expected a line for each one. Wait until the "
                          "first epoch of the run has ended, or leave out the run.")
    return [epochs[epoch] for epoch in sorted(epochs)], remarks


def _problem(line: Any) -> str:
    """What a line is instead of an epoch's, or ""."""
    if not isinstance(line, dict) or type(line.get("epoch")) is not int:
        return "no object with a whole number as `epoch`"
    if isinstance(times := line.get("time"), dict):
        sizes = {len(seconds) if isinstance(seconds, list) and all(map(is_number, seconds)) else 0
                 for seconds in map(times.get, PHASES)}
        if len(sizes) > 1 or 0 in sizes:
            return "not as many seconds for each phase in `time`"
    return ""


def is_number(value: Any) -> bool:
    """Whether a figure is one that a curve can show."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def figures_of(runs: Iterable[ReadRun]) -> dict[str, list[str]]:
    """The figures to draw, in order: name -> those of it and its `val_` twin that are there."""
    there = dict.fromkeys(name for run in runs for line in run.epochs
                          for name, value in line.items()
                          if is_number(value) and name not in _NO_CURVE)
    bases = dict.fromkeys(name.removeprefix("val_") for name in there)
    return {base: [name for name in (base, f"val_{base}") if name in there]
            for base in sorted(bases, key=lambda base: _PLACES.get(base, 1))}


def overview(runs: Sequence[ReadRun]) -> ReportTable:
    """All runs, with what their last epochs reached."""
    names = [name for figure in figures_of(runs).values() for name in figure]
    return ReportTable(
        "Figures of the last epochs", ("run", "folder", "epochs", "ranks", *names),
        tuple((run.label, str(run.folder), str(len(run.epochs)), str(run.ranks or NONE),
               *(f"{last[name]:.4g}" if is_number(last.get(name)) else NONE for name in names))
              for run in runs for last in run.epochs[-1:]))


def times_table(run: ReadRun) -> ReportTable:
    """The seconds by phase of a run that has `times`."""
    times = added(run.times)
    total = total_of(times) or 1.0

    def cell(seconds: float) -> str:
        return f"{seconds:.2f} s ({seconds / total:.0%})"
    rows = []
    for name, of_ranks in times.items():
        median, *both = spread(of_ranks)
        rows.append((name, cell(median),
                     *(f"{cell(of_ranks[rank])}, rank {rank}" for rank in both)))
    return ReportTable(
        f"Time by phase: {len(run.times)} of {len(run.epochs)} epochs, ranks: {run.ranks}",
        ("phase", "median", "least", "most"), tuple(rows))


def verdict(run: ReadRun) -> str:
    """Which rank the others wait for."""
    if not run.times:
        return ("Its metrics.jsonl has no `time`, the seconds by phase: engine allreduce writes "
                "it, other engines and older versions do not.")
    found = slowest(added(run.times))
    return f"{found.capitalize()}." if found else (
        f"There is no rank for which the others wait {SLOW:.0%} of the time.")


def write_page(runs: Sequence[ReadRun], path: Path) -> None:
    """Write the page, with plots if matplotlib is installed; NotWrittenError if that fails."""
    plots: list[tuple[str, str, bytes]] = []
    if can_plot():
        from hvdtrain.bench.run_plots import draw
        plots = draw(runs)
    text = fill_page("run_report.html.j2", runs=runs, plots=plots, overview=overview(runs),
                     times_table=times_table, verdict=verdict)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise NotWrittenError(f"{path} cannot be written: {error.strerror or error}. Expected "
                              "the name of a file. Give another --output.") from error

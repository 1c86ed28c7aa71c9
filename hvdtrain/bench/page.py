"""A report as one self-contained page of HTML; plots are images within it."""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from hvdtrain.bench.engines import ENGINES
from hvdtrain.bench.show import failures, remarks
from hvdtrain.bench.tables import Table, tables
from hvdtrain.bench.words import NONE, bytes_text

PAGE_NAME = "report.html"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2em auto;
       max-width: 76em; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2.2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: 0.6em 0 1.6em; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0.3em 0; }
th, td { padding: 0.25em 0.9em 0.25em 0; text-align: left; border-bottom: 1px solid #eee;
         vertical-align: top; }
th { color: #555; font-weight: 500; }
figure { display: inline-block; margin: 0.5em 1em 0.5em 0; } img { max-width: 100%; }
figcaption { color: #555; }
pre { background: #f6f6f6; padding: 0.7em; overflow-x: auto; font-size: 0.85em; }
.failed { color: #a00; }
"""
_NOTES = (
    "A step is one batch of every worker: workers x batch_per_rank samples. For ps-async that is "
    "one update by each worker; for one process, as many batches as there are workers. The last "
    "batch of an epoch may be smaller, and counts as one, since it moves as many bytes.",
    "Measured is the time from the end of the first epoch (in which TensorFlow traces) to the end "
    "of the last. An epoch holds its validation.",
    "Efficiency is samples/s over workers x the samples/s of one process, which has as many "
    "threads and the same batch_per_rank. On one machine all processes share its cores.",
    "Time to the target begins with the first epoch, and includes tracing.",
    "Bytes are those that TCP delivered, of each process's own connections, within the host as "
    "well. MPI within a host uses shared memory, of which there are no counts.",
    "Computed: a ring sends 2 (N - 1) / N x M from each of N ranks, where M is the size of the "
    "trainable parameters as float32. With parameter servers each worker sends and receives M, "
    "and the servers together N x M.",
    "The bound is the bytes of the busiest host in one direction over the speed of its link; "
    "what stays within a host does not count. A synchronous step of parameter servers pulls "
    "before it pushes, and may take twice as long. ps-async gives the next batch to whichever "
    "worker is free: one beside a server needs no network, takes more than its share, and a step "
    "can take less than this bound.",
    "Virtual hosts share the cores of this machine: where the processes together need more, the "
    "step takes longer than the network alone would make it.",
)


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_page(report: Mapping[str, Any], folder: Path) -> Path:
    """Write `report.html`, with plots where matplotlib is installed; returns its path."""
    plots: list[tuple[str, str, bytes]] = []
    if can_plot():
        from hvdtrain.bench.plots import draw
        plots = draw(report)
    path = folder / PAGE_NAME
    path.write_text(render(report, plots), encoding="utf-8")
    return path


def render(report: Mapping[str, Any], plots: Iterable[tuple[str, str, bytes]] = ()) -> str:
    """Pure: the page.

    Args:
        report: From `compare`.
        plots: The label of the point ("" for those over several points), a title, an SVG file.
    """
    plots = list(plots)
    parts = [f"<h1>{escape(report['name'])}: engines compared</h1>", _facts(report)]
    parts += [f"<p>{escape(remark)}</p>" for remark in remarks(report)]
    lines = failures(report)
    if lines:
        parts.append(f"<h2 class=failed>What failed</h2><pre>{escape(chr(10).join(lines))}</pre>")
    across = [plot for plot in plots if not plot[0]]
    if across:
        parts.append("<h2>Over all settings</h2>" + "".join(map(_figure, across)))
    for point in report["points"]:
        if not point["engines"]:
            continue
        parts.append(f"<h2>{escape(point['heading'])}</h2>")
        parts += [_table(table) for table in tables(point, report["target"])]
        parts += [_figure(plot) for plot in plots if plot[0] == point["label"]]
    parts.append("<h2>What the figures are</h2><ul>"
                 + "".join(f"<li>{escape(note)}</li>" for note in _NOTES) + "</ul>")
    parts.append(f"<h2>Commands</h2><pre>{escape(_commands(report))}</pre>")
    return ("<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
            f"<title>{escape(report['name'])}: engines compared</title>"
            f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n")


def _facts(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    rows = [("made", report["made"]), ("job", report["job"]),
            ("rounds", f"{report['rounds']}; {report['runs']} of {report['planned_runs']} runs, "
             f"{report['failed']} failed"),
            ("threads of each process", str(report["threads"])),
            ("target", report["target"] or NONE),
            ("machine", f"{machine['processor']}, {machine['cores']} cores, "
             f"{machine['memory_gb']} GB, {machine['system']}"),
            ("versions", ", ".join(f"{name} {version}"
                                   for name, version in machine["versions"].items()))]
    for job, found in report["jobs"].items():
        rows.append((f"parameters of {job}", f"{found['parameters']:,} trainable, "
                     f"{bytes_text(found['parameter_bytes'])} as float32; "
                     f"{found['samples']:,} samples"))
    rows += [(name, ENGINES[name].says) for name in ENGINES
             if any(name in point["engines"] for point in report["points"])]
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
                    for name, value in rows)
    return f"<table>{cells}</table>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
                   for row in table.rows)
    return f"<table><caption>{escape(table.title)}</caption><tr>{head}</tr>{rows}</table>"


def _figure(plot: tuple[str, str, bytes]) -> str:
    _, title, svg = plot
    data = base64.b64encode(svg).decode("ascii")
    return (f"<figure><img alt=\"{escape(title)}\" src=\"data:image/svg+xml;base64,{data}\">"
            f"<figcaption>{escape(title)}</figcaption></figure>")


def _commands(report: Mapping[str, Any]) -> str:
    lines = []
    for point in report["points"]:
        for told in point["engines"].values():
            lines += [run["command"] for run in told["runs"]]
    return "\n".join(lines)

"""`hvdtrain lr`: the learning rate of each step of a run on N ranks, before it is started."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from hvdtrain.cli.settings import SETTINGS, with_settings
from hvdtrain.errors import ConfigError


@with_settings(SETTINGS[name] for name in (
    "epochs", "batch_per_rank", "batch_global", "lr_scaling", "warmup_epochs"))
def lr_command(
    job: Annotated[str, typer.Argument(help="A .toml file, a .py file, or package.module.")],
    ranks: Annotated[int, typer.Option("--ranks", "-np", min=1, help="Number of ranks.")] = 1,
    points: Annotated[int, typer.Option(min=2, help="Lines of the table.")] = 20,
    plot: Annotated[Path | None, typer.Option(
        metavar="FILE", help="Draw the curve: .png, .svg or .pdf.")] = None,
    to_csv: Annotated[Path | None, typer.Option(
        "--csv", metavar="FILE", help="Write every step to a CSV file.")] = None,
    *, given: dict[str, Any],
) -> None:
    """Print the learning rate of JOB on so many ranks, with scaling, warmup and schedule.

    hvdtrain lr JOB -np 8 --warmup-epochs 5 --plot lr.png
    """
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot is {str(plot)!r}. Expected a file name that ends in .png, .svg "
                          "or .pdf.")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    curve = _curve(job, ranks, given)
    _show(curve, points)
    if to_csv is not None:
        to_csv.parent.mkdir(parents=True, exist_ok=True)
        with to_csv.open("w", newline="") as stream:
            csv.writer(stream).writerows(
                [("step", "epoch", "learning_rate"),
                 *((step, step / curve.steps_per_epoch, rate)
                   for step, rate in enumerate(curve.rates))])
        print(f"hvdtrain lr: {to_csv}")
    if plot is not None:
        from hvdtrain.train.lr_curve import draw
        draw(curve, plot, f"{Path(job).name}, {ranks} ranks")
        print(f"hvdtrain lr: {plot}")


def _curve(target: str, ranks: int, given: dict[str, Any]) -> Any:
    from hvdtrain.entry import load_job
    job = load_job(target)
    config = job.config.with_options(given)
    from hvdtrain.collectives.single import SingleCollective
    from hvdtrain.data.source import splits_of
    from hvdtrain.data.stream import one_sample
    from hvdtrain.optim import DistributedOptimizer
    from hvdtrain.train.lr_curve import learning_rates
    from hvdtrain.train.prepare import build_model
    from hvdtrain.train.schedule import base_rate
    model, train = job.model(), splits_of(job.data()).train
    DistributedOptimizer(model.optimizer, collective=SingleCollective())
    build_model(model, lambda: one_sample(train))
    return learning_rates(model, train, config, size=ranks, base=base_rate(model.optimizer),
                          callbacks=job.callbacks())


def _show(curve: Any, points: int) -> None:
    from rich.console import Console
    from rich.table import Table
    table = Table(title=f"Learning rate: {curve.description}", title_justify="left")
    for name in ("step", "epoch", "learning rate"):
        table.add_column(name, justify="right")
    for step in curve.points(points):
        table.add_row(f"{step + 1:,}", f"{step / curve.steps_per_epoch:.2f}",
                      f"{curve.rates[step]:.6g}")
    Console().print(table)

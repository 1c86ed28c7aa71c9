"""`hvdtrain fit`: train a job on this rank. Started once per rank by any starter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main

from hvdtrain.cli.settings import SETTINGS, given_of, with_settings
from hvdtrain.errors import ConfigError
from hvdtrain.job import DEFAULT_JOB, check_default_job, read_job_file, refuse_in_job


@with_settings(SETTINGS.values())
def fit_command(
    job: Annotated[str | None, typer.Argument(
        help="A .toml file, a .py file, or package.module.",
        show_default="hvdtrain.toml of this folder")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan only.")] = False,
    *, given: dict[str, Any],
) -> None:
    """Train JOB. The same on one process and under every starter.

    hvdtrain fit JOB | hvdtrain launch -np 8 fit JOB | horovodrun -np 8 hvdtrain fit JOB |
    mpirun -np 8 hvdtrain fit JOB | srun hvdtrain fit JOB

    With parameter servers: hvdtrain launch -np 5 fit JOB --engine ps --ps 2

    The defaults are those of a job that says nothing else.
    """
    from hvdtrain.rank_main import fit_on_this_rank
    fit_on_this_rank(job, given, dry_run=dry_run)


def check_fit(words: Sequence[str], *, elsewhere: bool = False) -> dict[str, Any]:
    """Tell a mistake in what follows `hvdtrain fit` once, here, rather than on every rank.

    Args:
        words: What follows.
        elsewhere: Boolean, the job's files are on another machine.

    Returns:
        The settings that are given, by name.

    Raises:
        ConfigError: The job file is missing or wrong, or a setting does not fit.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(fit_command)
    typed = typer.main.get_command(app).make_context("hvdtrain fit", list(words)).params
    job, given = typed["job"], given_of(SETTINGS.values(), typed)
    refuse_in_job(given)
    for name, value in given.items():
        SETTINGS[name].check(value)
    if elsewhere:
        return given
    if job is None:
        check_default_job()
    path = Path(job or DEFAULT_JOB)
    if path.suffix == ".toml":
        read_job_file(path).train.with_options(given)
    elif path.suffix == ".py" and not path.is_file():
        raise ConfigError(f"The job file {path} does not exist. Give a .toml file, a .py "
                          "file or a module; examples/ has some of each.")
    return given

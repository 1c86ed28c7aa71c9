"""`hvdtrain slurm`: writes a Slurm batch script, and submits it if asked.

Registered with `app.command("slurm", cls=SubmitCommand, context_settings=LAUNCH_SETTINGS)`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hvdtrain.cli.fit import check_fit
from hvdtrain.cli.launch import Command, LaunchCommand
from hvdtrain.cli.settings import Set, settings_env, with_settings
from hvdtrain.settings import fields_of
from hvdtrain.submit.slurm_options import SlurmOptions

_TYPED = "hvdtrain.typed"


class SubmitCommand(LaunchCommand):
    """As `LaunchCommand`; keeps what was typed, for the head of what is written."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Remember the arguments, then parse them."""
        names: list[str] = []
        at: Any = ctx
        while at.parent is not None:
            names.insert(0, at.info_name or "")
            at = at.parent
        ctx.meta[_TYPED] = (*names, *args)
        return super().parse_args(ctx, args)


def typed(ctx: typer.Context) -> tuple[str, ...]:
    """What was typed after `hvdtrain`."""
    words: tuple[str, ...] = ctx.meta[_TYPED]
    return words


@with_settings(fields_of(SlurmOptions).values())
def slurm_command(
    ctx: typer.Context,
    command: Command,
    settings: Set = None,
    script: Annotated[Path | None, typer.Option(
        "--script", help="Write the script to this file. Default: print it.",
        show_default=False)] = None,
    submit: Annotated[bool, typer.Option(
        "--submit", help="Give the script to sbatch; print the job's number.")] = False,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Print the script only.")] = False,
    *, given: dict[str, Any],
) -> None:
    """Write a Slurm batch script that trains, stops in time and goes on by itself.

    hvdtrain slurm --nodes 2 --gpus-per-node 4 --time 12:00:00 --submit -- fit JOB
    """
    from hvdtrain.launch.rank_command import split_command
    from hvdtrain.submit.files import write_generated
    from hvdtrain.submit.sbatch import submit as give_to_slurm
    from hvdtrain.submit.slurm_script import make_script, with_absolute_venv

    ranks = split_command(command, "hvdtrain slurm")
    if ranks.is_fit:
        check_fit(ranks.own_words[1:])
    given["env"] = (*settings_env(ranks, settings), *given.get("env", ()))
    options = with_absolute_venv(SlurmOptions(**given))
    text = make_script(options, ranks, made_by=typed(ctx))
    if dry_run or (script is None and not submit):
        print(text, end="")
        return
    if script is not None:
        write_generated(script, text, executable=True)
        print(f"hvdtrain slurm: wrote {script}", file=sys.stderr)
    if submit:
        print(give_to_slurm(text, script, options, os.environ))

"""The program `hvdtrain`: its commands, and what becomes of an error."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import hvdtrain
from hvdtrain import log
from hvdtrain.cli.build_horovod import build_horovod_command
from hvdtrain.cli.compare import compare_command
from hvdtrain.cli.doctor import doctor_command
from hvdtrain.cli.fit import fit_command
from hvdtrain.cli.k8s import k8s_app
from hvdtrain.cli.launch import LAUNCH_SETTINGS, LaunchCommand, launch_command
from hvdtrain.cli.lr import lr_command
from hvdtrain.cli.settings import GroupedCommand
from hvdtrain.cli.slurm import SubmitCommand, slurm_command
from hvdtrain.cli.world import world_command
from hvdtrain.errors import HvdtrainError

app = typer.Typer(
    name="hvdtrain", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train Keras 3 models on many processes with Horovod's collectives.")

app.command("fit", cls=GroupedCommand)(fit_command)
app.command("launch", cls=LaunchCommand, context_settings=LAUNCH_SETTINGS)(launch_command)
app.command("slurm", cls=SubmitCommand, context_settings=LAUNCH_SETTINGS)(slurm_command)
app.add_typer(k8s_app, name="k8s")
app.command("compare")(compare_command)
app.command("lr")(lr_command)
app.command("doctor")(doctor_command)
app.command("world")(world_command)
app.command("build-horovod")(build_horovod_command)


def _version(asked: bool) -> None:
    if asked:
        print(f"hvdtrain {hvdtrain.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option(
        "--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Options of the program itself."""


def main() -> None:
    """Run the program. An error of the user's ends with its message and its exit code."""
    log.configure()
    try:
        app()
    except HvdtrainError as error:
        print(f"hvdtrain: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

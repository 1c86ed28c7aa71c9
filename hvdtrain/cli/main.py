"""The program `hvdtrain`: its commands, and how it reports errors."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import hvdtrain
from hvdtrain import log
from hvdtrain.build_horovod.options import BuildOptions
from hvdtrain.cli.job import (
    check_fit,
    compare_command,
    fit_command,
    lr_command,
    plan_command,
    report_command,
)
from hvdtrain.cli.script import ScriptCommand, run_command
from hvdtrain.cli.settings import GroupedCommand, Set, settings_env, with_settings
from hvdtrain.cli.words import Launch
from hvdtrain.doctor.options import DoctorOptions
from hvdtrain.errors import EXIT_MACHINE, HvdtrainError, LaunchError
from hvdtrain.launch.options import LaunchOptions, RankCommand, split_command
from hvdtrain.settings import fields_of, replace, settings_in
from hvdtrain.submit import slurm
from hvdtrain.submit.kubernetes import Kind, KubernetesOptions, make_manifest, to_yaml
from hvdtrain.world import World, detect_world, explain

Command = Annotated[list[str], typer.Argument(
    metavar="COMMAND", help="An hvdtrain command with its arguments, as in `fit JOB`; or `--` and "
    "any program, as in `-- python train.py`.")]
File = Annotated[Path | None, typer.Option(
    "--file", "-f", help="Write to this file. Default: print it.", show_default=False)]
# The first word that is no option begins the command, which keeps its own options.
RANKS_CONTEXT = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
_TYPED = "hvdtrain.typed"
_HEAD_CHARS = 200

app = typer.Typer(
    name="hvdtrain", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train Keras 3 models on many processes with Horovod's collectives.")
k8s_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                      help="Write manifests for Kubernetes, for Kubeflow's operators.")


class RanksCommand(GroupedCommand):
    """A command that takes the command of the ranks; needs `RANKS_CONTEXT`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Keep the `--` that tells a program from a command such as `fit`: the parser drops it."""
        ctx.meta[_TYPED] = (*_names(ctx), *args)
        if "--" in args:
            at = args.index("--")
            args = [*args[:at], "--", *args[at:]]
        return super().parse_args(ctx, args)


@with_settings(settings_in(LaunchOptions).values())
def launch_command(
    command: Command,
    settings: Set = None,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Show the plan and start nothing.")] = False,
    *, given: dict[str, Any],
) -> None:
    """Start the ranks of a job on its hosts and wait until all have ended.

    hvdtrain launch -np 4 fit JOB --epochs 3

    hvdtrain launch -H node1:4,node2:4 fit JOB

    hvdtrain launch -np 4 -- python train.py
    """
    # Imported here, so that `hvdtrain --help` does not wait for it.
    from hvdtrain.cli.launch import run_launch

    raise typer.Exit(run_launch(Launch(command=tuple(command), settings=tuple(settings or ()),
                                       dry_run=dry_run, given=given)))


@with_settings(fields_of(slurm.SlurmOptions).values())
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
    ranks = _checked(ctx, command, settings, given)
    if "venv" in given:
        given["venv"] = given["venv"].absolute()
    options = slurm.SlurmOptions(**given)
    text = slurm.make_script(options, ranks, made_by=ctx.meta[_TYPED])
    if dry_run or script is not None or not submit:
        _write(None if dry_run else script, text, "hvdtrain slurm", executable=True)
    if submit and not dry_run:
        print(slurm.submit(text, script, options, os.environ))


def _k8s_command(kind: Kind, doc: str) -> None:
    def command(ctx: typer.Context, command: Command, settings: Set = None, file: File = None,
                *, given: dict[str, Any]) -> None:
        ranks = _checked(ctx, command, settings, given, elsewhere=True)
        text = to_yaml(make_manifest(KubernetesOptions(kind=kind, **given), ranks),
                       ctx.meta[_TYPED])
        _write(file, text, "hvdtrain k8s")

    command.__doc__ = doc
    own = (one for one in fields_of(KubernetesOptions).values() if one.only in ("", kind))
    k8s_app.command(kind, cls=RanksCommand, context_settings=RANKS_CONTEXT)(
        with_settings(own)(command))


_k8s_command("mpijob", """Write an MPIJob: hvdtrain's launcher, and pods with sshd that train.

    hvdtrain k8s mpijob --name digits --image IMAGE --workers 2 --gpus-per-worker 4 -- fit JOB
    """)
_k8s_command("tfjob", """Write a TFJob: one rank in each pod; no ssh, no MPI, no launcher.

    hvdtrain k8s tfjob --name digits --image IMAGE --workers 4 --gpus-per-worker 1 -- fit JOB

    With parameter servers: hvdtrain k8s tfjob ... --workers 4 --ps 2 -- fit JOB
    """)


def _names(ctx: Any) -> tuple[str, ...]:
    """The words of the command, after `hvdtrain`."""
    return () if ctx.parent is None else (*_names(ctx.parent), ctx.info_name or "")


def _checked(ctx: typer.Context, command: list[str], settings: list[str] | None,
             given: dict[str, Any], *, elsewhere: bool = False) -> RankCommand:
    """The command of the ranks; adds its settings to `given` as variables."""
    ranks = split_command(command, " ".join(["hvdtrain", *_names(ctx)]))
    check_fit(ranks.own_words, elsewhere=elsewhere)
    given["env"] = (*settings_env(ranks, settings), *given.get("env", ()))
    return ranks


def _write(path: Path | None, text: str, what: str, *, executable: bool = False) -> None:
    """Write a generated file, else print it; a file that was not generated is not replaced."""
    if path is None:
        print(text, end="")
        return
    try:
        if path.exists() and slurm.MARK not in path.read_text(
                encoding="utf-8", errors="replace")[:_HEAD_CHARS]:
            raise LaunchError(f"{path} is there and was not made by hvdtrain. Give another name, "
                              "or remove it.")
        path.write_text(text, encoding="utf-8")
        if executable:
            path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror or error}. Give another "
                          "name.") from error
    print(f"{what}: wrote {path}", file=sys.stderr)


def world_command(
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON per rank.")] = False,
) -> None:
    """Show which rank this process is, of how many, and which variables say so."""
    # One write, so that the lines of several ranks do not mix.
    sys.stdout.write(render_world(detect_world(os.environ), as_json=as_json))
    sys.stdout.flush()


def render_world(world: World, *, as_json: bool) -> str:
    """The text of `hvdtrain world`; with several ranks each line names its rank."""
    if as_json:
        return json.dumps(asdict(world)) + "\n"
    prefix = f"[rank {world.rank}/{world.size}] " if world.size > 1 else ""
    return "".join(f"{prefix}{line}\n" for line in explain(world).splitlines())


@with_settings(settings_in(DoctorOptions).values())
def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    *, given: dict[str, Any],
) -> None:
    """Check this machine, or each host of a job, and say how to repair what is wrong.

    hvdtrain doctor

    hvdtrain doctor -H node1:4,node2:4

    Exit code 0, or 3 when a check failed.
    """
    from hvdtrain.doctor.examine import examine

    say = partial(print, "hvdtrain doctor:", file=sys.stderr, flush=True)
    report = examine(replace(DoctorOptions(), **given), os.environ, say)
    if as_json:
        print(report.as_json())
    else:
        report.show()
    raise typer.Exit(EXIT_MACHINE if report.has_failed else 0)


@with_settings(fields_of(BuildOptions).values())
def build_horovod_command(
    python: Annotated[Path, typer.Option(
        help="Interpreter to build for.", show_default="this one")] = Path(sys.executable),
    cache: Annotated[Path | None, typer.Option(
        help="Folder for wheels, source and logs.", show_default="$HVDTRAIN_CACHE, else "
        "$XDG_CACHE_HOME/hvdtrain, else ~/.cache/hvdtrain")] = None,
    key: Annotated[bool, typer.Option(
        "--key", help="Print the cache key as JSON and stop.")] = False,
    *, given: dict[str, Any],
) -> None:
    """Build Horovod for the installed TensorFlow: once, then from the cache."""
    from hvdtrain.build_horovod.build import build_horovod, plan_key
    from hvdtrain.cache import default_cache

    given |= {"python": python, "cache": cache or default_cache(os.environ)}
    given |= {name: path.absolute() for name, path in given.items() if isinstance(path, Path)}
    options = BuildOptions(**given)
    print(plan_key(options, os.environ).key.as_json() if key
          else build_horovod(options, os.environ).wheel)


app.command("fit", cls=GroupedCommand)(fit_command)
app.command("run", cls=ScriptCommand, context_settings=RANKS_CONTEXT)(run_command)
app.command("launch", cls=RanksCommand, context_settings=RANKS_CONTEXT)(launch_command)
app.command("slurm", cls=RanksCommand, context_settings=RANKS_CONTEXT)(slurm_command)
app.add_typer(k8s_app, name="k8s")
app.command("compare")(compare_command)
app.command("plan")(plan_command)
app.command("lr")(lr_command)
app.command("report")(report_command)
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
    """Run the program; an error of the user ends with its message and exit code."""
    log.configure()
    try:
        app()
    except HvdtrainError as error:
        print(f"hvdtrain: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

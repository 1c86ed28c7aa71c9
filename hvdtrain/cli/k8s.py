"""`hvdtrain k8s mpijob` and `hvdtrain k8s tfjob`: write a manifest for Kubernetes.

Registered with `app.add_typer(k8s_app, name="k8s")`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

import hvdtrain
from hvdtrain.cli.fit import check_fit
from hvdtrain.cli.launch import LAUNCH_SETTINGS, Command
from hvdtrain.cli.settings import Set, settings_env, with_settings
from hvdtrain.cli.slurm import SubmitCommand, typed
from hvdtrain.settings import Setting, fields_of
from hvdtrain.submit.k8s_options import Kind, KubernetesOptions

k8s_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                      help="Write manifests for Kubernetes, for Kubeflow's operators.")


File = Annotated[Path | None, typer.Option(
    "--file", "-f", help="Write to this file. Default: print it.", show_default=False)]


def _options(kind: Kind) -> Iterable[Setting]:
    return (one for one in fields_of(KubernetesOptions).values()
            if one.only in ("", kind))


@k8s_app.command("mpijob", cls=SubmitCommand, context_settings=LAUNCH_SETTINGS)
@with_settings(_options("mpijob"))
def mpijob_command(ctx: typer.Context, command: Command, settings: Set = None, file: File = None,
                   *, given: dict[str, Any]) -> None:
    """Write an MPIJob: hvdtrain's launcher, and pods with sshd that train.

    hvdtrain k8s mpijob --name digits --image IMAGE --workers 2 --gpus-per-worker 4 -- fit JOB
    """
    _write("mpijob", ctx, command, file, settings, given)


@k8s_app.command("tfjob", cls=SubmitCommand, context_settings=LAUNCH_SETTINGS)
@with_settings(_options("tfjob"))
def tfjob_command(ctx: typer.Context, command: Command, settings: Set = None, file: File = None,
                  *, given: dict[str, Any]) -> None:
    """Write a TFJob: one rank in each pod; no ssh, no MPI, no launcher.

    hvdtrain k8s tfjob --name digits --image IMAGE --workers 4 --gpus-per-worker 1 -- fit JOB

    With parameter servers: hvdtrain k8s tfjob ... --workers 4 --ps 2 -- fit JOB
    """
    _write("tfjob", ctx, command, file, settings, given)


def _write(kind: Kind, ctx: typer.Context, command: list[str], file: Path | None,
           settings: list[str] | None, given: dict[str, Any]) -> None:
    # Imported here, so that `hvdtrain --help` does not wait for them.
    from hvdtrain.launch.rank_command import split_command
    from hvdtrain.submit.files import write_generated
    from hvdtrain.submit.manifests import make_manifest
    from hvdtrain.submit.yaml_text import to_yaml

    ranks = split_command(command, f"hvdtrain k8s {kind}")
    if ranks.is_fit:
        check_fit(ranks.own_words[1:], elsewhere=True)
    given["env"] = (*settings_env(ranks, settings), *given.get("env", ()))
    options = KubernetesOptions(kind=kind, **given)
    text = to_yaml(make_manifest(options, ranks), hvdtrain.__version__, typed(ctx))
    if file is None:
        print(text, end="")
        return
    write_generated(file, text)
    print(f"hvdtrain k8s: wrote {file}", file=sys.stderr)

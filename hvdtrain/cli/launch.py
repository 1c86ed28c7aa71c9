"""`hvdtrain launch`: starts the ranks of a job, on this host or on several.

Registered with `app.command("launch", cls=LaunchCommand, context_settings=LAUNCH_SETTINGS)`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from hvdtrain.cli.fit import check_fit
from hvdtrain.cli.hosts import (
    Hostfile,
    NetworkInterface,
    SshIdentityFile,
    SshPort,
    split_networks,
)
from hvdtrain.cli.settings import Set, settings_env
from hvdtrain.errors import LaunchError
from hvdtrain.launch.options import COLLECTIVES, STARTERS, ElasticOptions, LaunchOptions
from hvdtrain.launch.rank_command import split_command
from hvdtrain.launch.remote_shell import RemoteOptions, asks_about_keys

Command = Annotated[list[str], typer.Argument(
    metavar="COMMAND", help="An hvdtrain command with its arguments, as in `fit JOB`; or `--` and "
    "any program, as in `-- python train.py`.")]
# The first word that is no option begins the command; its own options are left alone.
LAUNCH_SETTINGS = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


class LaunchCommand(TyperCommand):
    """Keeps the `--` before a program, which the parser drops: it tells the two forms apart."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Double the first `--`, of which the parser takes one where it ends the options."""
        if "--" in args:
            at = args.index("--")
            args = [*args[:at], "--", *args[at:]]
        return super().parse_args(ctx, args)


def launch_command(
    command: Command,
    np: Annotated[int | None, typer.Option(
        "-np", "--np", help="Number of ranks.", show_default="all slots of -H")] = None,
    hosts: Annotated[str | None, typer.Option(
        "-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts and how many ranks each takes.",
        show_default="the Slurm job, the MPIJob, or this host")] = None,
    hostfile: Hostfile = None,
    ssh_port: SshPort = None,
    ssh_identity_file: SshIdentityFile = None,
    network_interface: NetworkInterface = None,
    start_timeout: Annotated[float | None, typer.Option(
        metavar="SECONDS", help="How long to wait for hosts that cannot be reached.",
        show_default="0; in an MPIJob 300")] = None,
    starter: Annotated[str, typer.Option(
        help=f"What creates the processes: {', '.join(STARTERS)}.")] = LaunchOptions.starter,
    collective: Annotated[str, typer.Option(
        help=f"What moves the bytes: {', '.join(COLLECTIVES)}.")] = LaunchOptions.collective,
    env: Annotated[list[str] | None, typer.Option(
        "--env", "-x", metavar="VAR[=VALUE]", help="A variable for the ranks; repeatable.")] = None,
    settings: Set = None,
    output: Annotated[Path | None, typer.Option(
        help="Directory for one log file per rank.")] = None,
    timeout: Annotated[float | None, typer.Option(
        "--timeout", "--timeout-s", metavar="SECONDS", help="Limit for the whole job.",
        show_default="none")] = None,
    grace: Annotated[float, typer.Option(
        metavar="SECONDS", help="From SIGTERM to SIGKILL when the job is told to stop."
    )] = LaunchOptions.grace_s,
    preload: Annotated[bool, typer.Option(
        "--preload", help="Import TensorFlow once per host and fork the ranks from there."
    )] = LaunchOptions.preload,
    verbose: Annotated[bool, typer.Option(
        "--verbose", "-v", help="Show the plan, and the output of every rank.")] = False,
    dry_run: Annotated[bool, typer.Option(
        "--dry-run", help="Show the plan and start nothing.")] = False,
    min_np: Annotated[int | None, typer.Option(help="Elastic, with horovodrun.")] = None,
    max_np: Annotated[int | None, typer.Option(help="Elastic, with horovodrun.")] = None,
    host_discovery_script: Annotated[Path | None, typer.Option(
        help="Elastic, with horovodrun.")] = None,
    slots_per_host: Annotated[int | None, typer.Option(help="Elastic, with horovodrun.")] = None,
    elastic_timeout: Annotated[int | None, typer.Option(help="Elastic, with horovodrun.")] = None,
    reset_limit: Annotated[int | None, typer.Option(help="Elastic, with horovodrun.")] = None,
) -> None:
    """Start the ranks of a job on its hosts and stay until all have ended.

    hvdtrain launch -np 4 fit JOB --epochs 3

    hvdtrain launch -H node1:4,node2:4 fit JOB

    hvdtrain launch -np 4 -- python train.py
    """
    # Imported here, so that `hvdtrain --help` does not wait for them.
    from hvdtrain.launch.execute import launch
    from hvdtrain.launch.facts import gather_facts
    from hvdtrain.launch.places import read_hosts
    from hvdtrain.launch.plan import make_plan
    from hvdtrain.launch.render import render

    ranks = split_command(command, "hvdtrain launch")
    asked = check_fit(ranks.own_words[1:]).get("collective", "auto") if ranks.is_fit else "auto"
    if "auto" not in (asked, collective) and asked != collective:
        raise LaunchError(f"launch was given --collective {collective}, but the command "
                          f"--collective {asked}. Expected one of them.")
    if asked == "auto" != collective and ranks.is_fit:
        ranks = ranks.with_words("--collective", collective)
    options = LaunchOptions(
        command=ranks.argv, np=np, hosts=hosts, hostfile=hostfile,
        starter=starter, output=output, timeout_s=timeout, grace_s=grace,
        env=(*settings_env(ranks, settings, own=("collective",)), *(env or ())),
        preload=preload, verbose=verbose or ranks.own_words[:1] == ("world",),
        collective=collective if asked == "auto" else asked,
        remote=RemoteOptions(port=ssh_port, identity_file=ssh_identity_file),
        network_interface=split_networks(network_interface),
        start_timeout_s=start_timeout, elastic=ElasticOptions(
            min_np=min_np, max_np=max_np, host_discovery_script=host_discovery_script,
            slots_per_host=slots_per_host, elastic_timeout_s=elastic_timeout,
            reset_limit=reset_limit))
    names = [host.name for host in read_hosts(options, os.environ)]
    facts = gather_facts(names, lambda host: asks_about_keys(host, options.remote))
    plan = make_plan(options, os.environ, facts)
    if dry_run:
        print(render(plan), end="")
        return
    if verbose:
        print(render(plan), end="", file=sys.stderr, flush=True)
    else:
        for note in plan.notes:
            print(f"hvdtrain launch: {note}", file=sys.stderr, flush=True)
    raise typer.Exit(launch(plan))

"""`hvdtrain launch`: starts the ranks of a job, on this host or on several.

Registered with `app.command("launch", cls=LaunchCommand, context_settings=LAUNCH_SETTINGS)`.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from hvdtrain.cli.fit import check_fit
from hvdtrain.cli.settings import GroupedCommand, Set, settings_env, with_settings
from hvdtrain.errors import LaunchError
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.rank_command import split_command
from hvdtrain.launch.remote_shell import asks_about_keys
from hvdtrain.settings import replace, settings_in

Command = Annotated[list[str], typer.Argument(
    metavar="COMMAND", help="An hvdtrain command with its arguments, as in `fit JOB`; or `--` and "
    "any program, as in `-- python train.py`.")]
# The first word that is no option begins the command; its own options are left alone.
LAUNCH_SETTINGS = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


class LaunchCommand(GroupedCommand):
    """Keeps the `--` before a program, which the parser drops: it tells the two forms apart."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Double the first `--`, of which the parser takes one where it ends the options."""
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
    collective = given.get("collective", "auto")
    if ranks.is_fit:
        asked = check_fit(ranks.own_words[1:]).get("collective", "auto")
        if "auto" not in (asked, collective) and asked != collective:
            raise LaunchError(f"launch was given --collective {collective}, but the command "
                              f"--collective {asked}. Expected one of them.")
        if asked == "auto" != collective:
            ranks = ranks.with_words("--collective", collective)
        given["collective"] = collective if asked == "auto" else asked
    given["env"] = (*settings_env(ranks, settings, own=("collective",)), *given.get("env", ()))
    options = replace(LaunchOptions(command=ranks.argv), **given | {
        "verbose": given.get("verbose", False) or ranks.own_words[:1] == ("world",)})
    names = [host.name for host in read_hosts(options, os.environ)]
    facts = gather_facts(names, lambda host: asks_about_keys(host, options.remote))
    plan = make_plan(options, os.environ, facts)
    if dry_run:
        print(render(plan), end="")
        return
    if "verbose" in given:
        print(render(plan), end="", file=sys.stderr, flush=True)
    else:
        for note in plan.notes:
            print(f"hvdtrain launch: {note}", file=sys.stderr, flush=True)
    raise typer.Exit(launch(plan))

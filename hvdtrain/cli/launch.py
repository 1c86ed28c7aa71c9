"""`hvdtrain launch`, after its options are read."""

from __future__ import annotations

import os
import sys

from hvdtrain.cli.words import Launch
from hvdtrain.errors import LaunchError
from hvdtrain.hosts import Host
from hvdtrain.launch.execute import launch
from hvdtrain.launch.facts import gather_facts
from hvdtrain.launch.link import asks_about_keys
from hvdtrain.launch.options import LaunchOptions, split_command
from hvdtrain.launch.plan import make_plan, read_hosts, render
from hvdtrain.settings import replace


def run_launch(typed: Launch) -> int:
    """Plan, and start the ranks unless it is a dry run; returns the exit code."""
    ranks, given = split_command(typed.command, "hvdtrain launch"), typed.given
    collective, asked = given.get("collective", "auto"), "auto"
    if ranks.own_words[:1] == ("fit",):
        # Imported here and below: programs of others need no settings of a training.
        from hvdtrain.cli.job import check_fit
        asked = check_fit(ranks.own_words).get("collective", "auto")
    if "auto" not in (asked, collective) and asked != collective:
        raise LaunchError(f"launch was given --collective {collective}, but the command "
                          f"--collective {asked}. Expected one of them.")
    if ranks.is_fit and asked == "auto" != collective:
        ranks = ranks.with_words("--collective", collective)
    given["collective"] = collective if asked == "auto" else asked
    if typed.settings:
        from hvdtrain.cli.settings import settings_env
        given["env"] = (*settings_env(ranks, typed.settings, own=("collective",)),
                        *given.get("env", ()))
    options = replace(LaunchOptions(command=ranks.argv), **given | {
        "verbose": given.get("verbose", False) or ranks.own_words[:1] == ("world",)})
    discovery = None
    if options.elastic.is_on:
        # Imported here: few jobs need it.
        from hvdtrain.launch.discovery import discovery_of
        discovery = discovery_of(options, lambda: read_hosts(options, os.environ))
    hosts = read_hosts(options, os.environ) if discovery is None else (
        discovery.hosts or (Host("localhost", 1),))
    facts = gather_facts([host.name for host in hosts],
                         lambda host: asks_about_keys(host, options.remote))
    plan = make_plan(options, os.environ, facts, hosts)
    if typed.dry_run:
        print(render(plan), end="")
        return 0
    told = render(plan) if "verbose" in given else "".join(
        f"hvdtrain launch: {note}\n" for note in plan.notes)
    print(told, end="", file=sys.stderr, flush=True)
    return launch(plan, discovery)

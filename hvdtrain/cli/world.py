"""`hvdtrain world`: which rank this process is, and how that is known. Under any starter."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from hvdtrain.world import World, detect_world, explain


def world_command(
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON per rank.")] = False,
) -> None:
    """Show which rank this process is, of how many, and which variables say so."""
    # One write, so that the lines of several ranks do not mix.
    sys.stdout.write(render_world(detect_world(os.environ), as_json=as_json))
    sys.stdout.flush()


def render_world(world: World, *, as_json: bool) -> str:
    """The text of `hvdtrain world`; of several ranks each line says whose it is."""
    if as_json:
        return json.dumps(asdict(world)) + "\n"
    prefix = f"[rank {world.rank}/{world.size}] " if world.size > 1 else ""
    return "".join(f"{prefix}{line}\n" for line in explain(world).splitlines())

"""A launch plan as text, for `--dry-run` and `--verbose`: comments, then a shell command."""

from __future__ import annotations

import re
import shlex
from itertools import groupby

from hvdtrain.launch.plan import LaunchPlan

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_HIDDEN = "***"


def render(plan: LaunchPlan) -> str:
    """The plan in words, and the command line as it can be pasted; secret values are hidden."""
    lines = [f"# {plan.np} {'rank' if plan.np == 1 else 'ranks'}, starter {plan.starter}"]
    for host, group in groupby(plan.slots, key=lambda slot: slot.host):
        ranks = [slot.rank for slot in group]
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        shell = "kubectl" if plan.remote.kubectl else "ssh"
        where = "" if host in plan.local_hosts or plan.starter == "srun" else f", over {shell}"
        lines.append(f"# {host}: {named}{where}")
    lines += [f"# note: {note}" for note in plan.notes]
    if plan.network_interface:
        lines.append(f"# network: {', '.join(plan.network_interface)}")
    if plan.output is not None:
        lines.append(f"# logs: {plan.output}/rank.N.log")
    if plan.timeout_s is not None:
        lines.append(f"# ended after {plan.timeout_s:g} s")
    if plan.preload:
        lines.append("# the ranks of a host are forked from one process with TensorFlow loaded")
    if plan.starter == "native":
        lines.append("# each rank, with its HOROVOD_RANK, HOROVOD_SIZE, ... and a Gloo rendezvous:")
    lines.append(_command(plan))
    return "\n".join(lines) + "\n"


def _command(plan: LaunchPlan) -> str:
    settings = [f"{name}={_HIDDEN if _SECRET.search(name) else shlex.quote(value)}"
                for name, value in sorted(plan.env.items())]
    return " ".join([*(["env"] if settings else []), *settings, shlex.join(plan.argv)])

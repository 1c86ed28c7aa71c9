"""`LaunchPlan`: how the ranks will be started, as a value. `make_plan` starts nothing."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from hvdtrain.collective_names import COLLECTIVE_VARIABLE
from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.hosts import (
    Host,
    JobSlots,
    allocation_hosts,
    assign_ranks,
    in_allocation,
    in_mpijob,
    mpijob_hosts,
)
from hvdtrain.launch.facts import LaunchFacts
from hvdtrain.launch.options import LaunchOptions, given_variables
from hvdtrain.launch.starters import choose_starter, starter_named
from hvdtrain.launch.starters.base import Request, Starter
from hvdtrain.launch.tree import parents_of
from hvdtrain.preload.client import SOCKET_VARIABLE

# Set by an outer launcher; they would mislead the ranks, or their MPI.
_STALE = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_", "HOROVOD_HOSTNAME",
          "HOROVOD_GLOO_RENDEZVOUS_", "OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCAL",
          "HVDTRAIN_STARTER", "HVDTRAIN_REPORT", "HVDTRAIN_HOSTS", COLLECTIVE_VARIABLE)
_MPIJOB_START_S = 300.0  # pods start in any order, and their names resolve late
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(JobSlots):
    """What `launch` does.

    `starter` is never `auto`; with `native`, `argv` is the program of each rank, else the command
    line of the starter. `env` is added to the environment of every rank; `unset` are names, and
    beginnings of names, that ranks do not inherit. `preload` forks the ranks of a host from a
    preloaded process. `start_timeout_s` limits the wait for hosts that cannot be reached,
    `stop_signal` asks the starter for a clean end, and with `says_done` each rank reports when it
    has finished.
    """

    starter: str
    options: LaunchOptions
    argv: tuple[str, ...]
    env: Mapping[str, str]
    unset: tuple[str, ...] = _STALE
    notes: tuple[str, ...] = ()
    preload: bool = False
    local_hosts: frozenset[str] = field(default=frozenset({"localhost", "127.0.0.1"}))
    start_timeout_s: float = 0.0
    stop_signal: int = signal.SIGTERM
    says_done: bool = False


def make_plan(options: LaunchOptions, environ: Mapping[str, str], facts: LaunchFacts,
              hosts: Sequence[Host] = ()) -> LaunchPlan:
    """Decide how to start the ranks; starts nothing, and reads at most the hostfile.

    `hosts` are those of `read_hosts`, if they were read already. LaunchError says what can be
    started instead; ConfigError is for the hosts and their slots.
    """
    _refuse_nested(environ)
    if options.elastic.is_on:
        options = replace(options, starter="native")
    hosts = hosts or read_hosts(options, environ)
    total, elastic = sum(host.slots for host in hosts), options.elastic
    np = total if options.np is None else options.np
    if elastic.is_on:
        np = min(total, elastic.max_np or np)
    try:
        slots = assign_ranks(hosts, np)
    except ConfigError as error:
        if options.names_hosts or not in_allocation(environ):
            raise
        raise ConfigError(
            f"{error} These are the tasks of the Slurm allocation; ask for more with "
            "sbatch --ntasks or --ntasks-per-node, or name hosts with -H.") from error
    local = facts.local_names & {slot.host for slot in slots}
    inherited = {name: value for name, value in environ.items() if not name.startswith(_STALE)}
    request = Request(options=options, slots=slots, facts=facts, environ=inherited,
                      given=given_variables(options.env, environ))
    starter, notes = choose_starter(request)
    _refuse_with(starter, options, local)
    env = {name: value for name, value in starter.defaults(request).items()
           if name not in inherited}
    env |= {**starter.environment(request), **request.given}
    if options.collective != "auto":
        env[COLLECTIVE_VARIABLE] = options.collective
    start_timeout_s = options.start_timeout_s
    if start_timeout_s is None:
        start_timeout_s = _MPIJOB_START_S if in_mpijob(environ) else 0.0
    return LaunchPlan(
        starter=starter.name, options=options, slots=slots, argv=starter.command(request, env),
        env=env, unset=_STALE + starter.unset, notes=notes,
        preload=starter.name == "native" and (
            options.preload or elastic.is_on or SOCKET_VARIABLE in environ),
        local_hosts=local, start_timeout_s=start_timeout_s,
        stop_signal=starter.stop_signal(request), says_done=request.is_fit)


def _refuse_with(starter: Starter, options: LaunchOptions, local: Collection[str]) -> None:
    """Refuse options that the starter cannot serve, and a host with two names."""
    if len(local) > 1:
        raise LaunchError(f"{', '.join(sorted(local))} are the same host. Name it once, with all "
                          "of its slots.")
    if options.preload and starter.name != "native":
        raise LaunchError(f"--preload is of the starter native, but the starter is {starter.name}. "
                          "Leave it out, or add --starter native.")
    if options.ssh_fanout is not None and starter.name != "native":
        raise LaunchError("--ssh-fanout is of the starter native, but the starter is "
                          f"{starter.name}. Leave it out, or add --starter native.")


def read_hosts(options: LaunchOptions, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts and their slots: as named, of a Slurm job, of an MPIJob, or this host."""
    if named := options.read_hosts():
        return named
    if in_allocation(environ) and (
            options.starter == "auto" or starter_named(options.starter).reads_allocation):
        return allocation_hosts(environ)
    if in_mpijob(environ):
        return mpijob_hosts()
    if options.np is None:
        raise LaunchError("The number of ranks is not given. Expected: hvdtrain launch -np N ...")
    return (Host("localhost", max(options.np, 0)),)


def _refuse_nested(environ: Mapping[str, str]) -> None:
    """`mpirun -n 4 hvdtrain launch ...` would start the job four times."""
    for rank, size in (("HOROVOD_RANK", "HOROVOD_SIZE"), ("PMI_RANK", "PMI_SIZE"),
                       ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
                       ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")):
        if rank in environ and environ.get(size, "1") != "1":
            raise LaunchError(
                f"This process is itself one of {environ[size]} ({rank} is {environ[rank]}): each "
                "of them would start the whole job. Leave out one of the two: `hvdtrain fit ...` "
                "under the outer starter, or `hvdtrain launch -np N fit ...` alone.")


def render(plan: LaunchPlan) -> str:
    """The plan in words, and a command line that can be pasted; secret values are hidden."""
    options = plan.options
    lines = [f"# {plan.np} {'rank' if plan.np == 1 else 'ranks'}, starter {plan.starter}"]
    others = [host for host in plan.hosts if host not in plan.local_hosts]
    way = {} if options.ssh_fanout is None else parents_of(others, options.ssh_fanout)
    for host, group in groupby(plan.slots, key=lambda slot: slot.host):
        ranks = [slot.rank for slot in group]
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        by_ssh = host not in plan.local_hosts and starter_named(plan.starter).by_ssh
        by_way = f" by way of {way[host]}" if way.get(host) else ""
        lines.append(f"# {host}: {named}{', over ssh' if by_ssh else ''}{by_way}")
    lines += [f"# note: {note}" for note in plan.notes]
    if options.elastic.is_on:
        most = options.elastic.max_np or options.np
        lines.append(f"# elastic: {options.elastic.min_np or 1} to {most or 'all'} ranks")
    if options.network_interface:
        lines.append(f"# network: {', '.join(options.network_interface)}")
    if options.output is not None:
        lines.append(f"# logs: {options.output}/rank.N.log")
    if options.timeout_s is not None:
        lines.append(f"# ended after {options.timeout_s:g} s")
    if plan.preload:
        lines.append("# the ranks of a host are forked from one process with TensorFlow loaded")
    if plan.starter == "native":
        lines.append("# each rank, with its HOROVOD_RANK, HOROVOD_SIZE, ... and a Gloo rendezvous:")
    settings = [f"{name}={'***' if _SECRET.search(name) else shlex.quote(value)}"
                for name, value in sorted(plan.env.items())]
    lines.append(" ".join([*(["env"] if settings else []), *settings, shlex.join(plan.argv)]))
    return "\n".join(lines) + "\n"

"""`LaunchPlan`: how the ranks will be started, as a value. `make_plan` decides; nothing is done.

One plan starts one job on this host. It keeps the place of every rank, so that an agent per host
can be added without a change of shape.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.hosts import Host, Slot, assign_ranks, parse_hosts, read_hostfile
from hvdtrain.launch.facts import LaunchFacts
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.starters import COMMANDS, choose_starter

# Left by a launcher around this one; they would mislead the ranks, or the MPI under them.
_STALE = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_", "HOROVOD_HOSTNAME",
          "HOROVOD_GLOO_RENDEZVOUS_", "OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCAL",
          "HVDTRAIN_STARTER", "HVDTRAIN_REPORT")


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What `render` prints and `launch` does."""

    starter: str
    np: int
    slots: tuple[Slot, ...]
    argv: tuple[str, ...]
    """Native: the program of each rank. Otherwise: the whole command line of the starter."""
    env: Mapping[str, str]
    """Added to the environment of every rank."""
    unset: tuple[str, ...] = _STALE
    """Names and beginnings of names that the ranks do not inherit."""
    notes: tuple[str, ...] = ()
    output: Path | None = None
    timeout_s: float | None = None
    grace_s: float = field(default=LaunchOptions.grace_s)
    verbose: bool = False


def make_plan(options: LaunchOptions, environ: Mapping[str, str],
              facts: LaunchFacts) -> LaunchPlan:
    """Decide how to start the ranks. Starts nothing and reads at most the hostfile.

    Raises:
        LaunchError: It cannot be started as asked; the message says what can.
        ConfigError: The hosts cannot be read or have too few slots.
    """
    slots = _place(options, facts)
    _refuse_nested(environ)
    _refuse_allocation(options, environ)
    starter, notes = choose_starter(options, facts, len(slots))
    if options.output is not None and starter != "native":
        raise LaunchError(
            f"--output writes a log file per rank with the native starter only, but the starter "
            f"is {starter}. Leave out --output, or use --starter native.")
    user = _user_env(options, environ)
    env = _rank_env(environ, facts, slots) | user
    if starter == "mpirun" and len(slots) > facts.cores:
        # Without it ranks that wait take the core from ranks that compute: 12 times slower.
        env = {"OMPI_MCA_mpi_yield_when_idle": "1"} | env
    argv = COMMANDS[starter](options.command, len(slots), facts, tuple(sorted(user)))
    return LaunchPlan(starter=starter, np=len(slots), slots=slots, argv=argv, env=env, notes=notes,
                      output=options.output, timeout_s=options.timeout_s, grace_s=options.grace_s,
                      verbose=options.verbose)


def _place(options: LaunchOptions, facts: LaunchFacts) -> tuple[Slot, ...]:
    if options.hostfile is not None:
        hosts = read_hostfile(options.hostfile)
    elif options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.np is not None:
        hosts = (Host("localhost", max(options.np, 0)),)
    else:
        raise LaunchError("The number of ranks is not given. Expected: hvdtrain launch -np N ...")
    np = options.np if options.np is not None else sum(host.slots for host in hosts)
    slots = assign_ranks(hosts, np)
    here = {"localhost", "127.0.0.1", facts.hostname}
    elsewhere = sorted({slot.host for slot in slots} - here)
    if elsewhere:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        command = shlex.join(options.command)
        raise LaunchError(
            f"This version starts ranks on this host ({facts.hostname}) only, not on "
            f"{', '.join(elsewhere)}. On several hosts start them yourself, with one of:\n"
            f"  horovodrun --gloo -np {np} -H {listed} {command}\n"
            f"  mpirun -np {np} --host {listed} --bind-to none {command}")
    return slots


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


def _refuse_allocation(options: LaunchOptions, environ: Mapping[str, str]) -> None:
    """In a Slurm allocation of several nodes, this host alone is hardly what is meant."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "1"))
    named = options.hosts is not None or options.hostfile is not None
    if nodes != "1" and not named and options.starter == "auto":
        raise LaunchError(
            f"This is a Slurm allocation of {nodes} nodes, and this version starts ranks on one "
            "host only. Start them on all nodes with: srun --mpi=none "
            f"-n {options.np} {shlex.join(options.command)}\n"
            "Or name the host, for ranks on this one: -H localhost:N")


def _user_env(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `--env`; one without a value is passed on as it is."""
    env = {}
    for item in options.env:
        name, equals, value = item.partition("=")
        if not equals:
            if name not in environ:
                raise LaunchError(
                    f"--env {name}: the variable is not set here. Expected {name}=VALUE, or a "
                    "variable that is set.")
            value = environ[name]
        env[name] = value
    return env


def _rank_env(environ: Mapping[str, str], facts: LaunchFacts,
              slots: tuple[Slot, ...]) -> dict[str, str]:
    """What ranks want and users rarely set; a value of the user's own stays."""
    # Each rank's thread pools would take all cores.
    threads = max(1, facts.cores // max(slot.local_size for slot in slots))
    defaults = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1",
                "TF_CPP_MIN_LOG_LEVEL": "2"}
    return {name: value for name, value in defaults.items() if name not in environ}

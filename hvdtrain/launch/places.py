"""Where the ranks of a launch go: hosts as named, of a Slurm allocation, of an MPIJob, or here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.hosts import Host, Slot, assign_ranks, parse_hosts, read_hostfile
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.world.slurm import expand_counts, expand_hostlist

MPIJOB_HOSTFILE = Path("/etc/mpi/hostfile")
"""Mounted into every pod of an MPIJob by the operator."""


def read_hosts(options: LaunchOptions, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts and their slots; reads at most a hostfile.

    Raises:
        LaunchError: Neither hosts nor a number of ranks are given.
        ConfigError: The hosts cannot be read.
    """
    if options.hostfile is not None:
        return read_hostfile(options.hostfile)
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if in_allocation(environ) and options.starter in ("auto", "srun", "mpirun"):
        return allocation_hosts(environ)
    if in_mpijob(environ):
        return read_hostfile(MPIJOB_HOSTFILE)
    if options.np is None:
        raise LaunchError("The number of ranks is not given. Expected: hvdtrain launch -np N ...")
    return (Host("localhost", max(options.np, 0)),)


def place_ranks(options: LaunchOptions, environ: Mapping[str, str]) -> tuple[Slot, ...]:
    """The place of every rank.

    Raises:
        ConfigError: There are fewer slots than ranks.
    """
    hosts = read_hosts(options, environ)
    np = options.np if options.np is not None else sum(host.slots for host in hosts)
    try:
        return assign_ranks(hosts, np)
    except ConfigError as error:
        if options.hosts is None and options.hostfile is None and in_allocation(environ):
            raise ConfigError(
                f"{error} These are the tasks of the Slurm allocation; ask for more with "
                "sbatch --ntasks or --ntasks-per-node, or name hosts with -H.") from error
        raise


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether this process is in a Slurm job: a batch script or the shell of salloc."""
    return "SLURM_JOB_ID" in environ and "SLURM_JOB_NODELIST" in environ


def in_mpijob(environ: Mapping[str, str]) -> bool:
    """Whether this process is the launcher of a Kubernetes MPIJob."""
    return (environ.get("K_MPI_JOB_ROLE", "launcher") == "launcher"
            and ("K_MPI_JOB_ROLE" in environ or "KUBERNETES_SERVICE_HOST" in environ)
            and MPIJOB_HOSTFILE.exists())


def allocation_hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The nodes of the Slurm allocation with their tasks."""
    names = expand_hostlist(environ["SLURM_JOB_NODELIST"])
    counts = expand_counts(environ.get("SLURM_TASKS_PER_NODE", f"1(x{len(names)})"))
    if len(counts) != len(names):
        raise LaunchError(
            f"The Slurm allocation does not add up: SLURM_JOB_NODELIST="
            f"{environ['SLURM_JOB_NODELIST']}, SLURM_TASKS_PER_NODE="
            f"{environ['SLURM_TASKS_PER_NODE']}. Expected as many counts as nodes. Name the hosts "
            "with -H.")
    tasks = environ.get("SLURM_NTASKS", "")
    total = int(tasks) if tasks.isdecimal() else sum(counts)
    hosts, left = [], total
    for name, count in zip(names, counts, strict=True):
        used = min(count, left)
        left -= used
        if used:
            hosts.append(Host(name, used))
    return tuple(hosts)

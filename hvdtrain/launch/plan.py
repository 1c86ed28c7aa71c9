"""`LaunchPlan`: how the ranks will be started, as a value. `make_plan` decides; nothing is done."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdtrain.config import COLLECTIVE_VARIABLE
from hvdtrain.errors import LaunchError
from hvdtrain.hosts import Slot
from hvdtrain.launch.commands import COMMANDS, Request, local_hosts, mpi_ssh_args
from hvdtrain.launch.facts import LaunchFacts, Mpirun
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.places import allocation_hosts, in_allocation, in_mpijob, place_ranks
from hvdtrain.launch.rank_command import is_fit
from hvdtrain.launch.remote_shell import RemoteOptions, kubectl_of
from hvdtrain.launch.starters import choose_starter
from hvdtrain.preload.client import SOCKET_VARIABLE
from hvdtrain.world.failure import REPORT_VARIABLE
from hvdtrain.world.network import NETWORK_VARIABLE

# Left by a launcher around this one; they would mislead the ranks, or the MPI under them.
_STALE = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_", "HOROVOD_HOSTNAME",
          "HOROVOD_GLOO_RENDEZVOUS_", "OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCAL",
          "HVDTRAIN_STARTER", "HVDTRAIN_REPORT", "HVDTRAIN_HOSTS", COLLECTIVE_VARIABLE)
_STALE_IN_SRUN = ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION")
_TO_ALL_HOSTS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONUNBUFFERED",
                 "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_TO_ALL_HOSTS_BEGINNINGS = ("HVDTRAIN_", "HOROVOD_", "NCCL_", "TF_", "KERAS_", "XLA_")
_ELASTIC_TIMEOUT_S = 600
"""horovodrun's own."""
_MPIJOB_START_S = 300.0
"""The pods of a job start in any order, and their names resolve late."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What `render` prints and `launch` does."""

    starter: str
    np: int
    slots: tuple[Slot, ...]
    argv: tuple[str, ...]
    """Native: the program of each rank. Otherwise: the whole command line of the starter."""
    command: tuple[str, ...] = ()
    """The program of each rank."""
    waits_for: str = ""
    """What a starter of others waits for that is not here, in words."""
    env: Mapping[str, str]
    """Added to the environment of every rank."""
    unset: tuple[str, ...] = _STALE
    """Names and beginnings of names that the ranks do not inherit."""
    notes: tuple[str, ...] = ()
    output: Path | None = None
    timeout_s: float | None = None
    grace_s: float = field(default=LaunchOptions.grace_s)
    verbose: bool = False
    preload: bool = False
    """Whether the ranks of a host are forked from a preloaded process."""
    local_hosts: frozenset[str] = frozenset({"localhost", "127.0.0.1"})
    """The hosts of the plan that are this one."""
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    network_interface: tuple[str, ...] = ()
    start_timeout_s: float = 0.0
    stop_signal: int = signal.SIGTERM
    """What asks a starter of others for a clean end of the ranks."""
    says_done: bool = False
    """Whether each rank says when it has finished."""


def make_plan(options: LaunchOptions, environ: Mapping[str, str],
              facts: LaunchFacts) -> LaunchPlan:
    """Decide how to start the ranks. Starts nothing and reads at most the hostfile.

    Raises:
        LaunchError: It cannot be started as asked; the message says what can.
        ConfigError: The hosts cannot be read or have too few slots.
    """
    _refuse_nested(environ)
    slots = place_ranks(options, environ)
    starter, notes = choose_starter(options, facts, len(slots),
                                    in_allocation=in_allocation(environ))
    _check_places(environ, facts, starter, slots)
    if options.preload and starter != "native":
        raise LaunchError(f"--preload is of the starter native, but the starter is {starter}. "
                          "Leave it out, or add --starter native.")
    user = _user_env(options, environ)
    env = _starter_env(starter, options, environ, facts, slots) | user
    if options.collective != "auto":
        env[COLLECTIVE_VARIABLE] = options.collective
    request = Request(options=options, slots=slots, facts=facts, exported=tuple(sorted(user)),
                      rsh_agent=environ.get("OMPI_MCA_plm_rsh_agent"))
    if request.has_other_hosts:
        env = env | (_mpirun_elsewhere_env(options, facts) if starter == "mpirun" else {})
        # The home folder of this host is not that of another, unless it was asked for.
        names = {*env, *_inherited(environ)} - ({"HOME"} - {*user})
        request = replace(request, exported=tuple(sorted(names)))
    return LaunchPlan(
        starter=starter, np=len(slots), slots=slots, argv=COMMANDS[starter](request), env=env,
        command=options.command, waits_for=_waits_for(starter, options),
        unset=_STALE + (_STALE_IN_SRUN if starter == "srun" else ()), notes=notes,
        output=options.output, timeout_s=options.timeout_s, grace_s=options.grace_s,
        verbose=options.verbose,
        preload=starter == "native" and (options.preload or SOCKET_VARIABLE in environ),
        local_hosts=local_hosts(facts) & {slot.host for slot in slots},
        remote=replace(options.remote, kubectl=kubectl_of(environ)),
        network_interface=options.network_interface,
        start_timeout_s=_start_timeout_s(options, environ),
        stop_signal=_stop_signal(starter, options.command, facts),
        says_done=is_fit(options.command))


def _waits_for(starter: str, options: LaunchOptions) -> str:
    if starter != "horovodrun" or not options.elastic.flags() or options.network_interface:
        return ""
    limit_s = options.elastic.elastic_timeout_s or _ELASTIC_TIMEOUT_S
    return ("horovodrun, which with elastic options and without --network-interface waits for a "
            f"second host, up to {limit_s} s; on one host give --network-interface lo")


def _stop_signal(starter: str, command: tuple[str, ...], facts: LaunchFacts) -> int:
    """For srun and Open MPI's mpirun, which kill ranks at SIGTERM, SIGUSR1, which they pass on."""
    passes_on = starter == "srun" or (
        starter == "mpirun" and facts.mpirun is not None and facts.mpirun.flavour == "openmpi")
    return signal.SIGUSR1 if passes_on and is_fit(command) else signal.SIGTERM


def _start_timeout_s(options: LaunchOptions, environ: Mapping[str, str]) -> float:
    if options.start_timeout_s is not None:
        return options.start_timeout_s
    return _MPIJOB_START_S if in_mpijob(environ) else 0.0


def _check_places(environ: Mapping[str, str], facts: LaunchFacts, starter: str,
                  slots: tuple[Slot, ...]) -> None:
    """What a starter cannot do with the hosts that were asked for."""
    local = local_hosts(facts)
    if len({slot.host for slot in slots} & local) > 1:
        named = ", ".join(sorted({slot.host for slot in slots} & local))
        raise LaunchError(f"{named} are the same host. Name it once, with all of its slots.")
    if starter == "srun":
        nodes = {host.name for host in allocation_hosts(environ)}
        others = sorted({slot.host for slot in slots} - nodes)
        if others:
            raise LaunchError(f"{', '.join(others)} is not a node of this Slurm job. Expected: "
                              f"{', '.join(sorted(nodes))}.")


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


def _inherited(environ: Mapping[str, str]) -> set[str]:
    """What mpirun would not hand on to other hosts by itself, and ranks need there."""
    return {name for name in environ if not name.startswith(_STALE)
            and (name in _TO_ALL_HOSTS or name.startswith(_TO_ALL_HOSTS_BEGINNINGS))}


def _starter_env(starter: str, options: LaunchOptions, environ: Mapping[str, str],
                 facts: LaunchFacts, slots: tuple[Slot, ...]) -> dict[str, str]:
    """What ranks want and users rarely set; a value of the user's own stays."""
    most = max(slot.local_size for slot in slots)
    # Each rank's thread pools would take all cores. Under srun the node's own cores count.
    defaults = {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if starter != "srun" or "SLURM_CPUS_PER_TASK" in environ:
        cores = int(environ.get("SLURM_CPUS_PER_TASK", 0)) if starter == "srun" else 0
        defaults["OMP_NUM_THREADS"] = str(cores or max(1, facts.cores // most))
    if facts.home and (starter == "mpirun" or options.collective == "horovod-mpi"):
        defaults["HOME"] = facts.home  # without it Open MPI 5 does not start
    if starter == "mpirun" and most > facts.cores:
        # Without it ranks that wait take the core from ranks that compute: 12 times slower.
        defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if starter == "srun" and options.network_interface:
        defaults[NETWORK_VARIABLE] = ",".join(options.network_interface)
    if starter == "srun" and "SLURM_CPUS_PER_TASK" in environ:
        # Since Slurm 22.05 a step does not take this from its job.
        defaults["SRUN_CPUS_PER_TASK"] = environ["SLURM_CPUS_PER_TASK"]
    defaults = {name: value for name, value in defaults.items() if name not in environ}
    if starter == "horovodrun" and options.collective == "horovod-mpi" and facts.mpirun:
        return defaults | _horovodrun_mpi_env(options, environ, facts, facts.mpirun)
    return defaults


def _mpirun_elsewhere_env(options: LaunchOptions, facts: LaunchFacts) -> dict[str, str]:
    """What ranks on other hosts would miss; and MPICH's way to give options to ssh."""
    env = {REPORT_VARIABLE: "1"}
    if facts.mpirun is not None and facts.mpirun.flavour == "mpich":
        env["HYDRA_LAUNCHER_EXTRA_ARGS"] = mpi_ssh_args(options.remote, facts)
    return env


def _horovodrun_mpi_env(options: LaunchOptions, environ: Mapping[str, str], facts: LaunchFacts,
                        mpirun: Mpirun) -> dict[str, str]:
    """It looks for mpirun on PATH only, and knows the ssh options of old Open MPI only."""
    args = "PRTE_MCA_plm_ssh_args" if mpirun.major >= 5 else "OMPI_MCA_plm_rsh_args"
    return {"PATH": f"{Path(mpirun.path).parent}:{environ.get('PATH', '/usr/bin:/bin')}",
            args: mpi_ssh_args(options.remote, facts)}

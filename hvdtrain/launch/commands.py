"""The command lines of the starters: one function each, from values to an argument list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import LaunchError
from hvdtrain.hosts import Slot
from hvdtrain.launch.facts import LaunchFacts, Mpirun
from hvdtrain.launch.options import LaunchOptions
from hvdtrain.launch.remote_shell import RemoteOptions, without_questions
from hvdtrain.launch.starters import NEEDS_MPI, need_mpirun


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a starter's command line is made from."""

    options: LaunchOptions
    slots: tuple[Slot, ...]
    facts: LaunchFacts
    exported: tuple[str, ...]
    """Names of the variables that every rank must get."""
    rsh_agent: str | None = None
    """A program in place of ssh, as early MPI operators for Kubernetes have one."""

    @property
    def hosts(self) -> dict[str, int]:
        """The hosts with their numbers of ranks, in order."""
        return {slot.host: slot.local_size for slot in self.slots}

    @property
    def host_list(self) -> str:
        """`HOST:SLOTS,...`."""
        return ",".join(f"{host}:{count}" for host, count in self.hosts.items())

    @property
    def has_other_hosts(self) -> bool:
        """Whether ranks run elsewhere."""
        return not set(self.hosts) <= local_hosts(self.facts)


def local_hosts(facts: LaunchFacts) -> frozenset[str]:
    """The names of this host."""
    return frozenset({"localhost", "127.0.0.1", facts.hostname}) | facts.own_names


def _native(request: Request) -> tuple[str, ...]:
    return request.options.command


def _srun(request: Request) -> tuple[str, ...]:
    options = request.options
    line = [request.facts.srun or "srun", f"--mpi={_srun_mpi(request)}",
            "--kill-on-bad-exit=0", "--wait=30", "--export=ALL", "--label",
            "--cpu-bind=none", f"--ntasks={len(request.slots)}"]
    if options.np is not None or options.hosts is not None or options.hostfile is not None:
        # Slurm spreads fewer tasks than it has in ways of its own.
        line += ["--distribution=arbitrary",
                 f"--nodelist={','.join(slot.host for slot in request.slots)}"]
    if options.hosts is not None or options.hostfile is not None:
        line.append("--overcommit")
    return (*line, *options.command)


def _srun_mpi(request: Request) -> str:
    if request.options.collective not in NEEDS_MPI:
        return "none"
    return "pmi2" if request.facts.horovod_mpi_kind == "mpich" else "pmix"


def _horovodrun(request: Request) -> tuple[str, ...]:
    options, facts = request.options, request.facts
    line = [str(Path(facts.scripts_dir) / "horovodrun"), "-np", str(len(request.slots))]
    if options.elastic.host_discovery_script is None:
        line += ["-H", request.host_list]
    elif options.hosts is not None or options.hostfile is not None:
        raise LaunchError("Hosts are named, and a --host-discovery-script too. Expected one of "
                          "them.")
    if options.collective == "horovod-mpi":
        line.append("--mpi")
        if facts.mpirun is not None and facts.mpirun.flavour == "openmpi":
            # Its own default has one dash, which Open MPI 5 takes for the program's name.
            line.append("--binding-args=--bind-to none --map-by slot")
    else:
        line.append("--gloo")
    if options.network_interface:
        line += ["--network-interfaces", ",".join(_names_only(options, "horovodrun"))]
    if options.remote.port is not None:
        line += ["-p", str(options.remote.port)]
    if options.remote.identity_file is not None:
        line += ["-i", _without_spaces(options.remote.identity_file, "horovodrun")]
    line += options.elastic.flags()
    return (*line, *options.command)


def _mpirun(request: Request) -> tuple[str, ...]:
    mpirun = need_mpirun(request.facts)
    if mpirun.flavour == "mpich":
        return (*_hydra(request, mpirun), *request.options.command)
    options, modern = request.options, mpirun.major >= 5
    line = [mpirun.path]
    if request.facts.is_root:
        line.append("--allow-run-as-root")
    # Two dashes throughout: Open MPI 5 does not know all options of 4 with one.
    line += ["-np", str(len(request.slots)), "--host", request.host_list, "--bind-to", "none",
             "--map-by", "slot", "--oversubscribe", "--tag-output"]
    # Naming the transports saves the second in which MPI_Init probes the others.
    line += ["--mca", "pml", "ob1", "--mca", "btl", f"self,{'sm' if modern else 'vader'},tcp"]
    if request.has_other_hosts:
        line += _openmpi_remote(options, request.facts, request.rsh_agent, modern=modern)
    for name in request.exported:
        line += ["-x", name]
    return (*line, *options.command)


def _openmpi_remote(options: LaunchOptions, facts: LaunchFacts, rsh_agent: str | None, *,
                    modern: bool) -> list[str]:
    """The parameters of Open MPI's own connections were renamed in 5.

    It ignores OMPI_MCA_plm_rsh_agent, which the operators set, and would start all ranks here.
    """
    line = []
    daemons = "--prtemca" if modern else "--mca"
    if options.network_interface:
        networks = ",".join(options.network_interface)
        line += ["--mca", "btl_tcp_if_include", networks,
                 daemons, "prte_if_include" if modern else "oob_tcp_if_include", networks]
    if rsh_agent is not None:
        return [*line, daemons, "plm_ssh_agent" if modern else "plm_rsh_agent", rsh_agent]
    return [*line, daemons, "plm_ssh_args" if modern else "plm_rsh_args",
            mpi_ssh_args(options.remote, facts)]


def mpi_ssh_args(remote: RemoteOptions, facts: LaunchFacts) -> str:
    """The options of ssh as one text, which MPIs cut at blanks."""
    words = without_questions(accept_new=not facts.strict_keys)
    if remote.port is not None:
        words += ["-p", str(remote.port)]
    if remote.identity_file is not None:
        words += ["-i", _without_spaces(remote.identity_file, "mpirun")]
    return " ".join(words)


def _hydra(request: Request, mpirun: Mpirun) -> list[str]:
    """MPICH and Intel MPI; they hand down the whole environment by themselves."""
    hosts = request.hosts
    line = [mpirun.path, "-l", "-np", str(len(request.slots))]
    if len(set(hosts.values())) == 1:
        line += ["-hosts", ",".join(hosts), "-ppn", str(next(iter(hosts.values())))]
    else:
        line += ["-hosts", request.host_list]
    line += ["-bind-to", "none"]
    if request.options.network_interface:
        line += ["-iface", _names_only(request.options, "MPICH's mpirun")[0]]
    return line


def _names_only(options: LaunchOptions, starter: str) -> tuple[str, ...]:
    networks = [item for item in options.network_interface if "/" in item]
    if networks:
        raise LaunchError(
            f"{starter} takes names of network interfaces only, not {', '.join(networks)}. Name "
            "the interface, or use --starter native.")
    return options.network_interface


def _without_spaces(path: Path, starter: str) -> str:
    """These starters cut the options of ssh at blanks, however they are quoted."""
    if any(char.isspace() or char in "'\"\\$`;&|<>()" for char in str(path)):
        raise LaunchError(
            f"{starter} cannot pass the path {str(path)!r} on to ssh, because of its blanks or "
            "quotes. Name the key in ~/.ssh/config, or use --starter native.")
    return str(path)


COMMANDS: dict[str, Callable[[Request], tuple[str, ...]]] = {
    "native": _native, "srun": _srun, "horovodrun": _horovodrun, "mpirun": _mpirun}

"""mpirun of Open MPI 4 and 5, and of every hydra (MPICH, Intel MPI)."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from hvdtrain.errors import EXIT_RUN_FAILED, LaunchError
from hvdtrain.launch.facts import LaunchFacts, Mpirun
from hvdtrain.launch.link import login_words, without_questions
from hvdtrain.launch.options import LaunchOptions, RemoteOptions
from hvdtrain.launch.starters.base import Request, Starter
from hvdtrain.world.failure import REPORT_VARIABLE

GET_MPI = "pip install 'hvdtrain[mpi]'"
_TO_ALL_HOSTS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONUNBUFFERED",
                 "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_TO_ALL_HOSTS_BEGINNINGS = ("HVDTRAIN_", "HOROVOD_", "NCCL_", "TF_", "KERAS_", "XLA_")
_GONE = r"has exited due to process rank (?P<rank>\d+) with PID \d+ on node \S+ "


class MpirunStarter(Starter):
    """For collectives whose ranks must be started by an MPI."""

    name = "mpirun"
    reads_allocation = True
    needs_home = True
    # Open MPI 4 and 5, with the job before the rank; hydra's -l.
    rank_line = re.compile(rb"\[(?:[^,\]]+,)?(?P<rank>\d+)\]"
                           rb"(?:<(?P<stream>stdout|stderr)>:)? ?(?P<text>.*)")
    # Open MPI spreads these over two lines, which are joined.
    rank_exits = (
        (r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal (?P<signal>\d+)",
         None, ""),
        (r"Process name: \[.*,(?P<rank>\d+)\] +Exit code: +(?P<code>\d+)$", None, ""),
        (f"{_GONE}exiting", EXIT_RUN_FAILED, "left early with code 0"),
        (f"{_GONE}calling", EXIT_RUN_FAILED, "called MPI_Abort"))

    def check(self, request: Request) -> list[str]:
        if request.options.collective == "horovod-gloo":
            raise LaunchError(
                "The collective horovod-gloo needs a Gloo rendezvous, which mpirun does not "
                "prepare. Use --starter native, or --collective horovod-mpi.")
        return check_mpi(request)

    def command(self, request: Request, env: Mapping[str, str]) -> tuple[str, ...]:
        mpirun = need_mpirun(request.facts)
        if mpirun.flavour == "mpich":
            return (*_hydra(request, mpirun), *request.options.command)
        modern, line = mpirun.major >= 5, [mpirun.path]
        if request.facts.is_root:
            line.append("--allow-run-as-root")
        # Two dashes throughout: Open MPI 5 does not know all options of 4 with one.
        line += ["-np", str(request.np), "--host", request.host_list, "--bind-to", "none",
                 "--map-by", "slot", "--oversubscribe", "--tag-output"]
        # Naming the transports saves the second in which MPI_Init probes the others.
        line += ["--mca", "pml", "ob1", "--mca", "btl", f"self,{'sm' if modern else 'vader'},tcp"]
        if request.has_other_hosts:
            line += _openmpi_remote(request, modern=modern)
        for name in _exported(request, env):
            line += ["-x", name]
        return (*line, *request.options.command)

    def defaults(self, request: Request) -> dict[str, str]:
        found = super().defaults(request)
        if max(request.hosts.values()) > request.facts.cores:
            # Without it ranks that wait take the core from ranks that compute: 12 times slower.
            found["OMPI_MCA_mpi_yield_when_idle"] = "1"
        return found

    def environment(self, request: Request) -> dict[str, str]:
        """What ranks on other hosts would lack; and MPICH's options for ssh."""
        if not request.has_other_hosts:
            return {}
        found = {REPORT_VARIABLE: "1"}
        if need_mpirun(request.facts).flavour == "mpich":
            found["HYDRA_LAUNCHER_EXTRA_ARGS"] = ssh_args(request.options.remote, request.facts)
        return found

    def stop_signal(self, request: Request) -> signal.Signals:
        """Open MPI's mpirun kills ranks at SIGTERM, and passes SIGUSR1 on."""
        passes_on = need_mpirun(request.facts).flavour == "openmpi"
        return signal.SIGUSR1 if passes_on and request.is_fit else signal.SIGTERM


def need_mpirun(facts: LaunchFacts) -> Mpirun:
    """The mpirun of this machine, or LaunchError."""
    if facts.mpirun is None:
        raise LaunchError(f"No mpirun can be used: {no_mpirun(facts)}. Install one with: "
                          f"{GET_MPI}, or use --starter native.")
    return facts.mpirun


def no_mpirun(facts: LaunchFacts) -> str:
    """Why there is none."""
    return facts.mpirun_problem or f"there is no mpirun in {facts.scripts_dir} nor on PATH"


def check_mpi(request: Request) -> list[str]:
    """Check the MPI: under the mpirun of another one, each rank would silently train alone."""
    mpirun, facts = need_mpirun(request.facts), request.facts
    kind = facts.horovod_mpi_kind
    if request.options.collective == "horovod-mpi":
        if not facts.horovod_ok or kind is None:
            problem = facts.horovod_problem or "this Horovod was built without MPI"
            raise LaunchError(f"The collective horovod-mpi was asked for, but: {problem}. Build it "
                              "with: hvdtrain build-horovod --mpi auto --install --force")
        if kind != mpirun.flavour:
            raise LaunchError(
                f"Horovod was built with {kind}, but {mpirun.path} is {mpirun.flavour} "
                f"{mpirun.version}: each rank would train alone. Put the mpirun of {kind} first "
                "on PATH, or use --collective horovod-gloo.")
    elif facts.horovod_ok and kind not in (None, mpirun.flavour):
        asked = request.options.collective
        used = "mpi4py" if asked == "auto" else asked
        return [f"{used} is used: Horovod was built with {kind}, but {mpirun.path} is "
                f"{mpirun.flavour}"]
    return []


def ssh_args(remote: RemoteOptions, facts: LaunchFacts) -> str:
    """The options of ssh as one text, which MPIs split at spaces."""
    return " ".join([*without_questions(accept_new=not facts.strict_keys),
                     *plain_login_words(remote, "mpirun")])


def interface_names(options: LaunchOptions, starter: str) -> tuple[str, ...]:
    """The network interfaces, for a starter that takes no networks."""
    networks = [item for item in options.network_interface if "/" in item]
    if networks:
        raise LaunchError(
            f"{starter} takes names of network interfaces only, not {', '.join(networks)}. Name "
            "the interface, or use --starter native.")
    return options.network_interface


def plain_login_words(remote: RemoteOptions, starter: str) -> list[str]:
    """As `login_words`, for starters that split the options of ssh at spaces, however quoted."""
    path = str(remote.identity_file or "")
    if re.search(r"""[\s'"\\$`;&|<>()]""", path):
        raise LaunchError(
            f"{starter} cannot pass the path {path!r} on to ssh, because of its blanks or "
            "quotes. Name the key in ~/.ssh/config, or use --starter native.")
    return login_words(remote)


def _exported(request: Request, env: Mapping[str, str]) -> list[str]:
    """Names of variables; for other hosts also those that mpirun would not pass on itself."""
    if not request.has_other_hosts:
        return sorted(request.given)
    inherited = {name for name in request.environ
                 if name in _TO_ALL_HOSTS or name.startswith(_TO_ALL_HOSTS_BEGINNINGS)}
    # The home folder of this host is not that of another, unless it was asked for.
    return sorted({*env, *inherited} - ({"HOME"} - {*request.given}))


def _openmpi_remote(request: Request, *, modern: bool) -> list[str]:
    """Open MPI 5 renamed the parameters of its own connections.

    It ignores OMPI_MCA_plm_rsh_agent (a program in place of ssh), and would start all ranks here.
    """
    line, options = list[str](), request.options
    daemons = "--prtemca" if modern else "--mca"
    if options.network_interface:
        networks = ",".join(options.network_interface)
        line += ["--mca", "btl_tcp_if_include", networks,
                 daemons, "prte_if_include" if modern else "oob_tcp_if_include", networks]
    shell, agent = "ssh" if modern else "rsh", request.environ.get("OMPI_MCA_plm_rsh_agent")
    if agent is not None:
        return [*line, daemons, f"plm_{shell}_agent", agent]
    return [*line, daemons, f"plm_{shell}_args", ssh_args(options.remote, request.facts)]


def _hydra(request: Request, mpirun: Mpirun) -> list[str]:
    """For MPICH and Intel MPI, which pass on the whole environment themselves."""
    hosts, alike = request.hosts, len(set(request.hosts.values())) == 1
    placed = [",".join(hosts), "-ppn", str(max(hosts.values()))] if alike else [request.host_list]
    line = [mpirun.path, "-l", "-np", str(request.np), "-hosts", *placed, "-bind-to", "none"]
    if request.options.network_interface:
        line += ["-iface", interface_names(request.options, "MPICH's mpirun")[0]]
    return line


STARTER = MpirunStarter()

"""Slurm's srun, inside a job."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from hvdtrain.errors import LaunchError
from hvdtrain.hosts import allocation_hosts, in_allocation
from hvdtrain.launch.starters.base import MPI_COLLECTIVES, Request, Starter
from hvdtrain.world.network import NETWORK_VARIABLE

_ERROR = r"srun: error: \S+: tasks? (?P<rank>\d+)\S*: "
_CPUS = "SLURM_CPUS_PER_TASK"


class Srun(Starter):
    """It knows the hosts, passes on the environment, and labels the lines.

    The launcher ends a failed job, after the cause and the others had time to fail: srun's own
    --kill-on-bad-exit would also kill ranks that stop on request, one after the other.
    """

    name = "srun"
    by_ssh = False
    reads_allocation = True
    rank_line = re.compile(rb" *(?P<rank>\d+): (?P<text>.*)")
    rank_exits = (
        (rf"{_ERROR}Exited with exit code (?P<code>\d+)$", None, ""),
        (f"{_ERROR}Killed", -signal.SIGKILL, ""),
        (f"{_ERROR}Aborted", -signal.SIGABRT, ""),
        (f"{_ERROR}Segmentation fault", -signal.SIGSEGV, ""))
    patience_s = (1.0, 3.0)
    unset = ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION")

    def check(self, request: Request) -> list[str]:
        if request.facts.srun is None:
            raise LaunchError("There is no srun on PATH. Use --starter native, or start this "
                              "inside of a Slurm job.")
        if not in_allocation(request.environ):
            raise LaunchError(
                "The starter srun starts ranks inside of a Slurm allocation, but SLURM_JOB_ID is "
                "not set. Get one with sbatch or salloc; `hvdtrain slurm` writes the batch script.")
        nodes = {host.name for host in allocation_hosts(request.environ)}
        others = sorted(set(request.hosts) - nodes)
        if others:
            raise LaunchError(f"{', '.join(others)} is not a node of this Slurm job. Expected: "
                              f"{', '.join(sorted(nodes))}.")
        return []

    def command(self, request: Request, env: Mapping[str, str]) -> tuple[str, ...]:
        options, mpi = request.options, "none"
        if options.collective in MPI_COLLECTIVES:
            mpi = "pmi2" if request.facts.horovod_mpi_kind == "mpich" else "pmix"
        line = [request.facts.srun or "srun", f"--mpi={mpi}", "--kill-on-bad-exit=0", "--wait=30",
                "--export=ALL", "--label", "--cpu-bind=none", f"--ntasks={request.np}"]
        if options.np is not None or options.names_hosts:
            # Slurm places fewer tasks than it has in its own way.
            line += ["--distribution=arbitrary",
                     f"--nodelist={','.join(slot.host for slot in request.slots)}"]
        if options.names_hosts:
            line.append("--overcommit")
        return (*line, *options.command)

    def defaults(self, request: Request) -> dict[str, str]:
        """The cores of the nodes count, not those of this host."""
        found, cpus = super().defaults(request), request.environ.get(_CPUS)
        if cpus is None:
            del found["OMP_NUM_THREADS"]
        else:
            # Since Slurm 22.05 a step does not take this from its job.
            found["SRUN_CPUS_PER_TASK"] = cpus
            found["OMP_NUM_THREADS"] = cpus if int(cpus) else found["OMP_NUM_THREADS"]
        if request.options.network_interface:
            found[NETWORK_VARIABLE] = ",".join(request.options.network_interface)
        return found

    def stop_signal(self, request: Request) -> signal.Signals:
        """Srun kills ranks at SIGTERM, and passes SIGUSR1 on."""
        return signal.SIGUSR1 if request.is_fit else signal.SIGTERM


STARTER = Srun()

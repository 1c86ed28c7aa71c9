"""What a starter is: the program that creates the ranks."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hvdtrain.collective_names import COLLECTIVES
from hvdtrain.errors import LaunchError
from hvdtrain.hosts import JobSlots
from hvdtrain.launch.facts import LaunchFacts
from hvdtrain.launch.options import LaunchOptions, RankCommand

MPI_COLLECTIVES = tuple(name for name, entry in COLLECTIVES.items() if entry.needs_mpi)
ONE_HOST_COLLECTIVES = tuple(name for name, entry in COLLECTIVES.items() if entry.one_host)
GET_HOROVOD = "hvdtrain build-horovod --install"


@dataclass(frozen=True, kw_only=True)
class Request(JobSlots):
    """What a starter decides from; ranks inherit `environ`, `given` are those of `--env`."""

    options: LaunchOptions
    facts: LaunchFacts
    environ: Mapping[str, str]
    given: Mapping[str, str]

    @property
    def is_fit(self) -> bool:
        """Whether the ranks train, and so stop on request."""
        return RankCommand(words=self.options.command).is_fit

    @property
    def has_other_hosts(self) -> bool:
        """Whether ranks run elsewhere."""
        return not set(self.hosts) <= self.facts.local_names


@dataclass(frozen=True)
class RankExit:
    """The end of a rank as a starter reports it; the code is as in `subprocess`."""

    rank: int
    code: int
    reason: str = ""


class Starter:
    """One way to create the ranks.

    Attributes:
        name: As in `--starter`, and the name of the module.
        rank_line: Matches a line of a rank as the starter marks it: groups `rank`, `text`,
            `stream`.
        rank_exits: How the starter reports the end of a rank: pattern with the group `rank`, exit
            code (None: in the group `code` or `signal`), and how it ended in words.
        patience_s: Floats, how long the starter may take to end a job of which a rank has failed,
            and the same while every failure seen is only that another rank is gone.
        unset: Variables of this process that the ranks must not inherit.
        by_ssh: Other hosts are reached by ssh, so that their names must be known here.
        reads_allocation: In a Slurm job its hosts are the job's.
        needs_home: It does not start without HOME.
        hides_environment: It puts the values of variables on no command line.
    """

    name: ClassVar[str]
    rank_line: ClassVar[re.Pattern[bytes]]
    rank_exits: ClassVar[tuple[tuple[str, int | None, str], ...]] = ()
    patience_s: ClassVar[tuple[float, float]] = (10.0, 10.0)
    unset: ClassVar[tuple[str, ...]] = ()
    by_ssh: ClassVar[bool] = True
    reads_allocation: ClassVar[bool] = False
    needs_home: ClassVar[bool] = False
    hides_environment: ClassVar[bool] = True

    def check(self, request: Request) -> list[str]:
        """What the user should know of this starter here.

        Raises:
            LaunchError: It cannot be used; the message says what can.
        """
        return []

    def command(self, request: Request, env: Mapping[str, str]) -> tuple[str, ...]:
        """The whole command line; `env` is added to the environment of every rank."""
        raise NotImplementedError

    def defaults(self, request: Request) -> dict[str, str]:
        """Variables for the ranks that users rarely set; one that is set stays."""
        # Each rank's thread pools would take all cores.
        most = max(request.hosts.values())
        found = {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
                 "OMP_NUM_THREADS": str(max(1, request.facts.cores // most))}
        needs_home = self.needs_home or request.options.collective == "horovod-mpi"
        if request.facts.home and needs_home:  # without it Open MPI 5 does not start
            found["HOME"] = request.facts.home
        return found

    def environment(self, request: Request) -> dict[str, str]:
        """Variables that configure the starter itself."""
        return {}

    def stop_signal(self, request: Request) -> signal.Signals:
        """The signal that asks for a clean end of the ranks."""
        return signal.SIGTERM

    def refuse_mpi(self, request: Request) -> None:
        """LaunchError for a collective whose ranks must be started by an MPI."""
        if request.options.collective in MPI_COLLECTIVES:
            raise LaunchError(
                f"The collective {request.options.collective} needs ranks that an MPI has started, "
                f"but the starter is {self.name}. Use --starter mpirun, or --collective "
                "horovod-gloo.")

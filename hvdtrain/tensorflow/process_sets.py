"""Process sets: ranks that run collectives together, apart from the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hvdtrain.errors import ConfigError
from hvdtrain.tensorflow import current


class ProcessSet:
    """Some of the ranks, for functions with an argument `process_set`.

    Args:
        ranks_or_comm: Iterable of distinct ranks, counted among all.

    Attributes:
        ranks: List of integers, ascending.
        process_set_id: Integer, Horovod's number of it; None before `init` or `add_process_set`.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None
    _all: list[ProcessSet] = []  # noqa: RUF012 - of the class

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ConfigError(
                "A ProcessSet is made of a list of ranks. Received: a "
                f"{type(ranks_or_comm).__name__}. Write hvd.ProcessSet([0, 1]) in place of an MPI "
                "communicator.")
        members = list(ranks_or_comm)
        if any(not isinstance(member, int) for member in members) or (
                len(set(members)) != len(members)):
            raise ConfigError(f"A ProcessSet is made of distinct ranks. Received: {members}")
        self.ranks = sorted(members)

    def made(self, number: int, ranks: list[int]) -> None:
        """Note that Horovod has it, under this number."""
        self.process_set_id, self.ranks = number, ranks
        ProcessSet._all.append(self)

    def check(self, *, member: bool = False) -> None:
        """Refuse a set that Horovod does not have; with `member`, a rank that is not in it."""
        own = current.rank()  # refuses before `init`
        if self.process_set_id == 0:
            self.ranks = list(range(current.size()))
        if self.process_set_id is None:
            raise ConfigError(
                f"{self} is not known to Horovod. Give it to hvd.init(process_sets=[...]); or call "
                "hvd.init(process_sets=\"dynamic\") and then hvd.add_process_set.")
        if member and not self.included():
            raise ConfigError(f"Rank {own} is not in the process set {self.ranks}, whose ranks "
                              "only may call this. Ask process_set.included() before.")

    def size(self) -> int | None:
        """The number of its ranks; None where Horovod does not have it."""
        if self.process_set_id is None:
            return None
        self.check()
        return len(self.ranks or [])

    def rank(self) -> int | None:
        """The number of this process among its ranks; None where Horovod does not have it."""
        if self.process_set_id is None:
            return None
        self.check(member=True)
        return (self.ranks or []).index(current.rank())

    def included(self) -> bool | None:
        """Whether this process is one of its ranks."""
        if self.process_set_id == 0:
            self.check()
        return None if self.ranks is None else current.rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    @classmethod
    def is_known(cls, number: int) -> bool:
        """Whether Horovod has a set with this number."""
        return number == 0 or any(one.process_set_id == number for one in cls._all)

    @classmethod
    def forget_all(cls) -> None:
        """After `shutdown`, Horovod has none; that of all ranks stays."""
        for one in cls._all:
            if one is not global_process_set:
                one.process_set_id = None
        cls._all.clear()


global_process_set = ProcessSet([])
"""All ranks."""
global_process_set.process_set_id = 0


def checked_sets(wanted: Sequence[Any], size: int) -> list[ProcessSet]:
    """Process sets that are possible among so many ranks, or ConfigError."""
    seen = [list(range(size))]
    for one in wanted:
        if not isinstance(one, ProcessSet):
            raise ConfigError(f"Expected a ProcessSet. Received: {one!r}. Write "
                              "hvd.ProcessSet([0, 1]).")
        if not one.ranks or not set(one.ranks) <= set(seen[0]):
            raise ConfigError(f"A process set needs ranks from 0 to {size - 1}. Received: {one}")
        if one.ranks in seen:
            raise ConfigError(f"The process set {one.ranks} is a duplicate"
                              f"{' of that of all ranks' if one.ranks == seen[0] else ''}.")
        seen.append(one.ranks)
    return list(wanted)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set of ranks, after `hvd.init(process_sets="dynamic")`. All ranks.

    Raises:
        ConfigError: Horovod has a set of these ranks, or they are not possible.
        CollectiveError: Horovod was started without dynamic process sets.
    """
    one = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    checked_sets([one], current.size())
    members = one.ranks or []
    if current.several().process_set_id(members, add=False) is not None:
        raise ConfigError(f"Horovod has a process set of the ranks {members} already: use that.")
    number = current.several().process_set_id(members)
    one.made(number or 0, members)
    return one


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set of ranks. All ranks. Returns whether it was removed; that of all stays."""
    if not process_set.process_set_id:
        return False
    process_set.process_set_id = None
    return current.several().remove_process_set(process_set.ranks or [])

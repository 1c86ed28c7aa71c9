"""Which ranks an elastic job has next: decisions, as pure functions of what is known.

Slots are barred before hosts: a slot whose rank has failed again within `_CALM_S` is left out, for
a time that doubles with each failure and ends. A host is left out when its agent or the connection
to it was lost again, or its start has failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hvdtrain.hosts import Host

_CALM_S = 60.0
_FIRST_BAR_S, _LONGEST_BAR_S = 10.0, 600.0
_FAILURES_OF_A_PLACE = 2


@dataclass(kw_only=True)
class Bar:
    """The failures of one slot or host, by a clock in seconds."""

    failures: int = 0
    last_s: float = float("-inf")
    until_s: float = float("-inf")

    def fail(self, now_s: float, *, first_counts: bool = False) -> float:
        """Note a failure; returns for how long it is barred from now, 0 for a first one."""
        self.failures = self.failures + 1 if now_s - self.last_s < _CALM_S + self._bar_s else 1
        self.last_s = now_s
        bar_s = self._bar_s if self.failures > 1 or first_counts else 0.0
        self.until_s = now_s + bar_s
        return bar_s

    @property
    def _bar_s(self) -> float:
        return min(_FIRST_BAR_S * 2.0 ** max(self.failures - 2, 0), _LONGEST_BAR_S)


@dataclass(kw_only=True)
class Bars:
    """The failures of hosts, and of their slots (host, local rank)."""

    hosts: dict[str, Bar] = field(default_factory=dict)
    slots: dict[tuple[str, int], Bar] = field(default_factory=dict)

    def free(self, host: Host, now_s: float, *, all_slots: bool = False) -> int:
        """How many ranks a host may take now; `all_slots`: with those that are barred."""
        bar = self.hosts.get(host.name)
        if bar is not None and bar.until_s > now_s:
            return 0
        if all_slots:
            return host.slots
        barred = [(place, one.failures) for (name, place), one in self.slots.items()
                  if name == host.name and place < host.slots and one.until_s > now_s]
        # Which GPU a rank takes follows from its place among those of its host: with one rank
        # less it may take the same again. If that fails too, only places before it are left.
        again = [place for place, failures in barred if failures > _FAILURES_OF_A_PLACE]
        return min([host.slots - len(barred), *again])


@dataclass(kw_only=True)
class Timeline:
    """The worlds that were, to tell commits of the training that went on from abandoned ones.

    A host that is lost with the newest commit may come back after others have gone on from an
    earlier one: what it has is then of a training whose files were written anew.
    """

    began: list[int] = field(default_factory=list)  # the step from which each world began
    last: dict[str, int] = field(default_factory=dict)  # by host, its last world, from 1

    def begin(self, hosts: Iterable[Host], step: int) -> None:
        """A world begins on these hosts from a commit after so many steps, 0 for none."""
        self.began.append(step)
        self.last.update({host.name: len(self.began) for host in hosts})

    def has(self, host: str, commit: int) -> bool:
        """Whether the commit that a host brings is of the training that went on."""
        return all(step >= commit for step in self.began[self.last.get(host, 0):])


def next_world(hosts: Sequence[Host], commits: Mapping[str, int], former: Iterable[str], *,
               least: int, most: int | None) -> tuple[Host, ...]:
    """The hosts of the next world with their ranks; empty if there are too few.

    Args:
        hosts: Hosts that can start ranks, with the number of ranks that each may take.
        commits: The newest commit on each host, 0 for none.
        former: Names of the hosts of the former world, in order.
        least: Integer, the fewest ranks.
        most: Integer, the most ranks, or None.

    A host with the newest commit is the first, and so has rank 0, which loads it; without one there
    is no world. Hosts of the
    former world keep their order and come before new ones.
    """
    newest, order = max(commits.values(), default=0), list(former)
    places = {host.name: number for number, host in enumerate(hosts)}
    chosen = sorted((host for host in hosts if host.slots > 0), key=lambda host: (
        commits.get(host.name, 0) < newest,
        order.index(host.name) if host.name in order else len(order) + places[host.name]))
    left, found = most if most is not None else sum(host.slots for host in chosen), []
    for host in chosen:
        used = min(host.slots, left)
        left -= used
        if used:
            found.append(Host(host.name, used))
    has_newest = not newest or any(commits.get(host.name) == newest for host in found)
    return tuple(found) if has_newest and sum(host.slots for host in found) >= least else ()


def change_text(before: Sequence[Host], after: Sequence[Host]) -> str:
    """What has changed between two worlds, in words."""
    was, now = ({host.name: host.slots for host in world} for world in (before, after))
    parts = [f"+{name}:{count}" for name, count in now.items() if name not in was]
    parts += [f"-{name}:{count}" for name, count in was.items() if name not in now]
    parts += [f"{name}:{was[name]} to {name}:{count}" for name, count in now.items()
              if name in was and was[name] != count]
    return ", ".join(parts) or "the same hosts"

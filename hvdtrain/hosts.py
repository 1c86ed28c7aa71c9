"""Hosts and slots: hostfile dialects, `-H a:4,b:4`, and which rank goes where."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import ConfigError

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"({_NAME})(?::(\d+))?")
_FIELD = re.compile(r"([A-Za-z_-]+)=(\S*)")
# What Open MPI and MPICH allow beside slots; it does not change which rank goes where.
_IGNORED_FIELDS = ("max_slots", "max-slots", "binding", "ifname", "user", "port")


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks it takes."""

    name: str
    slots: int


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one rank."""

    rank: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def rank_variables(slot: Slot, size: int) -> dict[str, str]:
    """The variables that tell a rank its place, named as Horovod names them."""
    return {"HOROVOD_RANK": str(slot.rank), "HOROVOD_SIZE": str(size),
            "HOROVOD_LOCAL_RANK": str(slot.local_rank),
            "HOROVOD_LOCAL_SIZE": str(slot.local_size),
            "HOROVOD_CROSS_RANK": str(slot.cross_rank),
            "HOROVOD_CROSS_SIZE": str(slot.cross_size), "HOROVOD_HOSTNAME": slot.host}


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read the value of `-H`: `a:4,b:4`; a bare name has one slot.

    Raises:
        ConfigError: A part is not `HOST` or `HOST:SLOTS`.
    """
    hosts = []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        if match is None or int(match[2] or 1) < 1:
            raise ConfigError(
                f"Cannot read {part.strip()!r} in the host list {text!r}. Expected "
                "HOST:SLOTS,HOST:SLOTS with at least one slot each, e.g. node1:4,node2:4.")
        hosts.append(Host(match[1], int(match[2] or 1)))
    return _merge(hosts)


def parse_hostfile(text: str, source: str) -> tuple[Host, ...]:
    """Read a hostfile in the dialect of Open MPI or of MPICH.

    `host slots=4 max_slots=8`, `host:4`, and `host` alone (one slot; lines that repeat a host add
    up). `#` starts a comment; blank lines are skipped.

    Args:
        text: String, the content.
        source: String, the name of the file, for errors.

    Raises:
        ConfigError: A line cannot be read, or there is no host.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if content:
            hosts.append(_parse_line(content, f"{source}, line {number}"))
    if not hosts:
        raise ConfigError(f"{source} names no host. Expected lines like: node1 slots=4")
    return _merge(hosts)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a hostfile from disk.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return parse_hostfile(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the hostfile {path}: {error}.") from error


def assign_ranks(hosts: Sequence[Host], np: int) -> tuple[Slot, ...]:
    """Give the ranks 0 to `np` - 1 to the slots, host after host.

    Raises:
        ConfigError: `np` is not positive, or there are fewer slots.
    """
    if np < 1:
        raise ConfigError(f"The number of ranks is {np}. Expected at least 1.")
    total = sum(host.slots for host in hosts)
    if np > total:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ConfigError(
            f"{np} ranks were asked for (-np {np}), but {listed} has {total} slots in all. "
            f"Ask for at most {total}, or give more slots or hosts.")
    used, left = [], np
    for host in hosts:
        count = min(host.slots, left)
        left -= count
        if count:
            used.append(Host(host.name, count))
    return tuple(_slots(used))


def _slots(used: Sequence[Host]) -> Iterable[Slot]:
    rank = 0
    for place, host in enumerate(used):
        for local_rank in range(host.slots):
            # As in Horovod: the cross ranks number the hosts that have this local rank.
            yield Slot(rank=rank, host=host.name, local_rank=local_rank, local_size=host.slots,
                       cross_rank=sum(other.slots > local_rank for other in used[:place]),
                       cross_size=sum(other.slots > local_rank for other in used))
            rank += 1


def _merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def _parse_line(content: str, where: str) -> Host:
    first, *fields = re.sub(r"\s*=\s*", "=", content).split()
    match = _HOST.fullmatch(first)
    if match is None:
        raise ConfigError(f"{where}: cannot read {content!r}. Expected HOST slots=N or HOST:N.")
    slots = match[2] or "1"
    for field in fields:
        pair = _FIELD.fullmatch(field)
        if pair is None or (pair[1] != "slots" and pair[1] not in _IGNORED_FIELDS):
            raise ConfigError(
                f"{where}: cannot read {field!r} in {content!r}. Expected HOST slots=N or HOST:N.")
        if pair[1] == "slots":
            slots = pair[2]
    if not slots.isdecimal() or int(slots) < 1:
        raise ConfigError(f"{where}: slots is {slots!r} in {content!r}. Expected 1 or more.")
    return Host(match[1], int(slots))

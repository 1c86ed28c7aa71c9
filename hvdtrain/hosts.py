"""Hosts and slots: `-H a:4,b:4`, hostfiles, a Slurm job, an MPIJob; and which rank goes where."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import ConfigError, LaunchError, WorldError

MPIJOB_HOSTFILE = Path("/etc/mpi/hostfile")  # mounted into every pod of an MPIJob by the operator
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"({_NAME})(?::(\d+))?")
_FIELD = re.compile(r"([A-Za-z_-]+)=(\S*)")
# What Open MPI and MPICH allow beside slots; it does not change which rank goes where.
_IGNORED_FIELDS = ("max_slots", "max-slots", "binding", "ifname", "user", "port")


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks on it."""

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


@dataclass(frozen=True, kw_only=True)
class JobSlots:
    """The places of all ranks of a job, in their order."""

    slots: tuple[Slot, ...]

    @property
    def np(self) -> int:
        """The number of ranks."""
        return len(self.slots)

    @property
    def hosts(self) -> dict[str, int]:
        """The hosts with their numbers of ranks, in order."""
        return {slot.host: slot.local_size for slot in self.slots}

    @property
    def host_list(self) -> str:
        """`HOST:SLOTS,...`."""
        return ",".join(f"{host}:{count}" for host, count in self.hosts.items())


def rank_variables(slot: Slot, size: int) -> dict[str, str]:
    """The variables that tell a rank its place, named as in Horovod."""
    places = {"RANK": slot.rank, "SIZE": size, "HOSTNAME": slot.host,
              "LOCAL_RANK": slot.local_rank, "LOCAL_SIZE": slot.local_size,
              "CROSS_RANK": slot.cross_rank, "CROSS_SIZE": slot.cross_size}
    return {f"HOROVOD_{name}": str(value) for name, value in places.items()}


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse `-H`: `a:4,b:4`; a bare name has one slot. ConfigError for other parts."""
    hosts = []
    for part in map(str.strip, text.split(",")):
        match = _HOST.fullmatch(part)
        if match is None or int(match[2] or 1) < 1:
            raise ConfigError(
                f"Cannot read {part!r} in the host list {text!r}. Expected "
                "HOST:SLOTS,HOST:SLOTS with at least one slot each, e.g. node1:4,node2:4.")
        hosts.append(Host(match[1], int(match[2] or 1)))
    return _merge(hosts)


def parse_hostfile(text: str, source: str) -> tuple[Host, ...]:
    """Parse a hostfile in the dialect of Open MPI or of MPICH.

    `host slots=4 max_slots=8`, `host:4`, and `host` alone (one slot; repeated hosts add up). `#`
    starts a comment; blank lines are skipped. `source` is its name, for errors. ConfigError where a
    line cannot be read, or there is no host.
    """
    hosts = [_parse_line(content, f"{source}, line {number}")
             for number, line in enumerate(text.splitlines(), start=1)
             if (content := line.partition("#")[0].strip())]
    if not hosts:
        raise ConfigError(f"{source} names no host. Expected lines like: node1 slots=4")
    return _merge(hosts)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a hostfile from disk; see `parse_hostfile`."""
    try:
        return parse_hostfile(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the hostfile {path}: {error}.") from error


def assign_ranks(hosts: Sequence[Host], np: int) -> tuple[Slot, ...]:
    """Assign the ranks 0 to `np` - 1 to slots, host by host; ConfigError for too few slots."""
    if np < 1:
        raise ConfigError(f"The number of ranks is {np}. Expected at least 1.")
    total = sum(host.slots for host in hosts)
    if np > total:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ConfigError(
            f"{np} ranks were asked for (-np {np}), but {listed} has {total} slots in all. "
            f"Ask for at most {total}, or give more slots or hosts.")
    used, slots = list(_first(hosts, np)), list[Slot]()
    cross_sizes = Counter(local_rank for host in used for local_rank in range(host.slots))
    before = Counter[int]()
    for host in used:
        for local_rank in range(host.slots):
            slots.append(Slot(
                rank=len(slots), host=host.name, local_rank=local_rank, local_size=host.slots,
                cross_rank=before[local_rank], cross_size=cross_sizes[local_rank]))
            before[local_rank] += 1
    return tuple(slots)


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether this process is in a Slurm job: a batch script or the shell of salloc."""
    return "SLURM_JOB_ID" in environ and "SLURM_JOB_NODELIST" in environ


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
    return tuple(_first(map(Host, names, counts), total))


def in_mpijob(environ: Mapping[str, str]) -> bool:
    """Whether this process is the launcher of a Kubernetes MPIJob."""
    return (environ.get("K_MPI_JOB_ROLE", "launcher") == "launcher"
            and ("K_MPI_JOB_ROLE" in environ or "KUBERNETES_SERVICE_HOST" in environ)
            and MPIJOB_HOSTFILE.exists())


def mpijob_hosts() -> tuple[Host, ...]:
    """The pods of the MPIJob that this process launches."""
    return read_hostfile(MPIJOB_HOSTFILE)


def _first(hosts: Iterable[Host], left: int) -> Iterable[Host]:
    for host in hosts:
        used = min(host.slots, left)
        left -= used
        if used:
            yield Host(host.name, used)


def cross_place(slots: Sequence[int], host: int, local_rank: int) -> tuple[int, int]:
    """Cross rank and size, as in Horovod: they number the hosts that have this local rank."""
    has = [count > local_rank for count in slots]
    return sum(has[:host]), sum(has)


def _merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    slots: Counter[str] = Counter()
    for host in hosts:
        slots[host.name] += host.slots
    return tuple(Host(*entry) for entry in slots.items())


def _parse_line(content: str, where: str) -> Host:
    first, *fields = re.sub(r"\s*=\s*", "=", content).split()
    match = _HOST.fullmatch(first)
    if match is None:
        raise ConfigError(f"{where}: cannot read {content!r}. Expected HOST slots=N or HOST:N.")
    said = {"slots": match[2] or "1"}
    for field in fields:
        pair = _FIELD.fullmatch(field)
        if pair is None or pair[1] not in ("slots", *_IGNORED_FIELDS):
            raise ConfigError(
                f"{where}: cannot read {field!r} in {content!r}. Expected HOST slots=N or HOST:N.")
        said[pair[1]] = pair[2]
    slots = said["slots"]
    if not slots.isdecimal() or int(slots) < 1:
        raise ConfigError(f"{where}: slots is {slots!r} in {content!r}. Expected 1 or more.")
    return Host(match[1], int(slots))


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Expand a host list as `scontrol show hostnames` does, or WorldError."""
    import hostlist
    try:
        return tuple(hostlist.expand_hostlist(text.replace(" ", ""), allow_duplicates=True))
    except hostlist.BadHostlist as error:
        raise WorldError(f"Cannot read the Slurm host list {text!r} ({error}). Expected names "
                         "such as login, gpu[1-3] or gpu[08-10,12].") from error


def expand_counts(text: str) -> tuple[int, ...]:
    """Expand counts per node, `"2(x3),1"` to `(2, 2, 2, 1)`, or WorldError."""
    import hostlist
    try:
        return tuple(hostlist.parse_slurm_tasks_per_node(text.replace(" ", "")))
    except hostlist.BadHostlist as error:
        raise WorldError(f"Cannot read the Slurm task counts {text!r} ({error}). Expected numbers "
                         "like 2(x3),1.") from error

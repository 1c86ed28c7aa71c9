"""Every run of a comparison as a value: `--dry-run` prints it, `compare` does it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.bench.engines import ENGINES
from hvdtrain.bench.jobs import changed_job, swept_values
from hvdtrain.bench.options import DEFAULT_WORKERS, PLACEMENTS, CompareOptions
from hvdtrain.errors import ConfigError
from hvdtrain.hosts import Host

USAGE_VARIABLE = "HVDTRAIN_USAGE"
"""As in `hvdtrain.runtime.usage`, which the processes of a job load."""
HOST_NAMES = tuple(f"host{letter}" for letter in "abcdefghijklmnop")
"""Of the virtual hosts that take ranks."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting under which all engines run."""

    axes: Mapping[str, Any] = field(default_factory=dict)
    """What distinguishes it from the others, e.g. `{"network": "100mbit", "hosts": 3}`."""
    job: str
    job_text: str | None = None
    """The content of `job` where it is to be written first."""
    workers: int
    servers: int
    rate: str | None = None
    servers_on: str = "workers"

    @property
    def label(self) -> str:
        """For titles and folders."""
        axes = self.axes or {"workers": self.workers}
        return ", ".join(f"{name} {value}" for name, value in axes.items())

    @property
    def server_hosts(self) -> tuple[int, ...]:
        """The number of the host of each server; worker i stands on host i."""
        if self.servers_on == "apart":
            return tuple(self.workers + number for number in range(self.servers))
        return tuple(number % self.workers for number in range(self.servers))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One start of one engine."""

    point: int
    """Its place in the points of the plan."""
    engine: str
    round: int
    folder: Path
    command: tuple[str, ...]
    env: Mapping[str, str]
    """Added to the environment."""
    in_network: bool
    """Whether it is started on the virtual hosts."""

    def render(self) -> str:
        """The line to type."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()),
                         shlex.join(self.command)])


@dataclass(frozen=True, kw_only=True)
class ComparePlan:
    """All of it."""

    options: CompareOptions
    threads: int
    points: tuple[Point, ...]
    runs: tuple[Run, ...]
    """In the order in which they take place: A B C A B C."""

    @property
    def hosts(self) -> int:
        """Virtual hosts for ranks; 0 without a network."""
        return _hosts_needed(self.points)

    def render(self) -> str:
        """What `--dry-run` prints."""
        lines = []
        for point in self.points:
            servers = f"{point.servers} on {point.servers_on}"
            lines.append(f"# {point.label}: {point.workers} workers; parameter servers: "
                         f"{servers if point.rate else point.servers}")
        if any(ENGINES[name].kind == "ps" for name in self.options.engines):
            lines.append("# with parameter servers rank 0 is the chief, then come the workers, "
                         "then the servers")
        return "\n".join([*lines, *(run.render() for run in self.runs)]) + "\n"


def make_plan(options: CompareOptions, *, cores: int, program: tuple[str, ...],
              environ: Mapping[str, str]) -> ComparePlan:
    """Decide every run. Starts and writes nothing; reads the job file for a sweep.

    Args:
        options: What is asked.
        cores: Integer, processors of this machine.
        program: The words that start hvdtrain.
        environ: The environment: OMP_NUM_THREADS is kept.

    Raises:
        ConfigError: The job cannot be swept as asked.
    """
    points = tuple(_points(options))
    if _hosts_needed(points) > len(HOST_NAMES):
        raise ConfigError(f"{_hosts_needed(points)} virtual hosts are asked for (--hosts, and "
                          "with --servers-on apart one for each of --ps). Expected at most "
                          f"{len(HOST_NAMES)}.")
    most = max(point.workers for point in points)
    given = environ.get("OMP_NUM_THREADS", "")
    threads = options.threads or (int(given) if given.isdecimal() and int(given) else
                                  max(1, cores // most))
    runs = []
    for number in range(1, options.rounds + 1):
        alone: set[str] = set()
        for place, point in enumerate(points):
            for engine in options.engines:
                if engine == "single" and point.job in alone:
                    continue  # nothing that differs between these points reaches one process
                if engine == "single":
                    alone.add(point.job)
                folder = options.folder / "runs" / _slug(point.label) / engine / f"round-{number}"
                runs.append(Run(
                    point=place, engine=engine, round=number, folder=folder,
                    command=_command(options, point, engine, folder, program),
                    env={USAGE_VARIABLE: str(folder / "usage"), "OMP_NUM_THREADS": str(threads)},
                    in_network=point.rate is not None and engine != "single"))
    return ComparePlan(options=options, threads=threads, points=points, runs=tuple(runs))


def _hosts_needed(points: Iterable[Point]) -> int:
    return max((max((point.workers, *(at + 1 for at in point.server_hosts)))
                for point in points if point.rate is not None), default=0)


def _points(options: CompareOptions) -> Iterable[Point]:
    """The settings: of the sweep, times those of the network."""
    for axes, job, text, servers, placement in _swept(options):
        rates: tuple[str | None, ...] = options.network or (None,)
        workers = options.hosts or (options.workers or DEFAULT_WORKERS,)
        for rate in rates:
            for count in workers:
                named = {"network": rate, "hosts": count} if rate else {}
                yield Point(axes={**named, **axes}, job=job, job_text=text, workers=count,
                            servers=servers, rate=rate, servers_on=placement)


def _swept(options: CompareOptions) -> Iterable[tuple[dict[str, Any], str, str | None, int, str]]:
    sweep = options.wanted_sweep()
    if sweep is None:
        yield {}, options.job, None, options.servers, options.servers_on
    elif sweep.kind == "roles":
        if not any(ENGINES[engine].kind == "ps" for engine in options.engines):
            raise ConfigError("--sweep roles varies the parameter servers, and --engines names "
                              "none that has some. Add ps-async or ps-sync.")
        for placement in PLACEMENTS if options.network else (options.servers_on,):
            for servers in range(1, options.servers + 1):
                where = {"servers on": placement} if options.network else {}
                yield {**where, "servers": servers}, options.job, None, servers, placement
    else:
        table, key, values = swept_values(options.job, sweep)
        for value in values:
            name = f"{options.name}-{table}.{key}-{_slug(str(value))}.toml"
            path = options.folder / "jobs" / name
            yield ({f"{table}.{key}": value}, str(path),
                   changed_job(options.job, table, key, value), options.servers,
                   options.servers_on)


def _command(options: CompareOptions, point: Point, name: str, folder: Path,
             program: tuple[str, ...]) -> tuple[str, ...]:
    """The command line of a run."""
    engine = ENGINES[name]
    # Checkpoints and event files are not what is compared.
    fit = ["fit", point.job, "--output", str(folder / "train"), "--checkpoint-every-epochs", "0",
           "--no-tensorboard"]
    for option, value in (("--epochs", options.epochs),
                          ("--batch-per-rank", options.batch_per_rank)):
        fit += [option, str(value)] if value is not None else []
    fit += engine.fit
    if engine.kind == "ps":
        fit += ["--ps", str(point.servers)]
    if engine.kind == "single":
        return (*program, *fit)
    ranks = engine.ranks(point.workers, point.servers)
    where = ["-np", str(ranks)]
    if point.rate is not None:
        hosts = ",".join(f"{host.name}:{host.slots}" for host in _hosts(point, engine.kind))
        where += ["-H", hosts]
    return (*program, "launch", *where, *engine.launch, *fit)


def _hosts(point: Point, kind: str) -> list[Host]:
    """Hosts in the order of the ranks.

    The servers come last, also where they stand on the host of a worker; that host then has a
    second name, since ranks are numbered host after host.
    """
    names = HOST_NAMES
    if kind != "ps":
        return [Host(name, 1) for name in names[:point.workers]]
    first, *others = names[:point.workers]
    found = [Host(first, 2), *(Host(name, 1) for name in others)]
    alias = "" if point.servers_on == "apart" else "-ps"
    for at in sorted(set(point.server_hosts)):
        found.append(Host(names[at] + alias, point.server_hosts.count(at)))
    return found


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-")

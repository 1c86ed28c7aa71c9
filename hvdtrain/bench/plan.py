"""Every run of a comparison as a value: `--dry-run` prints it, `compare` runs it."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from hvdtrain.bench.options import DEFAULT_WORKERS, ENGINES, CompareOptions, Placement, Sweep
from hvdtrain.bench.usage import USAGE_VARIABLE
from hvdtrain.errors import ConfigError
from hvdtrain.job import read_job_file

HOST_NAMES = tuple(f"host{letter}" for letter in "abcdefghijklmnop")  # virtual hosts with ranks
_FACTORS = (1, 2, 4)
_KEYS = {"data": ("samples",), "model": ("hidden", "width", "filters")}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting under which all engines run; without `rate` there are no virtual hosts.

    `axes` tell it from the others, e.g. `{"network": "100mbit", "hosts": 3}`; `job_text` is the
    content of `job` if that is to be written first.
    """

    axes: Mapping[str, Any] = field(default_factory=dict)
    job: str
    job_text: str | None = None
    workers: int
    servers: int
    rate: str | None = None
    servers_on: Placement = "workers"

    @property
    def label(self) -> str:
        """For titles and folders."""
        axes = self.axes or {"workers": self.workers}
        return ", ".join(f"{name} {value}" for name, value in axes.items())

    @property
    def server_hosts(self) -> tuple[int, ...]:
        """The host number of each server; worker i is on host i."""
        if self.servers_on == "apart":
            return tuple(self.workers + number for number in range(self.servers))
        return tuple(number % self.workers for number in range(self.servers))

    @property
    def hosts(self) -> int:
        """The number of virtual hosts for its ranks; 0 without a network."""
        return max(self.workers, *(at + 1 for at in self.server_hosts)) if self.rate else 0


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """One start of one engine; `point` indexes the plan's, `in_network`: on the virtual hosts."""

    point: int
    engine: str
    round: int
    folder: Path
    command: tuple[str, ...]
    env: Mapping[str, str]
    in_network: bool

    def render(self) -> str:
        """The command line."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()),
                         shlex.join(self.command)])


@dataclass(frozen=True, kw_only=True)
class ComparePlan:
    """All runs, in order: A B C A B C."""

    options: CompareOptions
    threads: int
    points: tuple[Point, ...]
    runs: tuple[EngineRun, ...]

    @property
    def hosts(self) -> int:
        """The number of virtual hosts for ranks; 0 without a network."""
        return max(point.hosts for point in self.points)

    def render(self) -> str:
        """What `--dry-run` prints."""
        lines = []
        for point in self.points:
            servers = f"{point.servers} on {point.servers_on}" if point.rate else point.servers
            lines.append(f"# {point.label}: {point.workers} workers; parameter servers: {servers}")
        if any(ENGINES[name].kind == "ps" for name in self.options.engines):
            lines.append("# with parameter servers rank 0 is the chief, then come the workers, "
                         "then the servers")
        return "\n".join([*lines, *(run.render() for run in self.runs)]) + "\n"


def make_plan(options: CompareOptions, *, cores: int, program: tuple[str, ...],
              environ: Mapping[str, str]) -> ComparePlan:
    """Decide every run; starts and writes nothing, and reads the job file for a sweep.

    `cores` are those of this machine; `program` are the words that start hvdtrain; OMP_NUM_THREADS
    of `environ` is kept.
    """
    points = tuple(_points(options))
    given = environ.get("OMP_NUM_THREADS", "")
    threads = options.threads or (int(given) if given.isdecimal() and int(given) else
                                  max(1, cores // max(point.workers for point in points)))
    first = {point.job: place for place, point in reversed(list(enumerate(points)))}
    runs = []
    for number, (place, point), engine in itertools.product(
            range(1, options.rounds + 1), enumerate(points), options.engines):
        if engine == "single" and place != first[point.job]:
            continue  # nothing that differs between these points reaches one process
        folder = options.folder / "runs" / _slug(point.label) / engine / f"round-{number}"
        runs.append(EngineRun(
            point=place, engine=engine, round=number, folder=folder,
            command=_command(options, point, engine, folder, program),
            env={USAGE_VARIABLE: str(folder / "usage"), "OMP_NUM_THREADS": str(threads)},
            in_network=point.rate is not None and engine != "single"))
    plan = ComparePlan(options=options, threads=threads, points=points, runs=tuple(runs))
    if plan.hosts > len(HOST_NAMES):
        raise ConfigError(f"{plan.hosts} virtual hosts are asked for (--hosts, and with "
                          "--servers-on apart one for each of --ps). Expected at most "
                          f"{len(HOST_NAMES)}.")
    return plan


def _points(options: CompareOptions) -> Iterator[Point]:
    rates: tuple[str | None, ...] = options.network or (None,)
    counts = options.hosts or (options.workers or DEFAULT_WORKERS,)
    common: dict[str, Any] = {"job": options.job, "servers": options.servers,
                              "servers_on": options.servers_on}
    for (axes, changes), rate, count in itertools.product(_swept(options), rates, counts):
        named = {"network": rate, "hosts": count} if rate else {}
        yield Point(workers=count, rate=rate, axes=named | axes, **common | changes)


def _swept(options: CompareOptions) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """For each value: its axes, and what it changes of a point."""
    sweep = options.wanted_sweep()
    if sweep is None:
        yield {}, {}
    elif sweep.table == "roles":
        if not any(ENGINES[engine].kind == "ps" for engine in options.engines):
            raise ConfigError("--sweep roles varies the parameter servers, and --engines names "
                              "none that has some. Add ps-async or ps-sync.")
        for placement in get_args(Placement) if options.network else (options.servers_on,):
            where = {"servers on": placement} if options.network else {}
            for servers in range(1, options.servers + 1):
                yield ({**where, "servers": servers},
                       {"servers": servers, "servers_on": placement})
    else:
        table, key, values = swept_values(options.job, sweep)
        for value in values:
            name = f"{options.name}-{table}.{key}-{_slug(str(value))}.toml"
            yield ({f"{table}.{key}": value},
                   {"job": str(options.folder / "jobs" / name),
                    "job_text": changed_job(options.job, table, key, value)})


def _command(options: CompareOptions, point: Point, name: str, folder: Path,
             program: tuple[str, ...]) -> tuple[str, ...]:
    engine = ENGINES[name]
    # Checkpoints and event files are not what is compared.
    fit = ["fit", point.job, "--output", str(folder / "train"), "--checkpoint-every-epochs", "0",
           "--no-tensorboard"]
    for option, value in (("--epochs", options.epochs),
                          ("--batch-per-rank", options.batch_per_rank)):
        fit += [option, str(value)] if value is not None else []
    fit += engine.fit
    if engine.kind == "single":
        return (*program, *fit)
    ranks = point.workers
    if engine.kind == "ps":
        fit += ["--ps", str(point.servers)]
        ranks += 1 + point.servers  # and the chief
    where = ["-np", str(ranks)]
    if point.rate is not None:
        where += ["-H", ",".join(_hosts(point, engine.kind))]
    return (*program, "launch", *where, *engine.launch, *fit)


def _hosts(point: Point, kind: str) -> list[str]:
    # Servers come last, even on the host of a worker; that host then has a second name, since ranks
    # are numbered host after host.
    found = [f"{name}:1" for name in HOST_NAMES[:point.workers]]
    if kind == "ps":
        found[0] = f"{HOST_NAMES[0]}:2"  # the chief and the first worker
        alias = "" if point.servers_on == "apart" else "-ps"
        found += [f"{HOST_NAMES[at]}{alias}:{point.server_hosts.count(at)}"
                  for at in sorted(set(point.server_hosts))]
    return found


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-")


def swept_values(job: str, sweep: Sweep) -> tuple[str, str, tuple[Any, ...]]:
    """The table, the key and the values."""
    tables = _read_tables(job)
    if sweep.key:
        return sweep.table, sweep.key, sweep.values
    for key in _KEYS[sweep.table]:
        value = tables.get(sweep.table, {}).get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return sweep.table, key, tuple(value * factor for factor in _FACTORS)
    raise ConfigError(
        f"--sweep {sweep.table}: {job} has no whole number {' or '.join(_KEYS[sweep.table])} in "
        f"[{sweep.table}] to multiply. Write one, or name a key and its values: --sweep "
        f"{sweep.table}.KEY=VALUE,VALUE")


def _read_tables(job: str) -> dict[str, Any]:
    path = Path(job)
    if path.suffix != ".toml":
        raise ConfigError(
            f"--sweep changes values of a job file, and {job} is Python. Give a .toml job, or "
            "compare several Python jobs one after the other.")
    read_job_file(path)
    return tomllib.loads(path.read_text(encoding="utf-8"))


def changed_job(job: str, table: str, key: str, value: Any) -> str:
    """The text of a job file with one value of its table `data` or `model` changed.

    The same key in the other table follows, such as `features`: the model's input is as wide as the
    data. Paths become absolute.
    """
    tables = _read_tables(job)
    tables.setdefault(table, {})[key] = value
    other = tables.get("model" if table == "data" else "data", {})
    if key in other:
        other[key] = value
    for where, name in (("model", "name"), ("data", "name"), ("optimizer", "name"),
                        ("compile", "loss")):
        file, colon, function = str(tables.get(where, {}).get(name, "")).rpartition(":")
        if colon and file.endswith(".py"):
            tables[where][name] = f"{Path(job).resolve().parent / file}:{function}"
    head = f"# {Path(job).name} with {table}.{key} = {_toml(value)}, made by hvdtrain compare"
    parts = [f"[{name}]\n" + "".join(f"{_key(k)} = {_toml(v)}\n" for k, v in content.items())
             for name, content in tables.items()]
    return "\n".join([head, *parts])


def _key(name: str) -> str:
    plain = name.isascii() and name.replace("-", "_").isidentifier()
    return name if plain else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (str, int)):  # and booleans
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value.isoformat())  # dates and times

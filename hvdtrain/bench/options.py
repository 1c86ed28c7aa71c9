"""`CompareOptions`: what the user asks of `hvdtrain compare`, with the defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.bench.engines import ENGINES
from hvdtrain.errors import ConfigError
from hvdtrain.settings import check_finite, setting

PLACEMENTS = ("workers", "apart")
DEFAULT_WORKERS = 2
DEFAULT_FOLDER = Path("runs")

_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TARGET = re.compile(r"([A-Za-z_]\w*)(<=|>=|=)([-+0-9.eE]+)")
_FALLING = ("loss", "error", "mae", "mse")
"""Parts of names of figures that are better when they are smaller."""
_SWEPT_KEY = re.compile(r"(data|model)\.([A-Za-z_]\w*)=(.+)")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure of `metrics.jsonl` that a run is to reach."""

    figure: str
    value: float
    falling: bool
    """Whether smaller is better."""

    def reached(self, line: dict[str, Any]) -> bool:
        """Whether an epoch's figures reach it."""
        found = line.get(self.figure)
        if found is None:
            return False
        return bool(found <= self.value if self.falling else found >= self.value)

    def __str__(self) -> str:
        return f"{self.figure} {'<=' if self.falling else '>='} {self.value:g}"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is varied."""

    kind: str
    """`data`, `model`, `roles`, or `key` for a key of the job file."""
    table: str = ""
    key: str = ""
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Validated when made; the only home of the defaults."""

    job: str
    engines: tuple[str, ...] = setting(
        tuple(ENGINES), "In the order in which they take turns.", metavar="NAME,...",
        commas=True, unset=",".join(ENGINES))
    workers: int | None = setting(
        None, "Processes that compute gradients, for every engine.", option="--workers,-np",
        unset=f"{DEFAULT_WORKERS}, or one per host")
    servers: int = setting(1, "Parameter servers.", option="--ps")
    epochs: int | None = setting(
        None, "At least 2; the first one is not measured.", unset="the job's")
    batch_per_rank: int | None = setting(
        None, "Samples per batch of one worker.", unset="the job's")
    rounds: int = setting(3, "How often every engine takes its turn.")
    threads: int | None = setting(
        None, "OMP_NUM_THREADS of every process.", unset="cores over workers")
    target: str | None = setting(
        None, "Report the time to it, as in val_accuracy=0.9.", metavar="FIGURE=VALUE")
    network: tuple[str, ...] = setting(
        (), "Run on virtual hosts with links of these speeds, as in 100mbit,1gbit; root only.",
        metavar="RATE,...", commas=True)
    hosts: tuple[int, ...] = setting(
        (), "With --network: numbers of hosts, with one worker on each.", metavar="N,...",
        commas=True, unset="one per worker")
    servers_on: str = setting(
        "workers", f"With --network, where the parameter servers stand: {', '.join(PLACEMENTS)}.")
    sweep: str | None = setting(
        None, "Vary the data's size (data), the model's (model), the servers (roles), or a key of "
        "the job file (model.hidden=256,512).", metavar="WHAT")
    output: Path | None = setting(
        None, "Folder for reports and all runs.", option="--output,-o", unset="runs/compare-<job>")
    overwrite: bool = setting(
        False, "Delete a former comparison there.", option="--overwrite")
    timeout_s: float = setting(3600.0, "Limit for one run.", metavar="SECONDS")

    def __post_init__(self) -> None:
        """Check each value.

        Raises:
            ConfigError: A value is unknown or out of range, or two contradict each other.
        """
        check_finite(self)
        unknown = sorted(set(self.engines) - set(ENGINES))
        if unknown or not self.engines:
            raise ConfigError(f"--engines: unknown {', '.join(map(repr, unknown)) or 'nothing'}. "
                              f"Expected some of: {', '.join(ENGINES)}.")
        if len(set(self.engines)) < len(self.engines):
            raise ConfigError(f"--engines names one twice: {','.join(self.engines)}.")
        for name in ("workers", "servers", "rounds", "threads", "batch_per_rank", "timeout_s"):
            _at_least(name, getattr(self, name), 1)
        _at_least("epochs", self.epochs, 2, ": the first one is not measured, since TensorFlow "
                  "traces the training step in it")
        if self.servers_on not in PLACEMENTS:
            raise ConfigError(f"--servers-on is {self.servers_on!r}. Expected one of: "
                              f"{', '.join(PLACEMENTS)}.")
        self._check_network()
        self.wanted_target()
        self.wanted_sweep()

    def _check_network(self) -> None:
        for rate in self.network:
            bits_per_s(rate)
        for count in self.hosts:
            _at_least("hosts", count, 2)
        if self.hosts and not self.network:
            raise ConfigError("--hosts is the number of virtual hosts, which need the speed of "
                              "their links. Give --network as well, e.g. --network 1gbit.")
        if self.hosts and self.workers is not None:
            raise ConfigError("Both --workers and --hosts are given. With --hosts there is one "
                              "worker on each host; leave out --workers.")

    @property
    def name(self) -> str:
        """The job's name in folders and titles."""
        path = Path(self.job)
        return path.stem if path.suffix in (".toml", ".py") else self.job

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        return self.output or DEFAULT_FOLDER / f"compare-{self.name}"

    def wanted_target(self) -> Target | None:
        """The target, read.

        Raises:
            ConfigError: It cannot be read.
        """
        if self.target is None:
            return None
        match = _TARGET.fullmatch(self.target.replace(" ", ""))
        try:
            value = float(match[3]) if match else None
        except ValueError:
            value = None
        if match is None or value is None:
            raise ConfigError(f"--target is {self.target!r}. Expected FIGURE=VALUE with a figure "
                              "of metrics.jsonl, e.g. val_accuracy=0.9 or val_loss=0.3.")
        falling = any(part in match[1] for part in _FALLING) if match[2] == "=" else \
            match[2] == "<="
        return Target(figure=match[1], value=value, falling=falling)

    def wanted_sweep(self) -> Sweep | None:
        """The sweep, read.

        Raises:
            ConfigError: It cannot be read.
        """
        if self.sweep is None:
            return None
        if self.sweep in ("data", "model", "roles"):
            return Sweep(kind=self.sweep)
        match = _SWEPT_KEY.fullmatch(self.sweep)
        if match is None:
            raise ConfigError(
                f"--sweep is {self.sweep!r}. Expected data, model, roles, or a key of the job "
                "file with its values, e.g. data.features=64,128 or model.hidden=256,512.")
        return Sweep(kind="key", table=match[1], key=match[2],
                     values=tuple(_number(text) for text in match[3].split(",")))


def bits_per_s(rate: str) -> float:
    """A rate as `tc` writes it, in bits per second.

    Raises:
        ConfigError: It is none.
    """
    match = _RATE.fullmatch(rate)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--network: cannot read the rate {rate!r}. Expected e.g. 100mbit, "
                          "1gbit or 2.5gbit.")
    return float(match[1]) * _BITS[match[2]]


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip()


def _at_least(name: str, value: float | None, least: int, why: str = "") -> None:
    if value is not None and value < least:
        raise ConfigError(f"--{name.removesuffix('_s').replace('_', '-')} is {value:g}. Expected "
                          f"{least} or more{why}.")

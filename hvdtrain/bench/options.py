"""What the user asks of `hvdtrain compare` and `hvdtrain plan`, and the engines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hvdtrain.bench import predict
from hvdtrain.bench.profile import Cluster
from hvdtrain.errors import ConfigError
from hvdtrain.settings import check, setting

Placement = Literal["workers", "apart"]
DEFAULT_WORKERS = 2
DEFAULT_ON = ("1x8", "8x8@100gbit", "64x8@100gbit")

_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TARGET = re.compile(r"([A-Za-z_]\w*)(<=|>=|=)([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
_FALLING = ("loss", "error", "mae", "mse")  # parts of names of figures that are better when smaller
_SWEPT_KEY = re.compile(r"(data|model)\.([A-Za-z_]\w*)=(.+)")


@dataclass(frozen=True, kw_only=True)
class ComparedEngine:
    """One way to train, with its options of `hvdtrain launch` and `hvdtrain fit`.

    `kind` says how the bytes of a step are computed. `synchronous`: an update takes one batch of
    every worker. `shared_memory`: processes of one host exchange bytes that TCP does not count.
    """

    kind: Literal["single", "ring", "ps"]
    says: str
    launch: tuple[str, ...] = ()
    fit: tuple[str, ...] = ()
    synchronous: bool = True
    shared_memory: bool = False


_ALLREDUCE = ("--engine", "allreduce")
ENGINES: dict[str, ComparedEngine] = {
    "single": ComparedEngine(kind="single", says="one process", fit=_ALLREDUCE, synchronous=False),
    "allreduce-gloo": ComparedEngine(
        kind="ring", says="allreduce, Horovod over Gloo (TCP)",
        launch=("--starter", "native", "--collective", "horovod-gloo"), fit=_ALLREDUCE),
    "allreduce-mpi": ComparedEngine(
        kind="ring", says="allreduce, Horovod over MPI (within a host by shared memory)",
        launch=("--starter", "mpirun", "--collective", "horovod-mpi"), fit=_ALLREDUCE,
        shared_memory=True),
    "ps-async": ComparedEngine(
        kind="ps", says="parameter servers, each gradient applied when it arrives",
        launch=("--starter", "native"), fit=("--engine", "ps", "--ps-mode", "async"),
        synchronous=False),
    "ps-sync": ComparedEngine(
        kind="ps", says="parameter servers, the mean of one gradient per worker",
        launch=("--starter", "native"), fit=("--engine", "ps", "--ps-mode", "sync")),
    "multi-worker-mirrored": ComparedEngine(
        kind="ring", says="tf.distribute.MultiWorkerMirroredStrategy",
        launch=("--starter", "native"),
        fit=("--engine", "tf", "--strategy", "multi_worker_mirrored")),
}


@dataclass(frozen=True, kw_only=True)
class FigureTarget:
    """A figure of `metrics.jsonl` that a run is to reach; `falling`: smaller is better."""

    figure: str
    value: float
    falling: bool

    def reached(self, line: Mapping[str, Any]) -> bool:
        """Whether an epoch's figures reach it."""
        found = line.get(self.figure)
        if found is None:
            return False
        return bool(found <= self.value if self.falling else found >= self.value)

    def __str__(self) -> str:
        return f"{self.figure} {'<=' if self.falling else '>='} {self.value:g}"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is varied: `roles`, or a table of the job file, `data` or `model`; which `key` of it."""

    table: str
    key: str = ""
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Validated when made."""

    job: str
    engines: tuple[str, ...] = setting(
        tuple(ENGINES), "In the order in which they take turns.", metavar="NAME,...",
        commas=True, unset=",".join(ENGINES))
    workers: int | None = setting(
        None, "Processes that compute gradients, for every engine.", option="--workers,-np",
        unset=f"{DEFAULT_WORKERS}, or one per host", least=1)
    servers: int = setting(1, "Parameter servers.", option="--ps", least=1)
    epochs: int | None = setting(
        None, "At least 2; the first one, in which TensorFlow traces, is not measured.",
        unset="the job's", least=2)
    batch_per_rank: int | None = setting(
        None, "Samples per batch of one worker.", unset="the job's", least=1)
    rounds: int = setting(3, "How often every engine takes its turn.", least=1)
    threads: int | None = setting(
        None, "OMP_NUM_THREADS of every process.", unset="cores over workers", least=1)
    target: str | None = setting(
        None, "Report the time to it, as in val_accuracy=0.9.", metavar="FIGURE=VALUE")
    network: tuple[str, ...] = setting(
        (), "Run on virtual hosts with links of these speeds, as in 100mbit,1gbit; root only.",
        metavar="RATE,...", commas=True)
    hosts: tuple[int, ...] = setting(
        (), "With --network: numbers of hosts, with one worker on each.", metavar="N,...",
        commas=True, unset="one per worker")
    servers_on: Placement = setting(
        "workers", "With --network, where the parameter servers stand.")
    predict: bool = setting(
        False, "With --network: predict steps as `hvdtrain plan` does, beside the measured ones.",
        option="--predict")
    sweep: str | None = setting(
        None, "Vary the data's size (data), the model's (model), the servers (roles), or a key of "
        "the job file (model.hidden=256,512).", metavar="WHAT")
    output: Path | None = setting(
        None, "Folder for reports and all runs.", option="--output,-o", unset="runs/compare-<job>")
    overwrite: bool = setting(
        False, "Delete a former comparison there.", option="--overwrite")
    timeout_s: float = setting(3600.0, "Limit for one run.", metavar="SECONDS", least=1)

    def __post_init__(self) -> None:
        check(self)
        unknown = sorted(set(self.engines) - set(ENGINES))
        if unknown or not self.engines:
            raise ConfigError(f"--engines: unknown {', '.join(map(repr, unknown)) or 'nothing'}. "
                              f"Expected some of: {', '.join(ENGINES)}.")
        if len(set(self.engines)) < len(self.engines):
            raise ConfigError(f"--engines names one twice: {','.join(self.engines)}.")
        for rate in self.network:
            bits_per_s(rate)
        if self.hosts and min(self.hosts) < 2:
            raise ConfigError(f"--hosts is {min(self.hosts)}. Expected 2 or more.")
        if self.hosts and not self.network:
            raise ConfigError("--hosts is the number of virtual hosts, which need the speed of "
                              "their links. Give --network as well, e.g. --network 1gbit.")
        if self.predict and not self.network:
            raise ConfigError("--predict tells what a network makes of a step. Give --network as "
                              "well, or see hvdtrain plan.")
        if self.hosts and self.workers is not None:
            raise ConfigError("Both --workers and --hosts are given. With --hosts there is one "
                              "worker on each host; leave out --workers.")
        self.wanted_target()
        self.wanted_sweep()

    @property
    def name(self) -> str:
        """The job's name in folders and titles."""
        path = Path(self.job)
        return path.stem if path.suffix in (".toml", ".py") else self.job

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self.output or Path("runs") / f"compare-{self.name}"

    def wanted_target(self) -> FigureTarget | None:
        """The target, parsed; ConfigError where it cannot be."""
        if self.target is None:
            return None
        match = _TARGET.fullmatch(self.target.replace(" ", ""))
        if match is None:
            raise ConfigError(f"--target is {self.target!r}. Expected FIGURE=VALUE with a figure "
                              "of metrics.jsonl, e.g. val_accuracy=0.9 or val_loss=0.3.")
        name, sign, value = match.groups()
        falling = sign == "<=" or (sign == "=" and any(part in name for part in _FALLING))
        return FigureTarget(figure=name, value=float(value), falling=falling)

    def wanted_sweep(self) -> Sweep | None:
        """The sweep, parsed; ConfigError where it cannot be."""
        if self.sweep is None:
            return None
        if self.sweep in ("data", "model", "roles"):
            return Sweep(table=self.sweep)
        match = _SWEPT_KEY.fullmatch(self.sweep)
        if match is None:
            raise ConfigError(
                f"--sweep is {self.sweep!r}. Expected data, model, roles, or a key of the job "
                "file with its values, e.g. data.features=64,128 or model.hidden=256,512.")
        return Sweep(table=match[1], key=match[2],
                     values=tuple(_number(text) for text in match[3].split(",")))


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Of `hvdtrain plan`. Validated when made."""

    job: str
    on: tuple[str, ...] = setting(
        (), "Hosts, ranks on each, speed of their links and time of a small message, as in "
        "8x4@100gbit,20us; repeatable.", metavar="HOSTSxRANKS@RATE", unset=" ".join(DEFAULT_ON))
    engines: tuple[str, ...] = setting(
        tuple(predict.ENGINES), "What is predicted.", metavar="NAME,...", commas=True,
        unset=",".join(predict.ENGINES))
    servers: int = setting(
        1, "Parameter servers, each on a host of its own.", option="--ps", least=1)
    batch_per_rank: int | None = setting(
        None, "Samples per batch of one rank.", unset="the job's", least=1)
    cores: int | None = setting(
        None, "Cores of a rank.", unset="those of this host over the most ranks of a host",
        least=1)
    seconds: float = setting(3.0, "How long each of the runs is measured.", above=0)
    profile: Path | None = setting(
        None, "Use the measured figures in this file; where it is not there, write them to it.",
        metavar="FILE")

    def __post_init__(self) -> None:
        check(self)
        unknown = sorted(set(self.engines) - set(predict.ENGINES))
        if unknown or not self.engines:
            raise ConfigError(f"--engines: unknown {', '.join(map(repr, unknown)) or 'nothing'}. "
                              f"Expected some of: {', '.join(predict.ENGINES)}.")
        _ = self.clusters

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """What `--on` says."""
        return tuple(Cluster.parse(text) for text in self.on or DEFAULT_ON)

    @property
    def has_servers(self) -> bool:
        """Whether an engine with parameter servers is among them."""
        return any(engine.startswith("ps") for engine in self.engines)


def bits_per_s(rate: str) -> float:
    """A rate as `tc` writes it, in bits per second, or ConfigError."""
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

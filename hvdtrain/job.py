"""Jobs: what to train; docs/jobs.md has one of each kind.

A *job file* (`.toml`) names a model, data, optimizer, loss and settings. It is parsed here, without
TensorFlow. A *Python job* is a module with a function `job()` that returns a `Job`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.engine_config import PsConfig, TfConfig
from hvdtrain.errors import ConfigError
from hvdtrain.settings import check, from_mapping, setting, settings_in, settings_of

DEFAULT_JOB = "hvdtrain.toml"
SHORT_JOB_VARIABLE = "HVDTRAIN_SHORT_JOB"  # what `bench.short_job` is told
DEFAULT_OPTIMIZER = "Adam"
_DEFAULT_OUTPUT = Path("runs")
_ENGINE_TABLES = {"ps": PsConfig, "tf": TfConfig}
_TABLES = ("model", "data", "optimizer", "compile", "train", *_ENGINE_TABLES)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, its data and its settings. Made alike on every rank.

    The functions are called after the rank's GPU is pinned and the seeds are set, so that
    importing the job's module must not run TensorFlow operations.

    Args:
        name: Used for the default output folder.
        model: Returns a compiled `keras.Model` with an ordinary Keras optimizer.
        data: Returns a `DataSplits`, or arrays `(x, y)` to train on.
        config: A `TrainConfig`.
        callbacks: Returns Keras callbacks, called on every rank.
    """

    name: str
    model: Callable[[], Any]
    data: Callable[[], Any]
    config: TrainConfig = field(default_factory=TrainConfig)
    callbacks: Callable[[], Sequence[Any]] = list

    def __post_init__(self) -> None:
        if not isinstance(self.config, TrainConfig):
            raise ConfigError("A job takes config=hvdtrain.TrainConfig(...). Received: "
                              f"config={self.config!r}")
        plain = settings_of(TrainConfig())
        refuse_in_job(name for name, value in settings_of(self.config).items()
                      if value != plain[name])


@dataclass(frozen=True, kw_only=True)
class Named:
    """A function or class by name, and its arguments."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """The `[compile]` table: arguments of `model.compile`."""

    loss: str | None = setting(
        None, "A name that `keras.losses.get` knows, `module:function` or `file.py:function`. "
        "Required, unless the model's function compiles the model; then `[optimizer]` and "
        "`[compile]` are not used.")
    metrics: tuple[str, ...] = setting((), "Names that Keras knows, e.g. `[\"accuracy\"]`.")
    from_logits: bool = setting(
        False, "The model's outputs are logits: for the crossentropies.")
    steps_per_execution: int = setting(1, "Batches in one call of the train function.", least=1)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A parsed `.toml` job."""

    path: Path
    model: Named
    data: Named
    optimizer: Named
    compile: CompileConfig
    train: TrainConfig


def with_default_output(job: Job, changes: dict[str, Any]) -> TrainConfig:
    """The job's settings with the command line's changes; output defaults to `runs/<job>`."""
    refuse_in_job(changes)
    if job.config.output is None:
        changes = {"output": _DEFAULT_OUTPUT / job.name, **changes}
    return job.config.with_options(changes)


def refuse_in_job(names: Iterable[str]) -> None:
    """Refuse settings that only scripts have."""
    known = settings_in(TrainConfig)
    for name in names:
        if name in known and known[name].script_only:
            raise ConfigError(f"{name} has no meaning in a job: {known[name].script_only}")


def check_default_job() -> None:
    """Refuse a command without a job in a folder that has no default job file."""
    if not Path(DEFAULT_JOB).is_file():
        raise ConfigError(f"No job is named, and there is no {DEFAULT_JOB} in {Path.cwd()}. Name "
                          "one (hvdtrain fit JOB: a .toml file, a .py file or a module), or "
                          f"write {DEFAULT_JOB} here; examples/ has some of each.")


def read_job_file(path: Path) -> JobFile:
    """Read and check a `.toml` job without TensorFlow; ConfigError where anything is wrong."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"The job file {path} does not exist. Give a .toml file, a .py file "
                          "or a module; examples/ has some of each.") from None
    except OSError as error:
        raise ConfigError(f"The job file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    unknown = sorted(set(tables) - set(_TABLES))
    if unknown:
        raise ConfigError(f"{path}: unknown table or key {', '.join(map(repr, unknown))}. "
                          f"Valid tables: {', '.join(f'[{t}]' for t in _TABLES)}.")
    for name, values in tables.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {name} must be a table, written [{name}]. "
                              f"Received: {name} = {values!r}")
    train, compiled = (dict(tables.get(name, {})) for name in ("train", "compile"))
    refuse_in_job(train)
    misplaced = sorted(set(train) & set(_ENGINE_TABLES))
    if misplaced:
        raise ConfigError(f"{path}: [train.{misplaced[0]}] is a table of its own. Write "
                          f"[{misplaced[0]}].")
    train |= {name: from_mapping(cls, tables.get(name, {}), where=f"{path}, [{name}]")
              for name, cls in _ENGINE_TABLES.items()}
    if isinstance(compiled.get("metrics"), list):
        compiled["metrics"] = tuple(compiled["metrics"])
    return JobFile(
        path=path, model=_named(path, tables, "model"), data=_named(path, tables, "data"),
        optimizer=_named(path, tables, "optimizer", default=DEFAULT_OPTIMIZER),
        compile=from_mapping(CompileConfig, compiled, where=f"{path}, [compile]"),
        train=from_mapping(TrainConfig, train, where=f"{path}, [train]"))


def _named(path: Path, tables: dict[str, Any], table: str, default: str | None = None) -> Named:
    values = dict(tables.get(table, {}))
    name = values.pop("name", default)
    if not isinstance(name, str):
        raise ConfigError(
            f"{path}: [{table}] needs a name. Received: "
            f"{'no [' + table + '] table' if table not in tables else repr(tables[table])}. "
            f"Write [{table}] and, below it, name = \"...\"")
    return Named(name=name, arguments=values)

"""Job files with one value changed: what a sweep runs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.bench.options import Sweep
from hvdtrain.errors import ConfigError
from hvdtrain.job import read_job_file

FACTORS = (1, 2, 4)
DATA_KEYS = ("samples",)
MODEL_KEYS = ("hidden", "width", "filters")
_OTHER = {"data": "model", "model": "data"}


def swept_values(job: str, sweep: Sweep) -> tuple[str, str, tuple[Any, ...]]:
    """Which key of the job file takes which values.

    Returns:
        Table, key, values.

    Raises:
        ConfigError: The job is no `.toml` file, or holds no key to vary.
    """
    tables = read_tables(job)
    if sweep.kind == "key":
        return sweep.table, sweep.key, sweep.values
    keys = DATA_KEYS if sweep.kind == "data" else MODEL_KEYS
    for key in keys:
        value = tables.get(sweep.kind, {}).get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return sweep.kind, key, tuple(value * factor for factor in FACTORS)
    raise ConfigError(
        f"--sweep {sweep.kind}: {job} has no whole number {' or '.join(keys)} in "
        f"[{sweep.kind}] to multiply. Write one, or name a key and its values: --sweep "
        f"{sweep.kind}.KEY=VALUE,VALUE")


def read_tables(job: str) -> dict[str, Any]:
    """The tables of a `.toml` job.

    Raises:
        ConfigError: It is none, or is wrong.
    """
    path = Path(job)
    if path.suffix != ".toml":
        raise ConfigError(
            f"--sweep changes values of a job file, and {job} is Python. Give a .toml job, or "
            "compare several Python jobs one after the other.")
    read_job_file(path)
    return tomllib.loads(path.read_text(encoding="utf-8"))


def changed_job(job: str, table: str, key: str, value: Any) -> str:
    """The text of a job file with one value changed.

    A key of the same name in the other one of [data] and [model] follows, such as `features`:
    the model's input is as wide as the data. Files that the job names are named absolutely.

    Args:
        job: String, the path of the `.toml` job.
        table: String, `data` or `model`.
        key: String.
        value: What it becomes.
    """
    tables = read_tables(job)
    tables.setdefault(table, {})[key] = value
    other = tables.get(_OTHER[table], {})
    if key in other:
        other[key] = value
    folder = Path(job).resolve().parent
    for name in ("model", "data", "optimizer"):
        _name_absolutely(tables.get(name, {}), "name", folder)
    _name_absolutely(tables.get("compile", {}), "loss", folder)
    head = f"# {Path(job).name} with {table}.{key} = {_toml(value)}, made by hvdtrain compare"
    parts = [f"[{name}]\n" + "".join(f"{_key(k)} = {_toml(v)}\n" for k, v in content.items())
             for name, content in tables.items()]
    return "\n".join([head, *parts])


def _name_absolutely(table: dict[str, Any], key: str, folder: Path) -> None:
    where, colon, function = str(table.get(key, "")).rpartition(":")
    if colon and where.endswith(".py"):
        table[key] = f"{folder / where}:{function}"


def _key(name: str) -> str:
    plain = name.isascii() and name.replace("-", "_").isidentifier()
    return name if plain else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value.isoformat())  # dates and times

"""Checks and changes that all settings share, whatever dataclass they stand in."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from hvdtrain.errors import ConfigError

ConfigT = TypeVar("ConfigT")


def at_least(config: Any, name: str, least: int) -> None:
    """Refuse a field below its least value; None is none.

    Raises:
        ConfigError: It is.
    """
    value = getattr(config, name)
    if value is not None and not value >= least:
        raise ConfigError(f"{name} must be at least {least}. Received: {name}={value}")


def check_types(config: Any) -> None:
    """Compare each field of a config dataclass with its annotation.

    Raises:
        ConfigError: Naming the field, what was found and what was expected.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if not _fits(value, hint):
            raise ConfigError(
                f"{field.name} must be {describe_type(hint)}. Received: "
                f"{field.name}={value!r} of type {type(value).__name__}")
    check_finite(config)


def check_finite(config: Any) -> None:
    """Refuse numbers that are none: `nan` passes every comparison that asks for too much.

    Raises:
        ConfigError: A field of the dataclass is not a number, or infinite.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(
                f"{field.name} must be a finite number. Received: {field.name}={value}")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def describe_type(hint: Any) -> str:
    """A type annotation in words, e.g. `one of 'pad', 'drop'` or `int or None`."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(v) for v in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(part) for part in typing.get_args(hint))
    if hint is type(None):
        return "None"
    name: str = hint.__name__
    return {"int": "a whole number", "float": "a number", "bool": "true or false",
            "str": "a string", "Path": "a path"}.get(name, name)


def from_mapping(cls: type[ConfigT], values: Mapping[str, Any], *, where: str) -> ConfigT:
    """Make a config dataclass from a mapping, refusing keys that it does not know.

    Args:
        cls: The dataclass.
        values: Mapping from field names to values; strings become paths where one is expected.
        where: String for messages, e.g. `"job.toml, [train]"`.

    Raises:
        ConfigError: A key is unknown (the valid ones are listed) or a value does not fit.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"{where}: unknown key{'s' if len(unknown) > 1 else ''} "
            f"{', '.join(map(repr, unknown))}. Valid keys: {', '.join(sorted(known))}.")
    converted = {
        key: Path(value) if isinstance(value, str) and _fits(Path(), hints[key]) else value
        for key, value in values.items()
    }
    try:
        return cls(**converted)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def refuse_differences(everyone: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Compare the settings of all ranks with those of the first.

    Args:
        everyone: For each rank, values by name.
        names: What each rank is called in the message.

    Raises:
        ConfigError: Naming the first rank and setting that differ.
    """
    for name, theirs in zip(names, everyone, strict=True):
        for key, value in everyone[0].items():
            if theirs[key] != value:
                raise ConfigError(
                    f"The ranks were given different settings: {key} is {value} on {names[0]} and "
                    f"{theirs[key]} on {name}. Give every rank the same command line, job file "
                    "and data.")


def settings_of(config: Any) -> dict[str, str]:
    """The fields of a config dataclass as text, to be compared or shown."""
    return {field.name: str(getattr(config, field.name)) for field in dataclasses.fields(config)}


def replace(config: ConfigT, **changes: Any) -> ConfigT:
    """A copy with the given fields changed; None means "as it was".

    A mapping changes fields of a field that is a dataclass itself.
    """
    given = {key: replace(getattr(config, key), **value) if isinstance(value, Mapping) else value
             for key, value in changes.items() if value is not None}
    return dataclasses.replace(config, **given)  # type: ignore[type-var]

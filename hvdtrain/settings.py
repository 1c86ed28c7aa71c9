"""What is said of a setting, once, beside its field; and the checks and changes that all share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from hvdtrain.errors import ConfigError

ConfigT = TypeVar("ConfigT")
T = TypeVar("T")
_SAID = "hvdtrain"
_FIELDS: dict[Any, dict[str, Setting]] = {}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting: its checks, its option, its help and its row in docs/jobs.md are made of this."""

    text: str = ""
    """What it does, in Markdown. The first sentence is the help of its option."""
    see: str = ""
    """The page of docs/ that tells more."""
    group: str = ""
    """Its heading in `--help` and docs/jobs.md."""
    option: str = ""
    """Names of its option where they are not made of its own, e.g. `--output,-o`."""
    metavar: str | None = None
    """What the help writes for the option's value; None: its type."""
    commas: bool = False
    """Whether one value of the option may be several, with commas."""
    unset: str = ""
    """What holds where the default None stays, in words."""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    off: float | None = None
    """A number outside of these bounds that stands for none."""
    excludes: str = ""
    """The setting that cannot be given with it. Who changes one of the two takes back the other."""
    engines: tuple[str, ...] = ()
    """The engines that have it; empty: all."""
    everywhere: tuple[object, ...] = ()
    """Values that the other engines have too, beside the default."""
    instead: str = "Leave it out."
    """What to do with another engine."""
    only: str = ""
    """The one command that has it, of several; empty: all."""
    script_only: str = ""
    """Why it has no meaning in a job; empty: it has."""
    name: str = ""
    """`epochs`, or `ps.mode` in a dataclass within. This and what follows is that of the field."""
    hint: Any = None
    default: Any = None

    @property
    def help(self) -> str:
        """The first sentence."""
        first = self.text.partition(". ")[0].replace("`", "")
        return first if first.endswith((".", "?")) else f"{first}."

    @property
    def bounds(self) -> str:
        """The numbers that it may be, in words; empty: all."""
        parts = [f"{words} {bound:,}" for words, bound in (
            ("above", self.above), ("at least", self.least), ("at most", self.most))
            if bound is not None]
        return (f"{self.off}, or " if self.off is not None else "") + " and ".join(parts)

    def check(self, value: Any) -> None:
        """Refuse a value that is of another type or out of bounds.

        Raises:
            ConfigError: Naming the setting, what was found and what was expected.
        """
        name = self.name
        if not _fits(value, self.hint):
            raise ConfigError(f"{name} must be {describe_type(self.hint)}. Received: "
                              f"{name}={value!r} of type {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} must be a finite number. Received: {name}={value}")
        if value is None or isinstance(value, str) or value == self.off:
            return
        if ((self.least is not None and value < self.least)
                or (self.above is not None and value <= self.above)
                or (self.most is not None and value > self.most)):
            raise ConfigError(f"{name} must be {self.bounds}. Received: {name}={value}")

    def check_engine(self, value: Any, engine: str) -> None:
        """Refuse what the engine would ignore.

        Raises:
            ConfigError: The setting is of other engines.
        """
        if self.engines and engine not in self.engines:
            owners = " and ".join(map(repr, self.engines))
            raise ConfigError(
                f"{self.name}={value!r} belongs to engine{'s' * (len(self.engines) > 1)} "
                f"{owners}. Received: engine={engine!r}. {self.instead}")


def setting(default: T, text: str, **said: Any) -> T:
    """A field of a config dataclass: its default, what it does, and fields of `Setting`."""
    return dataclasses.field(
        default=default, metadata={_SAID: Setting(text=text, **said)})


def required(text: str, **said: Any) -> Any:
    """A field without a default."""
    return setting(dataclasses.MISSING, text, **said)


def table(cls: type[T], text: str, **said: Any) -> T:
    """A field that is a config dataclass itself; `said` holds for all of its settings."""
    return dataclasses.field(
        default_factory=cls, metadata={_SAID: Setting(text=text, **said)})


def fields_of(cls: Any) -> dict[str, Setting]:
    """The fields of a config dataclass by name."""
    if cls not in _FIELDS:
        hints = typing.get_type_hints(cls)
        _FIELDS[cls] = {field.name: dataclasses.replace(
            field.metadata.get(_SAID, Setting()), name=field.name, hint=hints[field.name],
            default=field.default) for field in dataclasses.fields(cls)}
    return _FIELDS[cls]


def settings_in(cls: Any) -> dict[str, Setting]:
    """The settings of a config dataclass by name, with those of dataclasses within: `ps.mode`."""
    found = {}
    for name, field in fields_of(cls).items():
        if not dataclasses.is_dataclass(field.hint):
            found[name] = field
            continue
        for key, one in fields_of(field.hint).items():
            found[f"{name}.{key}"] = dataclasses.replace(
                one, name=f"{name}.{key}", group=field.group, engines=field.engines,
                instead=field.instead)
    return found


def check(config: Any) -> None:
    """Compare each field of a config dataclass with what is said of it. A string becomes a path.

    Raises:
        ConfigError: Naming the field, what was found and what was expected.
    """
    for name, field in fields_of(type(config)).items():
        value, other = getattr(config, name), field.excludes
        if isinstance(value, str) and not _fits(value, field.hint) and _fits(Path(), field.hint):
            object.__setattr__(config, name, value := Path(value))
        field.check(value)
        if other and value != field.default and getattr(config, other) != fields_of(
                type(config))[other].default:
            raise ConfigError(f"{name} and {other} exclude each other; give one of them. Received: "
                              f"{name}={value}, {other}={getattr(config, other)}")


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


def refuse_unknown(names: Iterable[str], known: Iterable[str], *, where: str) -> None:
    """Refuse names that nothing here has.

    Raises:
        ConfigError: Naming them, and those that are valid.
    """
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(
            f"{where}: unknown key{'s' if len(unknown) > 1 else ''} "
            f"{', '.join(map(repr, unknown))}. Valid keys: {', '.join(sorted(known))}.")


def from_mapping(cls: type[ConfigT], values: Mapping[str, Any], *, where: str) -> ConfigT:
    """Make a config dataclass from a mapping, refusing keys that it does not know.

    Args:
        cls: The dataclass.
        values: Mapping from field names to values; strings become paths where one is expected.
        where: String for messages, e.g. `"job.toml, [train]"`.

    Raises:
        ConfigError: A key is unknown (the valid ones are listed) or a value does not fit.
    """
    refuse_unknown(values, fields_of(cls), where=where)
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def from_text(cls: Any, items: Iterable[str], *, where: str) -> dict[str, Any]:
    """Read settings as they are typed, `NAME=VALUE`.

    Raises:
        ConfigError: One is unknown, or its value does not fit.
    """
    found: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"{where} is {item!r}. Expected NAME=VALUE, e.g. epochs=3.")
        refuse_unknown([name], settings_in(cls), where=where)
        one, value = settings_in(cls)[name], text
        if not _fits(text, one.hint) and not _fits(Path(), one.hint):
            with contextlib.suppress(ValueError):
                value = json.loads(text)
            one.check(value)
        found[name] = value
    return found


def replace(config: ConfigT, **changes: Any) -> ConfigT:
    """A copy with settings changed by their names; that of a dataclass within is `ps.mode`.

    What a changed setting excludes goes back to its default.
    """
    known, own, within = settings_in(type(config)), dict[str, Any](), dict[str, dict[str, Any]]()
    for name, value in changes.items():
        head, dot, key = name.rpartition(".")
        if dot:
            within.setdefault(head, {})[key] = value
        else:
            own[name] = value
        other = known[name].excludes if name in known else ""
        if other and other not in changes:
            own[other] = known[other].default
    own |= {head: dataclasses.replace(getattr(config, head), **values)
            for head, values in within.items()}
    return dataclasses.replace(config, **own)  # type: ignore[type-var]


def join(config: ConfigT, changes: Mapping[str, Any], *, mine: str, theirs: str) -> ConfigT:
    """A copy with settings that somebody else gives beside those of `config`.

    Args:
        config: Settings; what is not its default was given.
        changes: Mapping from names to values.
        mine: String, who gave those of `config`, for messages.
        theirs: String, who gives the others.

    Raises:
        ConfigError: Both say something of one setting, and not the same.
    """
    cls = type(config)
    wanted = replace(cls(), **changes)
    for name in changes:
        own, value = value_of(config, name), value_of(wanted, name)
        if own not in (settings_in(cls)[name].default, value):
            raise ConfigError(f"{theirs} say {name}={value!r}, and {mine} {name}={own!r}. Leave "
                              "one of the two out.")
    return replace(config, **changes)


def value_of(config: Any, name: str) -> Any:
    """The value of a setting by its name."""
    return functools.reduce(getattr, name.split("."), config)


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
    """The settings of a config dataclass as text, to be compared or shown."""
    return {name: str(value_of(config, name)) for name in settings_in(type(config))}

"""The description of a setting, once, at its field; and the checks and changes that all share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import operator
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
    """A setting: the source of its checks, its option, its help and its row in docs/jobs.md."""

    text: str = ""  # what it does, in Markdown; the first sentence is the help of its option
    see: str = ""  # the page of docs/ that tells more
    group: str = ""  # its heading in `--help` and docs/jobs.md
    option: str = ""  # names of its option where they are not made of its own: `--output,-o`
    metavar: str | None = None  # what the help writes for the option's value; None: its type
    commas: bool = False  # one value of the option may be several, with commas
    unset: str = ""  # what holds where the default None stays, in words
    least: float | None = None
    above: float | None = None
    most: float | None = None
    off: float | None = None  # a number outside of these bounds that stands for none
    excludes: str = ""  # cannot be given with it; who changes one of the two takes back the other
    engines: tuple[str, ...] = ()  # those that have it; empty: all
    everywhere: tuple[object, ...] = ()  # values that other engines have too, beside the default
    instead: str = "Leave it out."  # what to do with another engine
    only: str = ""  # the one command that has it, of several; empty: all
    script_only: str = ""  # why it has no meaning in a job; empty: it has
    # Those of the field; the name is `epochs`, or `ps.mode` in a dataclass within.
    name: str = ""
    hint: Any = None
    default: Any = None

    @property
    def help(self) -> str:
        """The first sentence."""
        first = self.text.partition(". ")[0].replace("`", "")
        return first if first.endswith((".", "?")) else f"{first}."

    def check(self, value: Any) -> None:
        """Refuse a value of another type or out of bounds, saying what was expected."""
        name = self.name
        if not _fits(value, self.hint):
            raise ConfigError(f"{name} must be {describe_type(self.hint)}. Received: "
                              f"{name}={value!r} of type {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} must be a finite number. Received: {name}={value}")
        if value is None or isinstance(value, str) or value == self.off:
            return
        bounds = [(words, bound, fits(value, bound)) for words, bound, fits in (
            ("above", self.above, operator.gt), ("at least", self.least, operator.ge),
            ("at most", self.most, operator.le)) if bound is not None]
        if not all(fits for *_, fits in bounds):
            off = f"{self.off}, or " if self.off is not None else ""
            within = " and ".join(f"{words} {bound:,}" for words, bound, _ in bounds)
            raise ConfigError(f"{name} must be {off}{within}. Received: {name}={value}")

    def check_engine(self, value: Any, engine: str) -> None:
        """Refuse what the engine would ignore."""
        if self.engines and engine not in self.engines:
            owners = " and ".join(map(repr, self.engines))
            raise ConfigError(
                f"{self.name}={value!r} belongs to engine{'s' * (len(self.engines) > 1)} "
                f"{owners}. Received: engine={engine!r}. {self.instead}")


def setting(default: T, text: str, **said: Any) -> T:
    """A field of a config dataclass: its default, its text, and fields of `Setting`."""
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
    """The settings of a config dataclass by name, also in nested dataclasses: `ps.mode`."""
    found: dict[str, Setting] = {}
    for name, field in fields_of(cls).items():
        within = fields_of(field.hint) if dataclasses.is_dataclass(field.hint) else None
        found |= {name: field} if within is None else {
            f"{name}.{key}": dataclasses.replace(
                one, name=f"{name}.{key}", group=field.group, engines=field.engines,
                instead=field.instead) for key, one in within.items()}
    return found


def check(config: Any) -> None:
    """Check a config dataclass (strings become paths); ConfigError names the field."""
    fields = fields_of(type(config))
    for name, field in fields.items():
        value, other = getattr(config, name), field.excludes
        if isinstance(value, str) and not _fits(value, field.hint) and _fits(Path(), field.hint):
            object.__setattr__(config, name, value := Path(value))
        field.check(value)
        if other and value != field.default and getattr(config, other) != fields[other].default:
            raise ConfigError(f"{name} and {other} exclude each other; give one of them. Received: "
                              f"{name}={value}, {other}={getattr(config, other)}")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def describe_type(hint: Any) -> str:
    """A type annotation in words, e.g. `one of 'pad', 'drop'` or `int or None`."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(v) for v in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(part) for part in typing.get_args(hint))
    name: str = hint.__name__
    return {"int": "a whole number", "float": "a number", "bool": "true or false",
            "str": "a string", "Path": "a path", "NoneType": "None"}.get(name, name)


def refuse_unknown(names: Iterable[str], known: Iterable[str], *, where: str) -> None:
    """Refuse unknown names, and list the valid ones."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(
            f"{where}: unknown key{'s' if len(unknown) > 1 else ''} "
            f"{', '.join(map(repr, unknown))}. Valid keys: {', '.join(sorted(known))}.")


def from_mapping(cls: type[ConfigT], values: Mapping[str, Any], *, where: str) -> ConfigT:
    """Make a config dataclass from a mapping; refuses unknown keys."""
    refuse_unknown(values, fields_of(cls), where=where)
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def from_text(cls: Any, items: Iterable[str], *, where: str) -> dict[str, Any]:
    """Parse settings typed as `NAME=VALUE`."""
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
    """A copy with settings changed by name, also `ps.mode` in a nested dataclass."""
    # What a changed setting excludes goes back to its default.
    known = settings_in(type(config))
    others = {known[name].excludes for name in changes if name in known} - {"", *changes}
    changes |= {other: known[other].default for other in others}
    own, within = dict[str, Any](), dict[str, dict[str, Any]]()
    for name, value in changes.items():
        head, dot, key = name.rpartition(".")
        (within.setdefault(head, {}) if dot else own)[key] = value
    own |= {head: dataclasses.replace(getattr(config, head), **values)
            for head, values in within.items()}
    return dataclasses.replace(config, **own)  # type: ignore[type-var]


def join(config: ConfigT, changes: Mapping[str, Any], *, mine: str, theirs: str) -> ConfigT:
    """Merge settings from elsewhere into `config`; ConfigError where both are set and differ."""
    # What is not its default was set; `mine` and `theirs` are who set it, for messages.
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


def refuse_differences(everyone: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> None:
    """ConfigError with the first difference of settings (values by name) between ranks."""
    # `names` are what the ranks are called in the message, if not `rank 0` and so on.
    names = names or [f"rank {rank}" for rank in range(len(everyone))]
    for name, theirs in zip(names, everyone, strict=True):
        for key, value in everyone[0].items():
            if theirs[key] != value:
                raise ConfigError(
                    f"The ranks were given different settings: {key} is {value} on {names[0]} and "
                    f"{theirs[key]} on {name}. Give every rank the same command line, job file "
                    "and data.")


def settings_of(config: Any) -> dict[str, str]:
    """The settings of a config dataclass as text, to compare or show."""
    return {name: str(value_of(config, name)) for name in settings_in(type(config))}

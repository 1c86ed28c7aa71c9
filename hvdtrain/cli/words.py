"""What is typed: the names of options, what they give, and `hvdtrain launch` read without typer.

Typer alone takes as long to import as all that `launch` needs. What `read_launch` does not read, it
leaves to typer: help, mistakes, and rare ways to write an option.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from hvdtrain.launch.options import LaunchOptions
from hvdtrain.settings import Setting, settings_in


def words_of(one: Setting) -> tuple[str, ...]:
    """The names of a setting's option, as typer takes them."""
    word = "--" + one.name.removesuffix("_s").replace(".", "-").replace("_", "-")
    is_flag = one.hint in (bool, bool | None)
    return tuple((one.option or (f"{word}/--no-{word[2:]}" if is_flag else word)).split(","))


def given_of(settings: Iterable[Setting], typed: dict[str, Any]) -> dict[str, Any]:
    """The settings that were typed, from the parameters of a command line."""
    found = {}
    for one in settings:
        value = typed.get(one.name.replace(".", "_"))
        if value and one.commas:
            value = [word.strip() for word in ",".join(value).split(",")]
        if value not in (None, []):
            found[one.name] = tuple(value) if isinstance(value, list) else value
    return found


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command line of `hvdtrain launch`: settings of `--set`, options, and the ranks' command.

    `command` is as typer gives it to `RanksCommand`, with its first `--` doubled.
    """

    command: tuple[str, ...]
    settings: tuple[str, ...]
    dry_run: bool
    given: dict[str, Any]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _NotReadError(message)


class _NotReadError(Exception):
    pass


def read_launch(words: Sequence[str]) -> Launch | None:
    """Read the words after `hvdtrain launch`; None for those that typer has to read."""
    options = [one for one in settings_in(LaunchOptions).values() if one.text]
    parser = _Parser(add_help=False, allow_abbrev=False)
    for one in options:
        if not any("/" in word for word in words_of(one)):
            parser.add_argument(*words_of(one), dest=one.name.replace(".", "_"), **_kind_of(one))
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    own = words[:words.index("--")] if "--" in words else words
    if any(word.endswith("=--") or (word[:2] != "--" and "=" in word) for word in own
           if word.startswith("-")):
        return None  # argparse takes these otherwise
    try:
        typed = vars(parser.parse_args(words))
    except _NotReadError:
        return None
    command = list(typed["command"])
    if command and command[0].startswith("-") and command[0] != "--":
        return None  # a negative number
    if "--" in command[1:] and command[0] != "--":
        command.insert(command.index("--"), "--")
    # The options of a fit are checked by typer.
    return None if not command or "fit" in command else Launch(
        command=tuple(command), settings=tuple(typed["settings"]), dry_run=typed["dry_run"],
        given=given_of(options, typed))


def _kind_of(one: Setting) -> dict[str, Any]:
    """How argparse reads a setting as typer does."""
    if one.hint is bool:
        return {"action": "store_true", "default": None}
    kinds = [kind for kind in (typing.get_args(one.hint) or (one.hint,)) if kind is not type(None)]
    if typing.get_origin(one.hint) is Literal:
        return {"choices": kinds}
    action = "append" if typing.get_origin(one.hint) is tuple else "store"
    return {"type": kinds[0], "action": action}

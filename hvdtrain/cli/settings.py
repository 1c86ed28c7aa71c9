"""Options that are settings, made from the fields' own descriptions."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hvdtrain.cli.words import given_of, words_of
from hvdtrain.collective_names import COLLECTIVE_VARIABLE
from hvdtrain.config import GROUPS, SETTINGS_VARIABLE, TrainConfig
from hvdtrain.errors import ConfigError
from hvdtrain.launch.options import RankCommand
from hvdtrain.settings import Setting, from_text, settings_in

SETTINGS = dict(sorted(settings_in(TrainConfig).items(), key=lambda at: GROUPS.index(at[1].group)))
"""In the order in which they are shown."""

Set = Annotated[list[str] | None, typer.Option(
    "--set", metavar="NAME=VALUE", help="A setting of TrainConfig for a script, as in "
    "compression=bf16; repeatable. `fit` has options of its own.")]


class GroupedCommand(TyperCommand):
    """Shows its options by group."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write a section for each group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            named = "Arguments" if parameter.param_type_name == "argument" else "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or named,
                                  []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def with_settings(settings: Iterable[Setting]) -> Callable[[Callable[..., None]], Any]:
    """Give a command options for settings; its parameter `given` gets those typed, by name."""
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**typed: Any) -> None:
            command(given=given_of(settings, typed), **{
                name: value for name, value in typed.items() if name in own})

        plain = inspect.signature(command, eval_str=True)
        own = {name: parameter.replace(kind=parameter.KEYWORD_ONLY)
               for name, parameter in plain.parameters.items() if name != "given"}
        run.__signature__ = plain.replace(  # type: ignore[attr-defined]
            parameters=[*own.values(), *map(_option, settings)])
        run.__doc__ = command.__doc__
        return run
    settings = tuple(one for one in settings if one.text)
    return decorate


def _option(one: Setting) -> inspect.Parameter:
    required = one.default is dataclasses.MISSING
    plain = required or one.default is False or one.default in (None, ())
    default = one.unset.replace("`", "") or ("" if plain else json.dumps(one.default).strip('"'))
    hint = list[str] if typing.get_origin(one.hint) is tuple else one.hint
    return inspect.Parameter(
        one.name.replace(".", "_"), inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else None,
        annotation=Annotated[hint if required else hint | None, typer.Option(
            *words_of(one), help=one.help, metavar=one.metavar, hidden=bool(one.script_only),
            rich_help_panel=one.group or None, show_default=default or False)])


def settings_env(command: RankCommand, items: Sequence[str] | None, *,
                 own: Sequence[str] = ()) -> tuple[str, ...]:
    """`--set` as variables for `TrainConfig.as_launched`; refuses settings that have an option."""
    given = from_text(TrainConfig, items or (), where="--set")
    for name in given:
        if command.is_fit or name in own:
            word = words_of(SETTINGS[name])[0].partition("/")[0]
            raise ConfigError(f"--set {name} is for scripts; there is an option for it: {word}"
                              f"{' of hvdtrain fit' if command.is_fit else ''}.")
    collective = given.pop("collective", None)
    TrainConfig().with_options(given)
    return (*((f"{COLLECTIVE_VARIABLE}={collective}",) if collective else ()),
            *((f"{SETTINGS_VARIABLE}={json.dumps(given)}",) if given else ()))

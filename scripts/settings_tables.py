#!/usr/bin/env python3
"""Writes the tables of settings in docs/jobs.md from what is said beside the fields."""

import itertools
import json
import re
import typing
from pathlib import Path

from hvdtrain.cli.settings import SETTINGS
from hvdtrain.cli.words import words_of
from hvdtrain.job import CompileConfig
from hvdtrain.settings import fields_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "jobs.md"


def default_of(one):
    if one.unset:
        return one.unset
    value = list(one.default) if isinstance(one.default, tuple) else one.default
    return "none" if value is None else f"`{json.dumps(value)}`"


def options_of(one):
    if one.script_only:
        return "in scripts only"
    words = re.split("[,/]", ",".join(words_of(one)))
    words[0] += f" {one.metavar}" if one.metavar else ""
    return ", ".join(f"`{word}`" for word in words)


def meaning_of(one):
    choices = [c for c in typing.get_args(one.hint) if isinstance(c, str)]
    in_text = one.see.endswith("#collectives") or all(f"`{c}`" in one.text for c in choices)
    if not in_text:
        return f"{one.text} One of {', '.join(f'`{json.dumps(c)}`' for c in choices)}.{see(one)}"
    return one.text + see(one)


def see(one):
    return f" See [{one.see.partition('#')[0]}]({one.see})." if one.see else ""


def lines(settings, *cells):
    yield f"| {' | '.join(name for name, _ in cells)} |"
    yield "|---" * len(cells) + "|"
    for one in settings:
        yield f"| {' | '.join(cell(one) for _, cell in cells)} |"


def key(one):
    return f"`{one.name.rpartition('.')[2]}`"


def table(name):
    """The lines of the section `[name]`."""
    if name == "compile":
        yield from lines(fields_of(CompileConfig).values(), ("key", key), ("default", default_of),
                         ("meaning", meaning_of))
        return
    own = [one for one in SETTINGS.values() if ("." in one.name) == (name != "train")
           and (name == "train" or one.name.startswith(f"{name}."))]
    for group, settings in itertools.groupby(own, lambda one: one.group):
        if name == "train":
            yield from (f"#### {group}", "")
        yield from lines(settings, ("key", key), ("default", default_of), ("option", options_of),
                         ("meaning", meaning_of))
        yield ""


def page(text):
    """The page with its tables written anew."""
    def made(match):
        body = "\n".join(table(match[1])).strip()
        return f"<!-- settings: {match[1]} -->\n\n{body}\n\n<!-- end -->"
    return re.sub(r"<!-- settings: (\w+) -->.*?<!-- end -->", made, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

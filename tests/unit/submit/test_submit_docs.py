"""The pages on Slurm and Kubernetes tell of each option, with its default."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from hvdtrain.cli.main import app
from hvdtrain.cli.words import words_of
from hvdtrain.settings import fields_of
from hvdtrain.submit.kubernetes import KubernetesOptions
from hvdtrain.submit.slurm import SlurmOptions

DOCS = Path(__file__).resolve().parents[3] / "docs"


def options(*path: str) -> list[Any]:
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    return [one for one in command.params
            if one.param_type_name == "option" and one.name != "help"]


def told(page: str) -> dict[str, str]:
    """Each option of the table, with the cell that has its default."""
    found = {}
    for line in (DOCS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| `-") and len(cells) == 3:
            for name in re.findall(r"`(--?[\w-]+)`", cells[0]):
                found[name] = cells[1].strip("`")
    return found


COMMANDS = [(("slurm",), "slurm.md"), (("k8s", "mpijob"), "kubernetes.md"),
            (("k8s", "tfjob"), "kubernetes.md")]


@pytest.mark.parametrize(("path", "page"), COMMANDS)
def test_each_option_is_described(path: tuple[str, ...], page: str) -> None:
    names = {name for one in options(*path) for name in (*one.opts, *one.secondary_opts)}
    assert not names - set(told(page))


@pytest.mark.parametrize(("path", "page"), COMMANDS)
def test_no_other_option_is_described(path: tuple[str, ...], page: str) -> None:
    every = {name for other, its in COMMANDS if its == page for one in options(*other)
             for name in (*one.opts, *one.secondary_opts)}
    assert not set(told(page)) - every


@pytest.mark.parametrize(("cls", "page"), [
    (SlurmOptions, "slurm.md"), (KubernetesOptions, "kubernetes.md")])
def test_each_default_is_the_one_that_is_described(cls: Any, page: str) -> None:
    cells, found = told(page), 0
    for one in fields_of(cls).values():
        if one.text and isinstance(one.default, (int, str)) and one.hint is not bool:
            assert str(one.default) == cells[words_of(one)[0]], one.name
            found += 1
    assert found >= 3

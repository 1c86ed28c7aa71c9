"""`hvdtrain run`: the command line of a user's script."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hvdtrain.cli.settings import Set
from hvdtrain.config import TrainConfig
from hvdtrain.errors import ConfigError
from hvdtrain.settings import from_text

_WITH_VALUE = ("--lr-scaling", "--set")


class ScriptCommand(TyperCommand):
    """Leaves everything from the script, or from `-m`, as it was typed."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Put `--` before the script: what follows it has its own options."""
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-m", "--"):
            at += 2 if args[at] in _WITH_VALUE else 1
        if args[at:at + 1] != ["--"]:
            args = [*args[:at], "--", *args[at:]] if at < len(args) else args
        return super().parse_args(ctx, args)


def run_command(
    script: Annotated[list[str], typer.Argument(
        metavar="SCRIPT [ARGUMENTS]", help="A Python script, or -m and a module; then its own "
        "arguments.")],
    explain: Annotated[bool, typer.Option(
        "--explain", help="Say what is done with which line of the script, and stop.")] = False,
    as_written: Annotated[bool, typer.Option(
        "--batch-per-rank-as-written", help="The script's batch size is that of each rank. "
        "Default: of all ranks together, which keeps the result.")] = False,
    lr_scaling: Annotated[str | None, typer.Option(
        help="How the learning rate follows the global batch, with "
        "--batch-per-rank-as-written: linear, sqrt, none.", show_default="linear")] = None,
    settings: Set = None,
) -> None:
    """Run a Horovod or plain Keras SCRIPT, unchanged, on all ranks.

    hvdtrain launch -np 4 run train.py --epochs 3

    hvdtrain run -m package.module

    srun hvdtrain run train.py | horovodrun -np 8 hvdtrain run train.py
    """
    from hvdtrain.script.run import run_script
    run_script(options_of(script, explain=explain, as_written=as_written, lr_scaling=lr_scaling,
                          settings=settings or ()))


def options_of(words: list[str], *, explain: bool, as_written: bool, lr_scaling: str | None,
               settings: Any) -> Any:
    """What was typed, checked."""
    from hvdtrain.script.run import ScriptOptions
    is_module = words[0] == "-m"
    program, *arguments = words[is_module:] or [""]
    if not program:
        raise ConfigError("hvdtrain run -m needs the name of a module: hvdtrain run -m "
                          "package.module [ARGUMENTS]")
    given = from_text(TrainConfig, settings, where="--set")
    for name, value in (("batch", "per_rank" if as_written else None),
                        ("lr_scaling", lr_scaling)):
        if value is not None and given.setdefault(name, value) != value:
            raise ConfigError(f"{name} is given twice, as {value!r} and, by --set, as "
                              f"{given[name]!r}. Leave one of the two out.")
    if lr_scaling is not None and given.get("batch", "global") != "per_rank":
        raise ConfigError("--lr-scaling has no effect while the script's batch is divided over "
                          "the ranks: the global batch stays. Add --batch-per-rank-as-written, or "
                          "leave it out.")
    return ScriptOptions(program=program, arguments=tuple(arguments), is_module=is_module,
                         config=TrainConfig().with_options(given), explain=explain)

"""What hvdtrain says: log lines with the rank, `[rank 3/8 hostb] message`, and tables."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_LOGGER = logging.getLogger("hvdtrain")
_WIDTH = 160  # in a file or a pipe


def get_logger() -> logging.Logger:
    """The logger of this package."""
    return _LOGGER


def configure(prefix: str = "hvdtrain", *, level: int = logging.INFO,
              stream: TextIO | None = None) -> None:
    """Log to `stream` (default: standard error) with a prefix, in place of an earlier call's."""
    # Each program calls it once: with `rank_prefix(...)` on a rank, without in the driver.
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter(f"[{prefix}] %(message)s"))
    for old in list(_LOGGER.handlers):
        _LOGGER.removeHandler(old)
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(level)
    _LOGGER.propagate = False


def rank_prefix(rank: int, size: int, host: str) -> str:
    """The prefix of one rank's lines."""
    return f"rank {rank}/{size} {host}"


def wide_console(console: Console | None = None) -> Console:
    """The console, by default of standard output; wide where it is a file or a pipe."""
    from rich.console import Console
    console = console or Console(highlight=False)
    if console.is_terminal:
        return console
    return Console(file=console.file, width=_WIDTH, highlight=False)


def print_table(console: Console, columns: Sequence[str], rows: Iterable[Iterable[str | Text]], *,
                unbroken: Collection[str] = ()) -> None:
    """Print a table without frames; only the columns in `unbroken` never break a line."""
    from rich import box
    from rich.table import Table
    from rich.text import Text
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in columns:
        table.add_column(Text(title), overflow="fold", no_wrap=title in unbroken)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console.print(table)

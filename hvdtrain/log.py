"""Log lines that say which rank speaks: `[rank 3/8 hostb] message`, on standard error."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

_LOGGER = logging.getLogger("hvdtrain")


def get_logger() -> logging.Logger:
    """The logger of this package."""
    return _LOGGER


def configure(prefix: str = "hvdtrain", *, level: int = logging.INFO,
              stream: TextIO | None = None) -> None:
    """Send the package's log to `stream` (default: standard error) with a prefix.

    Called once by each program: with `rank_prefix(...)` on a rank, plain in the driver.
    A later call replaces the former one.
    """
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

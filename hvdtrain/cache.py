"""Where hvdtrain keeps what it has made and can make again: wheels, indexes, unpacked files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def default_cache(environ: Mapping[str, str]) -> Path:
    """`$HVDTRAIN_CACHE`, else `$XDG_CACHE_HOME/hvdtrain`, else `~/.cache/hvdtrain`."""
    if environ.get("HVDTRAIN_CACHE"):
        return Path(environ["HVDTRAIN_CACHE"])
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hvdtrain"

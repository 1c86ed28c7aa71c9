"""A source that says while it is being read: a rank whose data does not come can be named."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.data.source import ArraySource, Source, Structure
from hvdtrain.runtime.progress import Progress


class WatchedSource(Source):
    """Another source, with `progress.busy` around each `read`.

    Args:
        source: The source.
        progress: Of this rank.
    """

    def __init__(self, source: Source, progress: Progress) -> None:
        self.name = source.name
        self._source = source
        self._progress = progress

    def __len__(self) -> int:
        return len(self._source)

    @property
    def signature(self) -> Structure:
        """See `Source.signature`."""
        return self._source.signature

    def read(self, rows: np.ndarray[Any, Any]) -> Structure:
        """See `Source.read`."""
        with self._progress.busy("reading data"):
            return self._source.read(rows)


def watched(source: Source, progress: Progress) -> Source:
    """The source with the watchdog's eye on it; arrays in memory stay as they are."""
    if isinstance(source, ArraySource) and source.arrays is not None:
        return source
    return WatchedSource(source, progress)

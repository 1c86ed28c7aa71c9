"""The collective of this process: set once by `hvdtrain.init()`, read by what needs a default.

The one piece of state that is global to the process, as Horovod and MPI are themselves.
"""

from __future__ import annotations

from hvdtrain.collectives.base import Collective
from hvdtrain.errors import CollectiveError

_current: list[Collective] = []


def use(collective: Collective | None) -> None:
    """Make `collective` the default of this process, or forget the default (None)."""
    _current[:] = [] if collective is None else [collective]


def current() -> Collective:
    """The default collective.

    Raises:
        CollectiveError: `hvdtrain.init()` was not called.
    """
    if not _current:
        raise CollectiveError(
            "hvdtrain.init() was not called. Call it once at the top of the script, before the "
            "first TensorFlow operation.")
    return _current[0]

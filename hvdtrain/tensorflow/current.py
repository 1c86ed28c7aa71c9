"""The session that Horovod's functions work in."""

from __future__ import annotations

from hvdtrain import session as sessions
from hvdtrain.collectives.horovod import HorovodCollective
from hvdtrain.errors import ConfigError, NotInitializedError
from hvdtrain.session import Session


def session() -> Session:
    """The session, or NotInitializedError."""
    found = sessions.started()
    if found is None:
        raise NotInitializedError(
            "Horovod has not been initialized. Call hvd.init() once at the top of the script, "
            "before the first TensorFlow operation.")
    return found


def several() -> HorovodCollective:
    """The collective of several ranks, which is one of Horovod."""
    collective = session().collective
    if not isinstance(collective, HorovodCollective):
        raise ConfigError(
            f"This needs Horovod, but the collective is `{collective.name}`. Call hvd.init() "
            "before anything else of hvdtrain, or hvdtrain.init(collective=\"horovod-gloo\").")
    return collective


def is_alone() -> bool:
    """Whether this is the only rank."""
    return session().world.size == 1


def rank() -> int:
    """The number of this process among all, counted from 0."""
    return session().world.rank


def size() -> int:
    """The number of processes."""
    return session().world.size

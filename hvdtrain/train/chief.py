"""Work that only the chief does, whose failure all ranks must hear of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hvdtrain.collectives.base import Collective
from hvdtrain.errors import ChiefFailedError, HvdtrainError, RanksDifferError

T = TypeVar("T")
_alone: list[bool] = []
_GONE = ("has been shut down", "Connection closed by peer", "Connection reset by peer")
"""What Horovod and Gloo say where another rank has gone."""


def is_alone() -> bool:
    """Whether the chief does something that the other ranks do not do with it."""
    return bool(_alone)


@contextmanager
def alone_on_chief() -> Iterator[None]:
    """While it is entered, what the chief saves is not waited for by other ranks."""
    _alone.append(True)
    try:
        yield
    finally:
        _alone.pop()


@contextmanager
def needs_all(what: str) -> Iterator[None]:
    """Tell in words that another rank has ended, where this one needs all.

    Args:
        what: String, what this rank does, e.g. `"calls fit"`.

    Raises:
        RanksDifferError: Another rank has ended.
    """
    try:
        yield
    except Exception as error:
        if not any(sign in str(error) for sign in _GONE):
            raise
        raise RanksDifferError(
            f"This rank {what}, which all ranks must do, and another rank has ended. Do not put "
            "it behind a condition on the rank (if hvdtrain.is_chief(): ...).") from None


def on_chief(collective: Collective, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and give its result, or its error, to all ranks.

    All ranks must call it. An error stops every rank with the same message, so that none waits
    for a chief that has gone.

    Args:
        collective: The collective to use.
        work: Callable without arguments; its result is a plain value (`gather_objects`).

    Raises:
        HvdtrainError: What `work` raised on the chief (same type), on every rank.
        ChiefFailedError: On the others, where the chief raises another error.
    """
    result: T | None = None
    failed: Exception | None = None
    if collective.rank == 0:
        try:
            with alone_on_chief():
                result = work()
        except Exception as error:
            failed = error
    outcome: tuple[T | None, tuple[str, str] | None] = collective.gather_objects(
        (result, None if failed is None else _told(failed)))[0]
    if failed is not None:
        raise failed
    if outcome[1] is not None:
        kind, message = outcome[1]
        raise _errors().get(kind, HvdtrainError)(message)
    return outcome[0]  # type: ignore[return-value]


def _told(error: Exception) -> tuple[str, str]:
    """An error of the chief as the others raise it: the name of its class, and the message."""
    if isinstance(error, HvdtrainError):
        return type(error).__name__, str(error)
    return ChiefFailedError.__name__, (
        f"Rank 0 has failed ({type(error).__name__}: {error}), and this rank cannot go on without "
        "it. Look at the output of rank 0.")


def _errors() -> dict[str, type[HvdtrainError]]:
    """The errors that a rank may name."""
    found, left = {}, [HvdtrainError]
    while left:
        kind = left.pop()
        found[kind.__name__] = kind
        left += kind.__subclasses__()
    return found

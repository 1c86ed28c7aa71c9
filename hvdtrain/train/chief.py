"""Work that only the chief does, and whose failure all ranks must learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hvdtrain.collectives.base import Collective
from hvdtrain.errors import ChiefFailedError, HvdtrainError, RanksDifferError

T = TypeVar("T")
_alone: list[bool] = []
_GONE = ("has left the shared memory", "has been shut down", "Connection closed by peer",
         "Connection reset by peer")
"""Messages of collectives when another rank is gone."""


def is_alone() -> bool:
    """Whether the chief is doing something in which the other ranks take no part."""
    return bool(_alone)


@contextmanager
def alone_on_chief() -> Iterator[None]:
    """While entered, the chief saves without waiting for the other ranks."""
    _alone.append(True)
    try:
        yield
    finally:
        _alone.pop()


@contextmanager
def needs_all(what: str) -> Iterator[None]:
    """While entered, an error because another rank has ended says what needed all ranks."""
    try:
        yield
    except Exception as error:
        if not any(sign in str(error) for sign in _GONE):
            raise
        raise RanksDifferError(
            f"This rank {what}, which all ranks must do, and another rank has ended. Do not put "
            "it behind a condition on the rank (if hvdtrain.is_chief(): ...). Or that rank has "
            "failed; then the error is there.") from None


def on_chief(collective: Collective, work: Callable[[], T]) -> T:
    """Run `work` on the chief; all ranks get its result, a plain value, or its error. All ranks.

    A HvdtrainError has the same type everywhere; for any other error, the other ranks raise
    ChiefFailedError, so that none waits for a chief that is gone.
    """
    result: T | None = None
    failed: Exception | None = None
    kind = message = ""
    if collective.rank == 0:
        try:
            with alone_on_chief():
                result = work()
        except HvdtrainError as error:
            failed, kind, message = error, type(error).__name__, str(error)
        except Exception as error:
            failed, kind = error, ChiefFailedError.__name__
            message = (f"Rank 0 has failed ({type(error).__name__}: {error}), and this rank "
                       "cannot go on without it. Look at the output of rank 0.")
    told: tuple[T, str, str] = collective.gather_objects((result, kind, message))[0]
    if failed is not None:
        raise failed
    if told[1]:
        raise _class_of(told[1])(told[2])
    return told[0]


def _class_of(name: str) -> type[HvdtrainError]:
    left = [HvdtrainError]
    for kind in left:
        if kind.__name__ == name:
            return kind
        left += kind.__subclasses__()
    return HvdtrainError

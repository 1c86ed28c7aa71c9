"""Errors of a source, on their way through TensorFlow, which keeps only their text."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.errors import DataError

_MARK = "hvdtrain cannot read "


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Put the name of a source into what reading it raises, in one line.

    An error that is no `DataError` is printed in full first.
    """
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, DataError) else f"{type(error).__name__}: "
        if kind:
            traceback.print_exc()
        raise RuntimeError(f"{_MARK}{name}: {kind}{error}\n") from error


def reading_error(error: BaseException) -> str | None:
    """What a source has raised, if an error of TensorFlow's comes from that."""
    _, found, rest = str(error).partition(_MARK)
    return rest.splitlines()[0] if found else None

"""Whether hvdtrain is at work in this process: then Keras' own methods stay Keras' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SAVING = "saving"
_depth: list[str] = []
_used: set[str] = set()


@contextmanager
def inside(what: str) -> Iterator[None]:
    """While entered, a door is open; `what` is noted as used, unless it only saves."""
    if what != SAVING:
        _used.add(what)
    _depth.append(what)
    try:
        yield
    finally:
        _depth.pop()


def is_inside() -> bool:
    """Whether a door is open."""
    return bool(_depth)


def is_saving() -> bool:
    """Whether the innermost open door is one that saves."""
    return bool(_depth) and _depth[-1] == SAVING


def note_used(what: str) -> None:
    """Note that something of the script is carried out on all ranks together."""
    _used.add(what)


def used() -> frozenset[str]:
    """What the script has used so far."""
    return frozenset(_used)


def forget() -> None:
    """Begin anew, for another script in this process."""
    _used.clear()


def replace_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of a class or module; returns a function that undoes it."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)

    def undo() -> None:
        if vars(owner).get(name) is not value:
            return
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
    return undo

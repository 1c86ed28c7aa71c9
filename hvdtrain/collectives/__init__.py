"""Moves bytes between ranks: which collective, why, and the one that this process uses."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from hvdtrain.collective_names import COLLECTIVES
from hvdtrain.collectives.base import Collective
from hvdtrain.errors import CollectiveError, ConfigError
from hvdtrain.horovod_check import HorovodCheck
from hvdtrain.world import World

_current: list[Collective] = []


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The name of the collective to create, and the reason, as one line for the plan."""

    name: str
    reason: str


def choose(requested: str, world: World, horovod: HorovodCheck, *, among: str = "") -> Choice:
    """Decide which collective this start uses (or raise), equal on ranks of one installation.

    `auto` takes one whose name begins with `among`.
    """
    if requested == "auto":
        for name in COLLECTIVES:
            if not name.startswith(among):
                continue
            reason = _class_of(name).automatic(world, horovod)
            if reason is not None:
                return Choice(name=name, reason=reason)
        if not among:
            raise CollectiveError(f"No collective fits ranks that {world.starter} started.")
        raise CollectiveError(
            f"A collective of Horovod is needed, and none fits ranks that {world.starter} started. "
            f"Start them with: hvdtrain launch -np {world.size} -- python SCRIPT")
    if requested not in COLLECTIVES:
        raise ConfigError(f"Unknown collective {requested!r}. Expected one of: "
                          f"{', '.join(('auto', *COLLECTIVES))}.")
    _class_of(requested).check_start(world, horovod)
    return Choice(name=requested, reason="asked for")


def create(choice: Choice, world: World, environ: MutableMapping[str, str],
           process_sets: Sequence[Sequence[int]] = ()) -> Collective:
    """Create and initialize the chosen collective; see `Collective.start`. All ranks."""
    return _class_of(choice.name).start(world, environ, process_sets)


def _class_of(name: str) -> type[Collective]:
    module, _, cls = COLLECTIVES[name].implementation.partition(":")
    found: type[Collective] = getattr(import_module(module), cls)
    return found


def use(collective: Collective | None) -> None:
    """Make `collective` the default of this process; None: none."""
    _current[:] = [] if collective is None else [collective]


def current() -> Collective:
    """The default collective; CollectiveError before `hvdtrain.init()`."""
    if not _current:
        raise CollectiveError(
            "hvdtrain.init() was not called. Call it once at the top of the script, before the "
            "first TensorFlow operation.")
    return _current[0]

"""Which host connects to which, and at what address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.doctor.judge.network import link_facts
from hvdtrain.doctor.judge.view import HostView
from hvdtrain.errors import LaunchError
from hvdtrain.launch.network import choose_interface, rendezvous_address

MOST_FOR_ALL_PAIRS = 8
"""With more hosts each one tries its two neighbors in a ring, as the ranks do."""


def addresses_of(views: Sequence[HostView], wanted: Sequence[str]) -> dict[str, str]:
    """The address of each host for its ranks; those without a usable interface are left out."""
    found = {}
    for view in views if len(views) > 1 else ():
        try:
            facts = link_facts(view)
            found[view.name] = facts.interfaces[choose_interface(view.name, facts, wanted)]
        except LaunchError:
            continue  # `judge_interface` tells
    return found


def targets_of(view: HostView, views: Sequence[HostView], addresses: Mapping[str, str],
               launcher: str | None) -> list[dict[str, Any]]:
    """To whom a host connects: the others, and the rendezvous at the launcher.

    Args:
        view: The host.
        views: All hosts.
        addresses: From `addresses_of`.
        launcher: Name of the launcher where it takes no ranks; nobody need be reached from it.
    """
    if view.name == launcher:
        return []
    ranks = [other for other in views if other.name != launcher and other.name in addresses]
    places = {other.name: addresses[other.name] for other in _partners(view, ranks)}
    for other in views:
        if other.name == launcher and not view.is_local:
            try:
                places[other.name] = rendezvous_address(view.name, link_facts(view))
            except LaunchError:
                continue
    ports = {other.name: other.facts.network.port for other in views
             if other.facts.network is not None}
    return [{"host": name, "address": address, "port": ports[name]}
            for name, address in places.items() if name in ports]


def _partners(view: HostView, ranks: Sequence[HostView]) -> list[HostView]:
    others = [other for other in ranks if other.name != view.name]
    if len(ranks) <= MOST_FOR_ALL_PAIRS or view not in ranks:
        return others
    at = ranks.index(view)
    return [ranks[at - 1], ranks[(at + 1) % len(ranks)]]

"""Waits until all ranks are there, before Horovod is initialised.

`hvd.init()` over Gloo allows 30 s between the first and the last rank, and ends in SIGABRT beyond:
too little for TensorFlow's import on a slow file system, and the same limit finds a lost peer in
training, so it should not be raised. The ranks meet here instead, in the key-value store of the
rendezvous (horovodrun's, our launcher's or `bootstrap`'s), where waiting costs nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from hvdtrain.errors import WorldError
from hvdtrain.runtime.store import Store
from hvdtrain.runtime.waiting import Wait, ranks_place
from hvdtrain.world.secret import SECRET_VARIABLE
from hvdtrain.world.world import World

_SCOPE = "hvdtrain.meet"
_me: dict[int, str] = {}


def meet(world: World, environ: Mapping[str, str], *, name: str = "start",
         timeout_s: float = 600.0) -> None:
    """Return when all ranks have called this. All ranks; once for each `name`.

    Args:
        world: Which rank this is, of how many.
        environ: Mapping with HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT; without them, and for one
            rank, nothing is done.
        name: String, tells one meeting from another.
        timeout_s: Float, how long to wait for the last rank.

    Raises:
        WorldError: Ranks are missing when the time is over (they are named), another process is
            this rank already, the rendezvous has gone, or this process was told to stop.
    """
    store = Store.of(environ, f"{_SCOPE}.{name}")
    if world.size == 1 or store is None:
        return
    keys = [str(rank) for rank in range(world.size)]
    claim(store, str(world.rank), who_am_i(world).encode(), f"Rank {world.rank}")
    wait = Wait(timeout_s, lambda: ranks_place(world, store.missing(keys)) or "rank 0's word")
    if world.is_chief:
        _check(world, store, keys, store.wait(keys, wait), timeout_s)
        store.put("go")
    elif "go" not in store.wait(["go"], wait):
        _check(world, store, keys, {}, timeout_s)


def claim(store: Store, key: str, value: bytes, what: str) -> None:
    """Set what only one process may set.

    Args:
        store: Where.
        key: String, the key.
        value: What tells this process from any other.
        what: String for the message, what this process is.

    Raises:
        WorldError: Another process has set it; it is named.
    """
    if store.put(key, value):
        return
    other = (store.get(key) or b"").decode(errors="replace")
    raise WorldError(
        f"{what} of this job is taken: {other} was first at the rendezvous "
        f"{store.address}:{store.port}; this is {value.decode(errors='replace')}. Expected one "
        "process for each rank. Was the job started twice, or do two jobs have the same hosts, "
        f"ports and sizes? End the other, or give each job a {SECRET_VARIABLE} of its own, the "
        "same on all of its ranks.")


def who_am_i(world: World) -> str:
    """This process, in words that no other has."""
    pid = os.getpid()
    if pid not in _me:
        _me[pid] = f"process {pid} on {world.host} (since {time.strftime('%H:%M:%S')})"
    return _me[pid]


def _check(world: World, store: Store, keys: list[str], found: Mapping[str, bytes],
           timeout_s: float) -> None:
    """Name who is missing."""
    if len(found) == len(keys):
        return
    missing = store.missing(keys)
    who = (f"missing: {ranks_place(world, missing)}" if missing else
           "all are at the rendezvous, but rank 0 has not gone on")
    raise WorldError(
        f"Not all ranks have started after {timeout_s:g} s; {who}. Expected all of them. "
        "Look for errors in the output of those ranks, and for hosts that are slow.")

"""Waits until all ranks are there, before Horovod is initialised.

`hvd.init()` over Gloo allows 30 s between the first and the last rank, and ends in SIGABRT beyond:
too little for TensorFlow's import on a slow file system, and the same limit finds a lost peer in
training, so it should not be raised. The ranks meet here instead, in the key-value store of the
rendezvous (horovodrun's, our launcher's or `bootstrap`'s), where waiting costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from hvdtrain.errors import WorldError
from hvdtrain.runtime.store import Store
from hvdtrain.world.world import World

_SCOPE = "hvdtrain.meet"


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
        WorldError: Ranks are missing when the time is over (rank 0 names them), or the
            rendezvous has gone.
    """
    store = Store.of(environ, f"{_SCOPE}.{name}")
    if world.size == 1 or store is None:
        return
    deadline = time.monotonic() + timeout_s
    store.put(str(world.rank))
    if world.is_chief:
        _await(store, [str(rank) for rank in range(world.size)], deadline, timeout_s)
        store.put("go")
    else:
        _await(store, ["go"], deadline, timeout_s)


def _await(store: Store, keys: list[str], deadline: float, timeout_s: float) -> None:
    missing = set(keys) - set(store.wait(keys, deadline=deadline))
    if not missing:
        return
    names = ", ".join(key for key in keys if key in missing)
    who = "rank 0 gave no sign" if keys == ["go"] else f"ranks missing: {names}"
    raise WorldError(
        f"Not all ranks have started after {timeout_s:g} s: {who}. Expected all of them. "
        "Look for errors in the output of those ranks, and for hosts that are slow.")

"""What every rank wants to tell the others at the start, with no TensorFlow and no collective.

For engines whose processes find each other by addresses: each rank puts its text into the store
of the rendezvous, under whichever starter.
"""

from __future__ import annotations

import atexit
import os
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from hvdtrain.errors import WorldError
from hvdtrain.optional import require
from hvdtrain.runtime.bootstrap import start_bootstrap
from hvdtrain.runtime.meet import claim, meet, take_place
from hvdtrain.runtime.store import Store
from hvdtrain.runtime.waiting import Wait, ranks_place
from hvdtrain.world.network import interfaces, route_to
from hvdtrain.world.rendezvous import listen_on_all, serve
from hvdtrain.world.secret import JobKey, new_secret
from hvdtrain.world.world import World

_LEAVE_S = 30.0


def open_store(world: World, environ: Mapping[str, str], scope: str, *,
               timeout_s: float = 600.0) -> Store:
    """The store of this start. All ranks.

    Where the starter serves none, rank 0 does, to the end of its process.

    Args:
        world: Which rank this is.
        environ: The environment.
        scope: String that keeps these keys from those of others.
        timeout_s: Float, how long to wait for rank 0.

    Raises:
        WorldError: The ranks cannot find each other.
    """
    if world.rendezvous == "gloo":
        store = Store.of(environ, f"{scope}{take_place(world, environ)}")
        if store is not None:
            return store
    if world.rendezvous == "mpi" and world.local_size != world.size:
        return _open_through_mpi(world, scope)
    # Under mpirun on one host all ranks are children of one daemon.
    start = str(os.getppid()) if world.rendezvous == "mpi" else ""
    made = start_bootstrap(world, environ, timeout_s=timeout_s, start=start)
    if made.server is not None:
        atexit.register(made.server.close)
    store = Store.of(made.variables, scope)
    if store is None:
        raise WorldError(f"The starter {world.starter} gives the {world.size} ranks no way to "
                         "find each other. Start them with hvdtrain launch.")
    return store


def exchange(store: Store, world: World, name: str, text: str, *, who: Sequence[str] = (),
             timeout_s: float = 600.0) -> list[str]:
    """Give every rank the text of every rank. All ranks.

    Args:
        store: From `open_store`.
        world: Which rank this is.
        name: String, tells one exchange from another.
        text: String, of this rank.
        who: Strings for messages, what each rank is. Default: `rank 0` and so on, with its host.
        timeout_s: Float, how long to wait for the last rank.

    Returns:
        The texts in the order of the ranks.

    Raises:
        WorldError: Ranks are missing when the time is over (they are named), another process is
            this rank already, or this process was told to stop.
    """
    keys = [f"{name}.{rank}" for rank in range(world.size)]
    claim(store, keys[world.rank], text.encode(), who[world.rank] if who else f"Rank {world.rank}")

    def missing() -> str:
        left = store.missing(keys)
        places = ranks_place(world, left)
        return f"{', '.join(who[rank] for rank in left)}: {places}" if who and left else places

    found = store.wait(keys, Wait(timeout_s, missing))
    if len(found) < len(keys):
        raise WorldError(
            f"Not all of the {world.size} processes have started after {timeout_s:g} s. Missing: "
            f"{missing()}. Look for errors in their output, and for hosts that are slow.")
    return [found[key].decode() for key in keys]


def meet_at(world: World, environ: Mapping[str, str], port: int, *,
            timeout_s: float = 600.0) -> None:
    """Return when all ranks are there; nothing of it is left. All ranks.

    For processes that TensorFlow connects: while it waits for one, it says nothing and takes
    SIGTERM for itself.

    Args:
        world: Which rank this is.
        environ: The environment.
        port: At which rank 0 serves meanwhile.
        timeout_s: Float, how long to wait.

    Raises:
        WorldError: Ranks are missing when the time is over (they are named), another process is
            this rank already, or this process was told to stop.
    """
    made = start_bootstrap(world, environ, timeout_s=timeout_s, ports=(port,))
    try:
        meet(world, made.variables, name="before", timeout_s=timeout_s)
        store = Store.of(made.variables, "hvdtrain.meet.left")
        if store is not None and world.is_chief:
            others = [str(rank) for rank in range(1, world.size)]
            store.wait(others, Wait(_LEAVE_S, lambda: "the others to leave the rendezvous"))
        elif store is not None:
            store.put(str(world.rank))
    finally:
        if made.server is not None:
            made.server.close()


def _open_through_mpi(world: World, scope: str) -> Store:
    """Several hosts under mpirun, which tells no rank the name of another's host.

    MPI carries the secret; each rank tells the addresses from which it may come.
    """
    require("mpi4py", "finding ranks on other hosts under mpirun")
    from mpi4py import MPI
    told = gather_texts(MPI.COMM_WORLD, "\n".join(
        [world.host, *(a for a in interfaces().values() if not a.startswith("127."))]))
    everyone = [text.split("\n") for text in told]
    place = ""
    if world.is_chief:
        other = next(host for host, *_ in everyone if host != world.host)
        address, key = route_to(other).own_address, JobKey(new_secret())
        server = serve(
            listen_on_all([address]), hosts=[host for host, *_ in everyone],
            slots=[1] * world.size, key=key,
            sources=sorted({address for _, *addresses in everyone for address in addresses}))
        atexit.register(server.close)
        place = f"{address} {server.port} {key.secret}"
    address, port, secret = gather_texts(MPI.COMM_WORLD, place)[0].split()
    MPI.Finalize()
    key = JobKey(secret)
    return Store(address, int(port), scope, key=key, capability=key.capability)


def gather_texts(communicator: Any, text: str) -> list[str]:
    """The text of each rank of an mpi4py communicator, sent as bytes: mpi4py pickles objects."""
    data = text.encode()
    counts = array("q", [0] * communicator.Get_size())
    communicator.Allgather(array("q", [len(data)]), counts)
    joined = bytearray(sum(counts))
    communicator.Allgatherv(data, [joined, list(counts)])
    ends = list(accumulate(counts))
    return [joined[end - count:end].decode() for end, count in zip(ends, counts, strict=True)]

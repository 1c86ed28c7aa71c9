"""What every rank wants to tell the others at the start, with no TensorFlow and no collective.

For engines whose processes find each other by addresses: each rank puts its text into the store
of the rendezvous, under whichever starter.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping, Sequence

from hvdtrain.errors import WorldError
from hvdtrain.optional import require
from hvdtrain.runtime.bootstrap import start_bootstrap
from hvdtrain.runtime.store import Store
from hvdtrain.world.network import route_to
from hvdtrain.world.rendezvous import listen, serve
from hvdtrain.world.world import World


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
    store = Store.of(environ, scope)
    if store is not None and world.rendezvous == "gloo":
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
        who: Strings for messages, what each rank is. Default: `rank 0` and so on.
        timeout_s: Float, how long to wait for the last rank.

    Returns:
        The texts in the order of the ranks.

    Raises:
        WorldError: Ranks are missing when the time is over; they are named.
    """
    store.put(f"{name}.{world.rank}", text.encode())
    keys = [f"{name}.{rank}" for rank in range(world.size)]
    found = store.wait(keys, deadline=time.monotonic() + timeout_s)
    missing = [who[rank] if who else f"rank {rank}"
               for rank, key in enumerate(keys) if key not in found]
    if missing:
        raise WorldError(
            f"Not all of the {world.size} processes have started after {timeout_s:g} s. Missing: "
            f"{', '.join(missing)}. Look for errors in their output, and for hosts that are slow.")
    return [found[key].decode() for key in keys]


def _open_through_mpi(world: World, scope: str) -> Store:
    """Several hosts under mpirun, which tells no rank the name of another's host."""
    require("mpi4py", "finding ranks on other hosts under mpirun")
    from mpi4py import MPI
    everyone: list[str] = MPI.COMM_WORLD.allgather(world.host)
    port = 0
    if world.is_chief:
        server = serve(listen(""), hosts=everyone, slots=[1] * world.size)
        atexit.register(server.close)
        port = server.port
    other = next(host for host in everyone if host != everyone[0])
    address = route_to(other).own_address if world.is_chief else ""
    address, port = MPI.COMM_WORLD.bcast((address, port))
    MPI.Finalize()
    return Store(address, port, scope)

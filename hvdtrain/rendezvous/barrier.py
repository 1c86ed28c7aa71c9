"""Waits at the rendezvous until all ranks are there, and exchanges texts.

`hvd.init()` over Gloo allows 30 s between the first and the last rank, and then ends in SIGABRT:
too little for TensorFlow's import on a slow file system, and the same limit finds a lost peer in
training, so it should not be raised. Here waiting costs nothing.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from hvdtrain.errors import WorldError
from hvdtrain.optional import require
from hvdtrain.rendezvous.bootstrap import start_bootstrap
from hvdtrain.rendezvous.client import RendezvousClient, Wait, ranks_place
from hvdtrain.rendezvous.secret import TWIN, JobKey, new_secret
from hvdtrain.rendezvous.serve import listen_on_all, serve
from hvdtrain.world import World
from hvdtrain.world.network import interfaces, route_to

_SCOPE, _PLACES = "hvdtrain.meet", "hvdtrain.places"
_MOST_PROGRAMS, _MANY = 1000, 32
_LEAVE_S = 30.0


def rendezvous_barrier(world: World, environ: Mapping[str, str], *, name: str = "start",
                       timeout_s: float = 600.0) -> None:
    """Return when all ranks have called this, or WorldError. All ranks; once for each `name`."""
    # Without HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT, and for one rank, it does nothing.
    places = RendezvousClient.of(environ, _PLACES)
    if world.size == 1 or places is None:
        return
    client = places.in_scope(f"{_SCOPE}.{name}{_take_place(world, places)}")
    keys = [str(rank) for rank in range(world.size)]
    awaited = keys if world.is_chief else ["go"]
    client.put(str(world.rank))

    def words() -> str:
        if world.size > _MANY and not world.is_chief:
            return _ask_chief(world)
        return ranks_place(world, client.missing(keys)) or "rank 0 to go on"

    if len(client.wait(awaited, Wait(timeout_s, words))) == len(awaited):
        if world.is_chief:
            client.put("go")
        return
    missing = client.missing(keys)
    who = (f"missing: {ranks_place(world, missing)}" if missing else
           "all are at the rendezvous, but rank 0 has not gone on")
    raise WorldError(
        f"Not all ranks have started after {timeout_s:g} s; {who}. Expected all of them. "
        "Look for errors in the output of those ranks, and for hosts that are slow.")


def barrier_at_port(world: World, environ: Mapping[str, str], port: int, *,
                    timeout_s: float = 600.0) -> None:
    """As `rendezvous_barrier`, at a port of rank 0's host that is free again afterwards."""
    # For processes that TensorFlow connects: while it waits for one, it prints nothing and handles
    # SIGTERM itself.
    made = start_bootstrap(world, environ, timeout_s=timeout_s, ports=(port,))
    try:
        rendezvous_barrier(world, made.variables, name="before", timeout_s=timeout_s)
        client = RendezvousClient.of(made.variables, "hvdtrain.meet.left")
        if client is not None and world.is_chief:
            client.wait(map(str, range(1, world.size)),
                        Wait(_LEAVE_S, lambda: "the others to leave the rendezvous"))
        elif client is not None:
            client.put(str(world.rank))
    finally:
        if made.server is not None:
            made.server.close()


def open_rendezvous(world: World, environ: Mapping[str, str], scope: str, *,
                    timeout_s: float = 600.0) -> RendezvousClient:
    """The rendezvous of this start, served by rank 0 where the starter does not. All ranks."""
    places = RendezvousClient.of(environ, _PLACES)
    if world.rendezvous == "gloo" and places is not None:
        return places.in_scope(f"{scope}{_take_place(world, places)}")
    if world.rendezvous == "mpi" and world.local_size != world.size:
        return _open_through_mpi(world, scope)
    # Under mpirun on one host all ranks are children of one daemon.
    start = str(os.getppid()) if world.rendezvous == "mpi" else ""
    made = start_bootstrap(world, environ, timeout_s=timeout_s, start=start)
    if made.server is not None:
        atexit.register(made.server.close)
    client = RendezvousClient.of(made.variables, scope)
    if client is None:
        raise WorldError(f"The starter {world.starter} gives the {world.size} ranks no way to "
                         "find each other. Start them with hvdtrain launch.")
    return client


def exchange(client: RendezvousClient, world: World, name: str, text: str, *,
             who: Sequence[str] = (), timeout_s: float = 600.0) -> list[str]:
    """Give every rank the text of every rank, in the order of the ranks. All ranks.

    `name` is unique to an exchange; `who` holds what each rank is, for messages.
    """
    keys, everyone = [f"{name}.{rank}" for rank in range(world.size)], f"{name}.all"
    key, value = keys[world.rank], text.encode()
    if not client.put(key, value):
        raise _taken(client, client.get(key) or b"", value,
                     who[world.rank] if who else f"Rank {world.rank}")

    def missing() -> str:
        if world.size > _MANY and not world.is_chief:
            return _ask_chief(world)
        left = client.missing(keys)
        places = ranks_place(world, left)
        return f"{', '.join(who[rank] for rank in left)}: {places}" if who and left else places

    # Rank 0 reads the texts one by one, and the others read all at once from it.
    wait = Wait(timeout_s, missing)
    if world.is_chief and len(found := client.wait(keys, wait)) == len(keys):
        client.put(everyone, json.dumps([found[key].decode() for key in keys]).encode())
    told = client.wait([everyone], wait)
    if everyone not in told:
        raise WorldError(
            f"Not all of the {world.size} processes have started after {timeout_s:g} s. Missing: "
            f"{missing()}. Look for errors in their output, and for hosts that are slow.")
    return list(json.loads(told[everyone]))


def gather_texts(communicator: Any, text: str) -> list[str]:
    """The text of each rank of an mpi4py communicator, sent as bytes: mpi4py pickles objects."""
    data = text.encode()
    counts = array("q", [0] * communicator.Get_size())
    communicator.Allgather(array("q", [len(data)]), counts)
    joined = bytearray(sum(counts))
    communicator.Allgatherv(data, [joined, list(counts)])
    ends = list(accumulate(counts))
    return [joined[end - count:end].decode() for end, count in zip(ends, counts, strict=True)]


def _open_through_mpi(world: World, scope: str) -> RendezvousClient:
    """Several hosts under mpirun, which does not tell a rank the names of the other hosts."""
    # MPI carries the secret; each rank sends the addresses from which it may connect.
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
    return RendezvousClient(address, int(port), scope, key=key, capability=key.capability)


def _ask_chief(world: World) -> str:
    """In place of who is missing, where all ranks would ask for all others at once."""
    return f"{ranks_place(world, [0])}, which says for which ranks it waits"


def _take_place(world: World, places: RendezvousClient) -> str:
    """Claim this rank for this process; the result ends the names of scopes, equal on all ranks."""
    # The rendezvous of a launcher outlives the processes of the ranks. Where a rank runs one
    # program after the other (`bash -c "python a.py; python b.py"`), each has its own keys: "" for
    # the first.
    me = _this_process(os.getpid(), world.host)
    for number in range(_MOST_PROGRAMS):
        key = f"{number}.{world.rank}"
        if places.put(key, me):
            return f".{number}" if number else ""
        other = places.get(key) or b""
        if world.rendezvous != "gloo" or _is_alive(other):
            raise _taken(places, other, me, f"Rank {world.rank}")
    return ""


def _taken(client: RendezvousClient, other: bytes, value: bytes, what: str) -> WorldError:
    return WorldError(
        f"{what} of this job is taken: {_words(other)} was first at the rendezvous "
        f"{client.address}:{client.port}; this is {_words(value)}. Expected one process for each "
        f"rank. {TWIN}")


@cache  # the same text, with its time, as long as this process runs
def _this_process(pid: int, host: str) -> bytes:
    return json.dumps({
        "pid": pid, "host": host, "node": socket.gethostname(), "begun": _begun(pid),
        "since": time.strftime("%H:%M:%S")}).encode()


def _words(value: bytes) -> str:
    text = value.decode(errors="replace")
    try:
        return "process {pid} on {host} (since {since})".format(**json.loads(text))
    except (ValueError, TypeError, KeyError):
        return text[:200]


def _is_alive(value: bytes) -> bool:
    """Whether the process with this text runs on this host now."""
    try:
        told = json.loads(value)
        return bool(told["node"] == socket.gethostname()
                    and told["begun"] == _begun(int(told["pid"])) != "")
    except (ValueError, TypeError, KeyError):
        return False


def _begun(pid: int) -> str:
    """When a process started, in ticks since the host did; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""

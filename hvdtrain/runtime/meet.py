"""Waits until all ranks are there, before Horovod is initialised.

`hvd.init()` over Gloo allows 30 s between the first and the last rank, and ends in SIGABRT beyond:
too little for TensorFlow's import on a slow file system, and the same limit finds a lost peer in
training, so it should not be raised. The ranks meet here instead, in the key-value store of the
rendezvous (horovodrun's, our launcher's or `bootstrap`'s), where waiting costs nothing.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import WorldError
from hvdtrain.runtime.store import Store
from hvdtrain.runtime.waiting import Wait, rank_place, ranks_place
from hvdtrain.world.secret import SECRET_VARIABLE
from hvdtrain.world.world import World

_SCOPE, _PLACES = "hvdtrain.meet", "hvdtrain.places"
_MOST_PROGRAMS, _MANY = 1000, 32
_me: dict[int, bytes] = {}


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
    if world.size == 1 or Store.of(environ, _SCOPE) is None:
        return
    store = Store.of(environ, f"{_SCOPE}.{name}{take_place(world, environ)}")
    if store is None:
        return
    keys = [str(rank) for rank in range(world.size)]
    store.put(str(world.rank))

    def words() -> str:
        if world.size > _MANY and not world.is_chief:  # they would all ask for all at once
            return f"{rank_place(world, 0)}, which says for which ranks it waits"
        return ranks_place(world, store.missing(keys)) or "rank 0 to go on"

    wait = Wait(timeout_s, words)
    if world.is_chief:
        _check(world, store, keys, store.wait(keys, wait), timeout_s)
        store.put("go")
    elif "go" not in store.wait(["go"], wait):
        _check(world, store, keys, {}, timeout_s)


def take_place(world: World, environ: Mapping[str, str]) -> str:
    """Be the one process of this rank.

    The rendezvous of a launcher outlives the processes of the ranks. Where a rank runs one program
    after the other (`bash -c "python a.py; python b.py"`), each has keys of its own.

    Args:
        world: Which rank this is.
        environ: As for `meet`.

    Returns:
        The end of the names of scopes, equal on all ranks: "" for the first program.

    Raises:
        WorldError: Another process is this rank; it is named.
    """
    store = Store.of(environ, _PLACES)
    me = _who_am_i(world)
    for number in range(_MOST_PROGRAMS if store is not None else 0):
        key = f"{number}.{world.rank}"
        if store is None or store.put(key, me):
            return f".{number}" if number else ""
        other = store.get(key) or b""
        if world.rendezvous != "gloo" or _is_alive(other):
            raise _taken(store, other, me, f"Rank {world.rank}")
    return ""


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
    if not store.put(key, value):
        raise _taken(store, store.get(key) or b"", value, what)


def _taken(store: Store, other: bytes, value: bytes, what: str) -> WorldError:
    return WorldError(
        f"{what} of this job is taken: {_words(other)} was first at the rendezvous "
        f"{store.address}:{store.port}; this is {_words(value)}. Expected one process for each "
        "rank. Was the job started twice, or do two jobs have the same hosts, ports and sizes? "
        f"End the other, or give each job a {SECRET_VARIABLE} of its own, the same on all of its "
        "ranks.")


def _who_am_i(world: World) -> bytes:
    """This process, in a text that no other has."""
    pid = os.getpid()
    if pid not in _me:
        _me[pid] = json.dumps({
            "pid": pid, "host": world.host, "node": socket.gethostname(), "begun": _begun(pid),
            "since": time.strftime("%H:%M:%S")}).encode()
    return _me[pid]


def _words(value: bytes) -> str:
    text = value.decode(errors="replace")
    try:
        return "process {pid} on {host} (since {since})".format(**json.loads(text))
    except (ValueError, TypeError, KeyError):
        return text[:200]


def _is_alive(value: bytes) -> bool:
    """Whether a process that has said who it is runs on this host now."""
    try:
        told = json.loads(value)
        return bool(told["node"] == socket.gethostname()
                    and told["begun"] == _begun(int(told["pid"])) != "")
    except (ValueError, TypeError, KeyError):
        return False


def _begun(pid: int) -> str:
    """When a process began, in ticks since the host did; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


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

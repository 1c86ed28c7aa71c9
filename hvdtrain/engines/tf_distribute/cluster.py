"""Where the processes of `multi_worker_mirrored` find each other: the contents of TF_CONFIG."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from hvdtrain.errors import WorldError
from hvdtrain.runtime.exchange import exchange, meet_at, open_store
from hvdtrain.runtime.watchdog.watchdog import own_addresses
from hvdtrain.world import World
from hvdtrain.world.network import interfaces

_SCOPE = "hvdtrain.tf"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The addresses of all processes, and which one this is."""

    addresses: dict[str, tuple[str, ...]]
    """From task type, such as `worker`, to `HOST:PORT` of each."""
    task_type: str
    task_index: int
    admitted: tuple[str, ...] = ()
    """Addresses from which TensorFlow's server takes connections; empty: from all."""

    @property
    def own_port(self) -> int:
        """At which TensorFlow listens in this process."""
        return int(self.addresses[self.task_type][self.task_index].rpartition(":")[2])


def find_cluster(world: World, environ: Mapping[str, str], *,
                 timeout_s: float = 600.0) -> Cluster:
    """Agree on the addresses of all processes. All of them must call it.

    A cluster that came in TF_CONFIG is used as it is, once all of its processes are there. They
    meet at the address of the first one, before TensorFlow listens there. Otherwise each process
    offers an address and a free port of its own.

    Args:
        world: Which process this is.
        environ: The environment.
        timeout_s: Float, how long to wait for the last process.

    Raises:
        WorldError: Processes are missing when the time is over; they are named.
    """
    if world.starter == "tf_config":
        cluster = cluster_in(environ["TF_CONFIG"])
        first = (cluster.addresses.get("chief") or cluster.addresses["worker"])[0]
        meet_at(world, environ, int(first.rpartition(":")[2]), timeout_s=timeout_s)
        return cluster
    store = open_store(world, environ, _SCOPE, timeout_s=timeout_s)
    address = own_addresses(world, environ)[0]
    with closing(socket.create_server((address, 0))) as held:  # so that no one else takes it
        mine = [f"{address}:{held.getsockname()[1]}", *interfaces().values()]
        told = [json.loads(text) for text in exchange(
            store, world, "address", json.dumps(mine), timeout_s=timeout_s)]
    return Cluster(addresses={"worker": tuple(place for place, *_ in told)}, task_type="worker",
                   task_index=world.rank,
                   admitted=tuple(sorted({a for _, *addresses in told for a in addresses})))


def cluster_in(tf_config: str) -> Cluster:
    """The cluster in a TF_CONFIG, which `world.detect` has checked.

    Raises:
        WorldError: A task that trains has no address.
    """
    value = json.loads(tf_config)
    addresses = {kind: tuple(places) for kind, places in value["cluster"].items()
                 if kind in ("chief", "worker")}
    task = value["task"]
    kind, index = str(task["type"]), int(task["index"])
    if index >= len(addresses.get(kind, ())):
        raise WorldError(
            f"TF_CONFIG makes this process the {kind!r} with index {index}. Strategy "
            "multi_worker_mirrored knows tasks 'chief' and 'worker'. Name it one of these.")
    return Cluster(addresses=addresses, task_type=kind, task_index=index)

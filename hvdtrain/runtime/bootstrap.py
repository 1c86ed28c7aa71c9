"""Starts Horovod's Gloo where the starter prepared nothing (srun, TFJob): no MPI, no ssh.

Needs only rank and size. Rank 0 serves the rendezvous on a port that every rank derives from what
they have in common (job, step, hosts); a token keeps a stranger's server on that port from being
mistaken for it. Each rank uses the network interface on its way to rank 0.
"""

from __future__ import annotations

import atexit
import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import WorldError
from hvdtrain.hosts import Slot, rank_variables
from hvdtrain.world.network import (
    NETWORK_VARIABLE,
    Route,
    check_wanted,
    find_interface,
    interfaces,
    route_to,
)
from hvdtrain.world.rendezvous import RendezvousServer, gloo_variables, listen, serve
from hvdtrain.world.rendezvous_server import TOKEN_PATH
from hvdtrain.world.world import World

_PORTS, _FIRST_PORT, _CANDIDATES = 10000, 20000, 16  # below Linux's ephemeral ports (32768)
_STRIDE = 7919
_ASK_TIMEOUT_S, _RETRY_S = 2.0, 0.05


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """The rendezvous as this rank found it."""

    variables: dict[str, str]
    """`HOROVOD_*` variables to set before `hvd.init()`."""
    server: RendezvousServer | None
    """On rank 0; it must be kept for as long as ranks may initialise."""


def bootstrap(world: World, environ: Mapping[str, str], *,
              timeout_s: float = 120.0) -> dict[str, str]:
    """Start or find the rendezvous. All ranks; writes no variable itself.

    Args:
        world: A world whose `rendezvous` is `"bootstrap"`; with one of another kind nothing is
            done and the result is empty.
        environ: The environment: SLURM_JOB_ID and SLURM_STEP_ID tell this start from others,
            HOROVOD_GLOO_IFACE names the interface where the routing table is wrong, or
            HVDTRAIN_NETWORK_INTERFACE names and networks, of which the first that is here counts.
        timeout_s: Float, how long to wait for rank 0.

    Returns:
        The `HOROVOD_*` variables to set before Horovod is initialised.

    Raises:
        WorldError: Rank 0 cannot be found in time, or has no free port.
    """
    if world.rendezvous != "bootstrap" or world.size == 1:
        return {}
    made = start_bootstrap(world, environ, timeout_s=timeout_s)
    if made.server is not None:
        atexit.register(made.server.close)
    return made.variables


def start_bootstrap(world: World, environ: Mapping[str, str], *, timeout_s: float,
                    start: str = "") -> Bootstrap:
    """As `bootstrap`, with the server in the caller's hands.

    Args:
        world: As for `bootstrap`.
        environ: As for `bootstrap`.
        timeout_s: As for `bootstrap`.
        start: String that all ranks of this start share and others do not, where the environment
            holds none.
    """
    if not world.hosts:
        raise WorldError(
            f"The starter {world.starter} does not tell the hosts of the {world.size} ranks, so "
            "they cannot find each other. Start them with: hvdtrain launch, horovodrun, mpirun "
            "or srun.")
    seed = ".".join([environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", ""),
                     ",".join(world.hosts), str(world.size), *([start] if start else [])])
    deadline = time.monotonic() + timeout_s
    route = _route(world, deadline)
    server: RendezvousServer | None = None
    if world.rank == 0:
        server = _serve(world, seed, route)
        port = server.port
    else:
        port = _find(world, seed, route, deadline)
    interface = _asked_interface(world, environ) or route.interface
    address = route.own_address if world.rank == 0 else route.address
    return Bootstrap(server=server, variables=_variables(world, interface, address, port))


def _asked_interface(world: World, environ: Mapping[str, str]) -> str | None:
    wanted = environ.get(NETWORK_VARIABLE, "")
    if not wanted:
        return environ.get("HOROVOD_GLOO_IFACE")
    has = interfaces()
    check_wanted(wanted.split(","))
    found = find_interface(wanted.split(","), has)
    if found is None:
        listed = ", ".join(f"{name} ({address})" for name, address in has.items())
        raise WorldError(
            f"{world.host} has no network interface {wanted.replace(',', ' or ')}. It has: "
            f"{listed}. Expected one of these, or a network such as 10.0.0.0/8, in "
            f"{NETWORK_VARIABLE}.")
    return found


def candidate_ports(seed: str) -> list[int]:
    """The ports at which rank 0 may serve, best first; the same for all ranks of one start."""
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big")
    return [_FIRST_PORT + (start + i * _STRIDE) % _PORTS for i in range(_CANDIDATES)]


def _token(seed: str) -> str:
    return hashlib.sha256(f"hvdtrain {seed}".encode()).hexdigest()


def _route(world: World, deadline: float) -> Route:
    """The way to rank 0; for the ranks of its own host the way to some other host.

    Host names of new pods resolve late, so the look-up is repeated.
    """
    others = [host for host in world.hosts if host != world.hosts[0]]
    if not others:
        return Route(own_address="127.0.0.1", interface="lo", address="127.0.0.1")
    beside_chief = world.rank < world.slots[0]
    target = others[0] if beside_chief else world.hosts[0]
    while True:
        try:
            route = route_to(target)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise WorldError(
                    f"The host name {target} cannot be resolved: {error}. Expected a name that "
                    "every host of the job knows.") from error
            time.sleep(1.0)
    if not beside_chief:
        return route
    return Route(own_address=route.own_address, interface=route.interface,
                 address=route.own_address)


def _serve(world: World, seed: str, route: Route) -> RendezvousServer:
    one_host = len(set(world.hosts)) == 1
    for port in candidate_ports(seed):
        try:
            listener = listen(route.own_address if one_host else "", port)
        except OSError:
            continue
        return serve(listener, hosts=world.hosts, slots=world.slots, token=_token(seed))
    raise WorldError(
        f"None of the ports {candidate_ports(seed)} is free on {world.host}, so the ranks have no "
        "place to meet. Are other jobs left over on this host? End them, or submit the job anew.")


def _find(world: World, seed: str, route: Route, deadline: float) -> int:
    token = _token(seed).encode()
    while True:
        for port in candidate_ports(seed):
            if _ask(route.address, port) == token:
                return port
        if time.monotonic() > deadline:
            raise WorldError(
                f"No rendezvous of this job at {route.address}, ports "
                f"{candidate_ports(seed)[0]} and following. Expected rank 0 on {world.hosts[0]} "
                "to serve it. Is rank 0 running, and does a firewall let the hosts reach each "
                "other?")
        time.sleep(_RETRY_S)


def _ask(address: str, port: int) -> bytes | None:
    try:
        with urllib.request.urlopen(  # noqa: S310 - the scheme is fixed
                f"http://{address}:{port}{TOKEN_PATH}", timeout=_ASK_TIMEOUT_S) as answer:
            content: bytes = answer.read()
            return content
    except (OSError, urllib.error.URLError, http.client.HTTPException):
        return None  # nobody, or somebody who speaks another language


def _variables(world: World, interface: str, address: str, port: int) -> dict[str, str]:
    cross_rank = 0 if world.cross_rank is None else world.cross_rank
    cross_size = 1 if world.cross_size is None else world.cross_size
    slot = Slot(rank=world.rank, host=world.host, local_rank=world.local_rank,
                local_size=world.local_size, cross_rank=cross_rank, cross_size=cross_size)
    return rank_variables(slot, world.size) | gloo_variables(
        address=address, port=port, interface=interface)

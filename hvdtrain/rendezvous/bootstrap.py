"""Starts Horovod's Gloo where the starter prepared nothing (srun, TFJob): no MPI, no ssh.

Needs only rank and size. Rank 0 serves the rendezvous on a port that every rank derives from the
key of the job: from its secret, if it has one, and from what its ranks have in common (job, step,
hosts, the addresses in TF_CONFIG). A rendezvous proves that it has the same key before a rank talks
to it. Each rank uses the network interface on its route to rank 0.
"""

from __future__ import annotations

import atexit
import hashlib
import http.client
import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hvdtrain.errors import WorldError
from hvdtrain.hosts import Slot, rank_variables
from hvdtrain.rendezvous.client import Wait, host_place, ranks_place
from hvdtrain.rendezvous.secret import SECRET_VARIABLE, TWIN, JobKey, job_key
from hvdtrain.rendezvous.serve import RendezvousServer, gloo_variables, listen_on_all, serve
from hvdtrain.rendezvous.server import IDENTITY_PATH
from hvdtrain.world import World
from hvdtrain.world.network import (
    NETWORK_VARIABLE,
    Route,
    check_wanted,
    find_interface,
    interfaces,
    is_own_address,
    no_interface,
    route_to,
)

_PORTS, _FIRST_PORT, _CANDIDATES = 10000, 20000, 16  # below Linux's ephemeral ports (32768)
_STRIDE = 7919
_ASK_TIMEOUT_S = 2.0
_TWIN_S = 3.0  # the rendezvous of a killed chief may stay for this long
_ANSWER_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """The rendezvous as this rank found it; rank 0 keeps `server` while ranks may initialize.

    `variables`: `HOROVOD_*` to set before `hvd.init()`, and the secret of the job.
    """

    variables: dict[str, str]
    server: RendezvousServer | None


def bootstrap(world: World, environ: Mapping[str, str], *,
              timeout_s: float = 120.0) -> dict[str, str]:
    """Start or find the rendezvous. All ranks; returns variables to set before `hvd.init()`.

    Only where `world.rendezvous` is `"bootstrap"`. SLURM_JOB_ID and SLURM_STEP_ID identify the
    start; HOROVOD_GLOO_IFACE or HVDTRAIN_NETWORK_INTERFACE name the interface where the routing
    table is wrong. WorldError: rank 0 is not found in `timeout_s`, or has no free port.
    """
    if world.rendezvous != "bootstrap" or world.size == 1:
        return {}
    made = start_bootstrap(world, environ, timeout_s=timeout_s)
    if made.server is not None:
        atexit.register(made.server.close)
    return made.variables


def start_bootstrap(world: World, environ: Mapping[str, str], *, timeout_s: float,
                    start: str = "", ports: Sequence[int] = ()) -> Bootstrap:
    """As `bootstrap`, with the server owned by the caller.

    `start` is a text that only the ranks of this start share, where the environment holds none;
    `ports` are those at which rank 0 may serve, by default derived from the key of the job.
    """
    if not world.hosts:
        raise WorldError(
            f"The starter {world.starter} does not tell the hosts of the {world.size} ranks, so "
            "they cannot find each other. Start them with: hvdtrain launch, horovodrun, mpirun "
            "or srun.")
    # A text that all ranks of a job share and those of other jobs do not.
    parts = [environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", ""),
             ",".join(world.hosts), str(world.size), start]
    if world.starter == "tf_config":  # its ports tell two jobs on the same hosts apart
        parts.append(json.dumps(json.loads(world.evidence["TF_CONFIG"])["cluster"], sort_keys=True))
    key = job_key(environ, ".".join(parts))
    route, ports = _route(world, timeout_s), ports or candidate_ports(key)
    server = _serve(world, environ, key, route, ports) if world.rank == 0 else None
    port = server.port if server else _find(world, key, route, ports, timeout_s)
    slot = Slot(rank=world.rank, host=world.host, local_rank=world.local_rank,
                local_size=world.local_size, cross_rank=world.cross_rank or 0,
                cross_size=world.cross_size or 1)
    variables = rank_variables(slot, world.size) | gloo_variables(
        address=route.own_address if world.rank == 0 else route.address, port=port,
        interface=_asked_interface(world, environ) or route.interface, key=key)
    return Bootstrap(server=server, variables=variables | {SECRET_VARIABLE: key.secret})


def _asked_interface(world: World, environ: Mapping[str, str]) -> str | None:
    wanted = environ.get(NETWORK_VARIABLE, "")
    if not wanted:
        return environ.get("HOROVOD_GLOO_IFACE")
    has, items = interfaces(), wanted.split(",")
    check_wanted(items)
    found = find_interface(items, has)
    if found is None:
        raise WorldError(no_interface(world.host, items, has, NETWORK_VARIABLE))
    return found


def candidate_ports(key: JobKey) -> list[int]:
    """The ports at which rank 0 may serve, best first; the same for all ranks of one start."""
    start = int.from_bytes(hashlib.sha256(b"ports" + key.key).digest()[:8], "big")
    return [_FIRST_PORT + (start + i * _STRIDE) % _PORTS for i in range(_CANDIDATES)]


def _route(world: World, timeout_s: float) -> Route:
    """The route to rank 0; for the ranks of its own host, to some other host."""
    # Host names of new pods resolve late, so the look-up is repeated.
    other = next((host for host in world.hosts if host != world.hosts[0]), None)
    if other is None:
        return Route(own_address="127.0.0.1", interface="lo", address="127.0.0.1")
    beside_chief = world.rank < world.slots[0]
    target = other if beside_chief else world.hosts[0]
    problem = OSError("no answer")

    def look() -> Route | None:
        nonlocal problem
        try:
            return route_to(target)
        except OSError as error:
            problem = error
            return None

    route = Wait(timeout_s, lambda: f"the host name {target}, which is not known here yet").until(
        look)
    if route is None:
        raise WorldError(f"The host name {target} cannot be resolved: {problem}. Expected a name "
                         "that every host of the job knows.") from problem
    return replace(route, address=route.own_address) if beside_chief else route


def _serve(world: World, environ: Mapping[str, str], key: JobKey, route: Route,
           ports: Sequence[int]) -> RendezvousServer:
    # Where ranks look for rank 0: on their route, and where its name leads on its own host.
    addresses = [route.own_address]
    if len(set(world.hosts)) > 1:
        with suppress(OSError):
            addresses += [str(entry[4][0]) for entry in socket.getaddrinfo(
                world.hosts[0], None, socket.AF_INET, socket.SOCK_STREAM)
                if is_own_address(str(entry[4][0]))]
    # A second job with the same key is refused: ranks of the two could mix.
    deadline = time.monotonic() + _TWIN_S
    while met := [seen[1] for port in ports
                  if (seen := _ask(addresses[0], port, key)) and seen[0]]:
        if time.monotonic() > deadline:
            raise WorldError(
                f"Rank 0 of this job is there already: {met[0]} serves its rendezvous. {TWIN}")
        time.sleep(0.1)
    networks = [item for item in environ.get(NETWORK_VARIABLE, "").split(",") if "/" in item]
    for port in ports:
        with suppress(OSError):
            return serve(listen_on_all(addresses, port), hosts=world.hosts, slots=world.slots,
                         key=key, sources=networks, names=sorted(set(world.hosts)),
                         who=_job_words(world))
    raise WorldError(
        f"None of the ports {list(ports)} is free on {world.host}, so the ranks have no place to "
        "meet. Are other jobs left over on this host? End them, or submit the job anew.")


def _job_words(world: World) -> str:
    if world.starter == "tf_config":
        cluster = json.loads(world.evidence["TF_CONFIG"])["cluster"]
        return "TF_CONFIG with " + "; ".join(
            f"{kind} {', '.join(map(str, places))}" for kind, places in cluster.items())
    if step := world.evidence.get("SLURM_STEP_ID"):
        return f"step {step} of Slurm job {world.evidence.get('SLURM_JOB_ID', '')}"
    return f"{world.size} ranks started by {world.starter}"


def _find(world: World, key: JobKey, route: Route, ports: Sequence[int],
          timeout_s: float) -> int:
    others: dict[int, str] = {}

    def look() -> int | None:
        for port in ports:
            if seen := _ask(route.address, port, key):
                if seen[0]:
                    return port
                others[port] = seen[1]
        return None

    def words() -> str:
        met = "".join(f"; {text} is another job's" for text in list(others.values()))
        more = f" or one of {len(ports) - 1} more" if len(ports) > 1 else ""
        return (f"{ranks_place(world, [0])}, which serves the rendezvous at {route.address}, port "
                f"{ports[0]}{more}{met}")

    found = Wait(timeout_s, words).until(look)
    if found is None:
        raise WorldError(
            f"No rendezvous of this job at {route.address} after {timeout_s:g} s. Waited for "
            f"{words()}. Is rank 0 running, does a firewall let the hosts reach each other, "
            f"and does {world.hosts[0]} know this host as {host_place(world.host)}?")
    return found


def _ask(address: str, port: int, key: JobKey) -> tuple[bool, str] | None:
    """Who serves there: whether it is this job, and in words; None for no rendezvous."""
    nonce = secrets.token_hex(16)
    connection = http.client.HTTPConnection(address, port, timeout=_ASK_TIMEOUT_S)
    try:
        connection.request("GET", f"{IDENTITY_PATH}{nonce}")
        content = connection.getresponse().read(_ANSWER_BYTES)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    is_ours, who = key.identify(nonce, content)
    return (is_ours, f"process {who.get('pid', '?')} on {who.get('host', '?')} "
                     f"({who.get('job', '?')}) at {address}:{port}") if who else None

"""Starts Horovod's Gloo where the starter prepared nothing (srun, TFJob): no MPI, no ssh.

Needs only rank and size. Rank 0 serves the rendezvous on a port that every rank derives from the
key of the job: from its secret, if it has one, and from what its ranks have in common (job, step,
hosts, the addresses in TF_CONFIG). A rendezvous proves that it has the same key before a rank
talks to it. Each rank uses the network interface on its way to rank 0.
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
from dataclasses import dataclass, field

from hvdtrain.errors import WorldError
from hvdtrain.hosts import Slot, rank_variables
from hvdtrain.runtime.waiting import Wait, host_place, rank_place
from hvdtrain.world.network import (
    NETWORK_VARIABLE,
    Route,
    check_wanted,
    find_interface,
    interfaces,
    is_own_address,
    route_to,
)
from hvdtrain.world.rendezvous import RendezvousServer, gloo_variables, listen_on_all, serve
from hvdtrain.world.rendezvous_server import IDENTITY_PATH
from hvdtrain.world.secret import SECRET_VARIABLE, JobKey, job_key
from hvdtrain.world.world import World

_PORTS, _FIRST_PORT, _CANDIDATES = 10000, 20000, 16  # below Linux's ephemeral ports (32768)
_STRIDE = 7919
_ASK_TIMEOUT_S = 2.0
_TWIN_S = 3.0
"""A rendezvous of a chief that was killed may be there for so long."""
_ANSWER_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """The rendezvous as this rank found it."""

    variables: dict[str, str]
    """`HOROVOD_*` variables to set before `hvd.init()`, and the secret of the job."""
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
        The `HOROVOD_*` variables to set before Horovod is initialised, and the secret of the job.

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
                    start: str = "", ports: Sequence[int] = ()) -> Bootstrap:
    """As `bootstrap`, with the server in the caller's hands.

    Args:
        world: As for `bootstrap`.
        environ: As for `bootstrap`.
        timeout_s: As for `bootstrap`.
        start: String that all ranks of this start share and others do not, where the environment
            holds none.
        ports: At which rank 0 may serve. Default: some that are derived from the key of the job.
    """
    if not world.hosts:
        raise WorldError(
            f"The starter {world.starter} does not tell the hosts of the {world.size} ranks, so "
            "they cannot find each other. Start them with: hvdtrain launch, horovodrun, mpirun "
            "or srun.")
    key = job_key(environ, _identity(world, environ, start))
    route = _route(world, timeout_s)
    server: RendezvousServer | None = None
    if world.rank == 0:
        server = _serve(world, environ, key, route, ports or candidate_ports(key))
        port = server.port
    else:
        port = _find(world, key, route, ports or candidate_ports(key), timeout_s)
    interface = _asked_interface(world, environ) or route.interface
    address = route.own_address if world.rank == 0 else route.address
    return Bootstrap(server=server, variables=_variables(world, interface, address, port, key))


def _identity(world: World, environ: Mapping[str, str], start: str) -> str:
    """What all ranks of a job have and those of other jobs do not."""
    parts = [environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", ""),
             ",".join(world.hosts), str(world.size), start]
    if world.starter == "tf_config":  # its ports tell two jobs on the same hosts apart
        parts.append(json.dumps(json.loads(world.evidence["TF_CONFIG"])["cluster"], sort_keys=True))
    return ".".join(parts)


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


def candidate_ports(key: JobKey) -> list[int]:
    """The ports at which rank 0 may serve, best first; the same for all ranks of one start."""
    start = int.from_bytes(hashlib.sha256(b"ports" + key.key).digest()[:8], "big")
    return [_FIRST_PORT + (start + i * _STRIDE) % _PORTS for i in range(_CANDIDATES)]


def _route(world: World, timeout_s: float) -> Route:
    """The way to rank 0; for the ranks of its own host the way to some other host.

    Host names of new pods resolve late, so the look-up is repeated.
    """
    others = [host for host in world.hosts if host != world.hosts[0]]
    if not others:
        return Route(own_address="127.0.0.1", interface="lo", address="127.0.0.1")
    beside_chief = world.rank < world.slots[0]
    target = others[0] if beside_chief else world.hosts[0]
    wait = Wait(timeout_s, lambda: f"the host name {target}, which is not known here yet")
    while True:
        try:
            route = wait.until(lambda: route_to(target))
            break
        except OSError as error:
            if not wait.go_on():
                raise WorldError(
                    f"The host name {target} cannot be resolved: {error}. Expected a name that "
                    "every host of the job knows.") from error
    if not beside_chief:
        return route
    return Route(own_address=route.own_address, interface=route.interface,
                 address=route.own_address)


def _serve(world: World, environ: Mapping[str, str], key: JobKey, route: Route,
           ports: Sequence[int]) -> RendezvousServer:
    addresses = _addresses(world, route)
    _refuse_twin(key, addresses[0], ports)
    networks = [item for item in environ.get(NETWORK_VARIABLE, "").split(",") if "/" in item]
    for port in ports:
        with suppress(OSError):
            return serve(listen_on_all(addresses, port), hosts=world.hosts, slots=world.slots,
                         key=key, sources=networks, names=sorted(set(world.hosts)),
                         who=_job_words(world))
    raise WorldError(
        f"None of the ports {list(ports)} is free on {world.host}, so the ranks have no place to "
        "meet. Are other jobs left over on this host? End them, or submit the job anew.")


def _addresses(world: World, route: Route) -> list[str]:
    """Where the others look for rank 0: on their way, and where its name leads on its own host."""
    found = [route.own_address]
    if len(set(world.hosts)) > 1:
        with suppress(OSError):
            found += [str(entry[4][0]) for entry in socket.getaddrinfo(
                world.hosts[0], None, socket.AF_INET, socket.SOCK_STREAM)
                if is_own_address(str(entry[4][0]))]
    return list(dict.fromkeys(found))


def _job_words(world: World) -> str:
    if world.starter == "tf_config":
        cluster = json.loads(world.evidence["TF_CONFIG"])["cluster"]
        return "TF_CONFIG with " + "; ".join(
            f"{kind} {', '.join(map(str, places))}" for kind, places in cluster.items())
    step = world.evidence.get("SLURM_STEP_ID")
    if step is not None:
        return f"step {step} of Slurm job {world.evidence.get('SLURM_JOB_ID', '')}"
    return f"{world.size} ranks started by {world.starter}"


def _refuse_twin(key: JobKey, address: str, ports: Sequence[int]) -> None:
    """Two jobs that nothing tells apart must not mix their ranks."""
    deadline = time.monotonic() + _TWIN_S
    while met := [seen for port in ports
                  if (seen := _ask(address, port, key)) is not None and seen.is_ours]:
        if time.monotonic() > deadline:
            raise WorldError(
                f"Rank 0 of this job is there already: {met[0].text} serves its rendezvous. Was "
                "the job started twice, or do two jobs have the same hosts, ports and sizes? End "
                f"the other, or give each job a {SECRET_VARIABLE} of its own, the same on all of "
                "its ranks.")
        time.sleep(0.1)


def _find(world: World, key: JobKey, route: Route, ports: Sequence[int],
          timeout_s: float) -> int:
    others: dict[int, str] = {}

    def look() -> int | None:
        for port in ports:
            seen = _ask(route.address, port, key)
            if seen is not None and seen.is_ours:
                return port
            if seen is not None:
                others[port] = seen.text
        return None

    def words() -> str:
        met = "".join(f"; {text} is another job's" for text in list(others.values()))
        more = f" or one of {len(ports) - 1} more" if len(ports) > 1 else ""
        return (f"{rank_place(world, 0)}, which serves the rendezvous at {route.address}, port "
                f"{ports[0]}{more}{met}")

    wait = Wait(timeout_s, words)
    while True:
        with suppress(TimeoutError):
            found = wait.until(look)  # where a firewall drops packets it takes long
            if found is not None:
                return found
        if not wait.go_on():
            raise WorldError(
                f"No rendezvous of this job at {route.address} after {timeout_s:g} s. Waited for "
                f"{words()}. Is rank 0 running, does a firewall let the hosts reach each other, "
                f"and does {world.hosts[0]} know this host as {host_place(world.host)}?")


@dataclass(frozen=True, kw_only=True)
class _Met:
    """What a rendezvous says of itself."""

    is_ours: bool
    place: str
    who: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Whose rendezvous it is, in words."""
        return (f"process {self.who.get('pid', '?')} on {self.who.get('host', '?')} "
                f"({self.who.get('job', '?')}) at {self.place}")


def _ask(address: str, port: int, key: JobKey) -> _Met | None:
    """Who serves there; None for nobody, or somebody who speaks another language."""
    nonce = secrets.token_hex(16)
    connection = http.client.HTTPConnection(address, port, timeout=_ASK_TIMEOUT_S)
    try:
        connection.request("GET", f"{IDENTITY_PATH}{nonce}")
        answer = connection.getresponse()
        content = answer.read(_ANSWER_BYTES)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    is_ours, who = key.identify(nonce, content)
    return _Met(is_ours=is_ours, place=f"{address}:{port}", who=who) if who else None


def _variables(world: World, interface: str, address: str, port: int,
               key: JobKey) -> dict[str, str]:
    cross_rank = 0 if world.cross_rank is None else world.cross_rank
    cross_size = 1 if world.cross_size is None else world.cross_size
    slot = Slot(rank=world.rank, host=world.host, local_rank=world.local_rank,
                local_size=world.local_size, cross_rank=cross_rank, cross_size=cross_size)
    return rank_variables(slot, world.size) | gloo_variables(
        address=address, port=port, interface=interface, key=key) | {SECRET_VARIABLE: key.secret}

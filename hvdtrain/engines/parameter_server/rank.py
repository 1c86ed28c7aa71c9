"""A rank of engine ps: finds its role and the others, and supervises the process of that role.

Nothing here loads TensorFlow: the rank is the supervisor, and its child does the work.
"""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.engines.parameter_server.roles import (
    Assignment,
    Role,
    plan_roles,
    tf_config_roles,
)
from hvdtrain.engines.parameter_server.supervisor import Supervisor
from hvdtrain.errors import WorldError
from hvdtrain.runtime.exchange import exchange, open_store
from hvdtrain.runtime.stop import StopFlag
from hvdtrain.runtime.watchdog.watchdog import own_addresses
from hvdtrain.settings import refuse_differences, settings_of
from hvdtrain.world.network import interfaces
from hvdtrain.world.world import World

_SCOPE = "hvdtrain.ps"
_FIRST_PORT, _LAST_PORT = 20000, 32000
"""Below Linux's ephemeral ports: none is handed out between the choice and its use."""


def supervise_role(config: TrainConfig, world: World, environ: Mapping[str, str],
                   argv: Sequence[str], stop: StopFlag, *, dry_run: bool) -> int:
    """Be one rank of a parameter-server training. All ranks.

    Args:
        config: Settings; equal on all ranks.
        world: Which rank this is.
        environ: The environment.
        argv: The command line of the role's process, which finds its role in its environment.
        stop: Set when this rank is told to stop.
        dry_run: Boolean; only the chief does something: it prints the plan.

    Returns:
        The exit code of the job.

    Raises:
        ConfigError: Too few ranks for the roles, or ranks were given different settings.
        WorldError: Ranks are missing; they are named.
        RoleLostError: A role was lost more often than it may be started again.
    """
    if world.starter == "tf_config":
        roles, role, addresses = tf_config_roles(world.evidence["TF_CONFIG"])
    else:
        roles, addresses = plan_roles(world.size, config.ps), {}
        role = roles[world.rank]
    if dry_run:
        if role.kind != "chief":
            return 0
        cluster = addresses or _cluster(roles, [f"{r}:0" for r in range(len(roles))])
        assignment = Assignment(role=role, rank=world.rank, size=world.size, host=world.host,
                                cluster=cluster, hosts=[world.host] * len(roles))
        return Supervisor(assignment, None, config.ps, argv, environ, stop, hang_s=0).run()
    # Those in the cluster of a TF_CONFIG do not know whether there is an evaluator.
    apart = role.kind == "evaluator" and world.starter == "tf_config"
    store = open_store(replace(world, size=world.size - apart), environ, _SCOPE,
                       timeout_s=config.ps.start_timeout_s)
    hosts, admitted = [world.host] * world.size, set()
    if not apart:
        names = [_name(r, n) for n, r in enumerate(roles)]
        # The pods of a TFJob may come back with other addresses.
        reach = [] if world.starter == "tf_config" else sorted(interfaces().values())
        with ExitStack() as held:
            own = _own_address(role, addresses, world, environ, held)
            mine = json.dumps({"host": world.host, "address": own, "from": reach,
                               "settings": settings_of(config)})
            texts = exchange(store, world, "address", mine, who=names,
                             timeout_s=config.ps.start_timeout_s)
        told = [json.loads(text) for text in texts]
        refuse_differences([one["settings"] for one in told], names)
        hosts = [one["host"] for one in told]
        admitted = {address for one in told for address in one["from"]}
        addresses = addresses or _cluster(roles, [one["address"] for one in told])
    assignment = Assignment(
        role=role, rank=world.rank, size=world.size, host=world.host, cluster=addresses,
        hosts=hosts, threads=_threads(world.rank, hosts, roles), admitted=sorted(admitted))
    return Supervisor(assignment, store, config.ps, argv,
                      {**environ, **_devices(world.rank, hosts, roles, environ)}, stop,
                      hang_s=config.hang_timeout_s).run()


def _name(role: Role, rank: int) -> str:
    return f"rank {rank} ({role})"


def _own_address(role: Role, addresses: Mapping[str, Sequence[str]], world: World,
                 environ: Mapping[str, str], held: ExitStack) -> str:
    """Its address; a port that is chosen here is held until all roles have chosen theirs."""
    if addresses:
        return addresses[role.kind][role.index]
    port = held.enter_context(_free_port()).getsockname()[1]
    return f"{own_addresses(world, environ)[0]}:{port}"


def _free_port() -> socket.socket:
    for _ in range(200):
        holder = socket.socket()
        try:
            holder.bind(("", random.randint(_FIRST_PORT, _LAST_PORT)))  # noqa: S311 - no secret
        except OSError:
            holder.close()
            continue
        return holder
    raise WorldError(f"No free port from {_FIRST_PORT} to {_LAST_PORT} was found in 200 tries. Are "
                     "other jobs left over on this host?")


def _cluster(roles: Sequence[Role], addresses: Sequence[str]) -> dict[str, list[str]]:
    cluster: dict[str, list[str]] = {}
    for role, address in zip(roles, addresses, strict=True):
        if role.kind != "evaluator":
            cluster.setdefault(role.kind, []).append(address)
    return cluster


def _threads(rank: int, hosts: Sequence[str], roles: Sequence[Role]) -> int:
    """The cores of a host are shared by those that compute there; the chief waits most times."""
    here = sum(host == hosts[rank] and role.kind != "chief"
               for host, role in zip(hosts, roles, strict=False))
    return max(1, len(os.sched_getaffinity(0)) // max(1, here))


def _devices(rank: int, hosts: Sequence[str], roles: Sequence[Role],
             environ: Mapping[str, str]) -> dict[str, Any]:
    """One GPU for each worker of a host, none for the other roles."""
    if rank >= len(roles) or roles[rank].kind != "worker":
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    before = sum(hosts[r] == hosts[rank] and roles[r].kind == "worker" for r in range(rank))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": str(before)}
    several = visible.split(",")
    return {"CUDA_VISIBLE_DEVICES": several[before]} if before < len(several) > 1 else {}

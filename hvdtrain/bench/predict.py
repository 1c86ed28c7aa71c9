"""The time of a training step on more ranks than were measured. Pure functions.

A `Profile` is what one measured run found, a `Cluster` the ranks and the network asked for. Ranks
are alike, each has its own batch, and nothing else uses the network.

A step of allreduce: gradients leave in the collectives that the reducer makes of them, each when
its last gradient is computed. They travel one after the other, beside the rest of the backward
pass, and the update of each begins when it has arrived. What remains after the backward pass is
what the exchange costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hvdtrain.bench.profile import Cluster, ExchangeCost, Profile, ServerCost, Transfer
from hvdtrain.errors import ConfigError

UNEVEN = 0.8
"""Of several transfers over one link the first ends after about this share of the time of all: TCP
divides a link unevenly (measured by benchmarks/prediction.py)."""
FUSED_BYTES = 128 << 20
"""Horovod sends what is ready at the same time as one, up to this size (its default)."""
PS_MESSAGES = 8
"""One after the other in a step with servers: the call of the worker, its request and the values,
the gradient and its receipt, the worker's answer, the call of the server and its answer."""

Engine = Literal["allreduce", "ps-sync", "ps-async"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is expected of an engine on a cluster.

    Args:
        step_s: Float, one batch of each rank.
        efficiency: Float, samples per second over those of as many single ranks.
        epoch_s: Float.
        bound: String, what takes most of the step; `bound_s`: Float, how long.
        parts_s: Seconds by name, of what happens in a step; they overlap.
    """

    engine: Engine
    cluster: Cluster
    batch: float
    step_s: float
    efficiency: float
    epoch_s: float
    bound: str
    bound_s: float
    parts_s: Mapping[str, float]


def crowding(cluster: Cluster, cores_used: float, cores: float) -> float:
    """How much longer ranks compute where the cores of a host are too few for them."""
    ranks = cluster.size if cluster.one_machine else cluster.ranks_per_host
    return max(1.0, ranks * cores_used / cores)


def allreduce(profile: Profile, cluster: Cluster) -> Prediction:
    """A step of engine `allreduce`, by simulating it; see the module."""
    batch = profile.batch_on(cluster.size)
    slow = crowding(cluster, profile.cores_used, profile.cores)
    compute_s, update_s = slow * profile.compute_s(batch), slow * profile.update_s
    # The backward pass is longer or shorter than the measured one by the same factor everywhere.
    # Ranks that share too few cores do not come to a bucket together, and the collective's own
    # threads wait as well: measured, nothing then travels before the backward pass has ended.
    stretch = compute_s / max(profile.compute_s(profile.batch), 1e-12)
    transfers = [] if cluster.size == 1 else [
        replace(one, ready_s=compute_s if slow > 1 else min(compute_s, stretch * one.ready_s))
        for one in profile.transfers]
    end_s, parts_s = simulate(
        transfers, lambda some: exchange_parts(some, profile, cluster, slow), compute_s=compute_s,
        update_s=update_s, most_bytes=FUSED_BYTES if cluster.hosts > 1 else 0)
    exposed_s = max(0.0, end_s - compute_s - update_s)
    found = {"compute": compute_s + slow * profile.loop_s, "update": update_s}
    if parts_s:
        found[max(parts_s, key=parts_s.__getitem__)] = exposed_s
    step_s = end_s + slow * profile.loop_s
    if batch * profile.read_s >= step_s:
        step_s = found["input"] = batch * profile.read_s
    return _prediction("allreduce", profile, cluster, step_s, found, {
        "compute": compute_s, "update": update_s, "exposed": exposed_s, **parts_s})


def exchange_parts(transfers: Sequence[Transfer], profile: Profile, cluster: Cluster,
                   slow: float = 1.0) -> dict[str, float]:
    """Seconds of collectives that travel as one, by what they are spent on.

    Over a network: 2 (n - 1) / n * bytes / bandwidth + 2 (n - 1) * latency (Patarasuk and Yuan,
    2009), and what the collective itself takes. The ring's own work on the bytes goes on while they
    travel, copies before and after it do not. Horovod agrees on what is ready by an allreduce of a
    few bits, over a ring of as many messages, before each. Within one host there are no links.
    """
    ranks, link_bytes = cluster.size, sum(one.link_bytes(cluster.size) for one in transfers)
    if cluster.hosts == 1:
        cost = _exchange(profile, "shared-memory")
        rounds = math.ceil(math.log2(ranks))  # of its barrier
        return {"network": 0.0, "latency": 0.0,
                "collective": slow * (cost.fixed_s * rounds + cost.byte_s * link_bytes)}
    cost = _exchange(profile, "horovod-gloo")
    wire_s = cluster.wire_s(link_bytes)
    copy_s = slow * cost.copy_s * sum(one.size for one in transfers)
    ring_s = slow * (cost.byte_s - cost.copy_s) * link_bytes
    messages = max(one.messages(ranks) for one in transfers) + 2 * (ranks - 1)
    return {"network": wire_s, "latency": messages * _latency(profile, cluster),
            "collective": cost.fixed_s + copy_s + max(0.0, ring_s - wire_s)}


def simulate(transfers: Sequence[Transfer],
             cost: Callable[[Sequence[Transfer]], Mapping[str, float]], *, compute_s: float,
             update_s: float, most_bytes: float = 0) -> tuple[float, dict[str, float]]:
    """When a step ends, and the seconds of its collectives by the names of `cost`.

    Collectives travel one after the other; those that wait travel together, up to `most_bytes`.
    Updates need the processor, so that they begin after the backward pass; each takes the share of
    `update_s` that its bytes have.
    """
    waiting = sorted(transfers, key=lambda one: one.ready_s)
    total = sum(one.size for one in waiting) or 1.0
    free_s, done_s, parts_s = 0.0, compute_s, dict[str, float]()
    while waiting:
        free_s = max(free_s, waiting[0].ready_s)
        taken = [waiting.pop(0)]
        size = taken[0].size
        while waiting and waiting[0].ready_s <= free_s and size + waiting[0].size <= most_bytes:
            taken.append(waiting.pop(0))
            size += taken[-1].size
        spent_s = cost(taken)
        free_s += sum(spent_s.values())
        parts_s = {name: parts_s.get(name, 0.0) + spent for name, spent in spent_s.items()}
        done_s = max(done_s, free_s) + update_s * size / total
    return (done_s if transfers else compute_s + update_s), parts_s


def ps_sync(profile: Profile, cluster: Cluster, servers: int = 1) -> Prediction:
    """A step of engine `ps` in mode `sync`, servers on hosts of their own.

    All workers pull M bytes, and then push M: N M / (S b) each way over the link of each of S
    servers, k M / b over that of a host with k workers. A worker begins to push when its own pull
    has ended, before the others' have: see `UNEVEN`. A server works on one worker after the other.
    """
    cost, batch = _servers(profile), profile.batch_on(cluster.size)
    workers, share = cluster.size, cluster.size / servers
    own_s = cost.step_s + profile.compute_s(batch) - profile.compute_s(profile.batch)
    serving_s = max(0.0, share - 1) * cost.server_cpu_s
    busy_s = max(own_s + serving_s, _processor_s(cost, cluster, profile, workers))
    pull_s = cluster.wire_s(max(share, cluster.ranks_per_host) * profile.parameter_bytes)
    wire_s = pull_s * ((1 + UNEVEN) if max(share, cluster.ranks_per_host) > 1 else 2)
    latency_s = PS_MESSAGES * _latency(profile, cluster)
    name = "server's link" if share > cluster.ranks_per_host else "worker's link"
    compute_s = profile.compute_s(batch)
    step_s = max(busy_s + wire_s + latency_s, batch * profile.read_s)
    found = {name: wire_s, "compute": compute_s, "latency": latency_s,
             "server's work": busy_s - compute_s}
    return _prediction("ps-sync", profile, cluster, step_s, found, found)


def ps_async(profile: Profile, cluster: Cluster, servers: int = 1) -> Prediction:
    """A batch of every worker with engine `ps` in mode `async`, servers on hosts of their own.

    Workers go round between their own processor and the two directions of a server's link: a closed
    queueing network, by exact mean value analysis (Reiser and Lavenberg, 1980, "Mean-Value Analysis
    of Closed Multichain Queuing Networks"). Without the processor, N batches take (N + 1) M / b.
    """
    cost, batch = _servers(profile), profile.batch_on(cluster.size)
    workers, share = cluster.size, profile.parameter_bytes / servers
    link_s = cluster.wire_s(share)
    alone_s = cluster.wire_s(profile.parameter_bytes * cluster.ranks_per_host) - link_s
    think_s = (cost.step_s + profile.compute_s(batch) - profile.compute_s(profile.batch)
               + 2 * max(0.0, alone_s) + PS_MESSAGES * _latency(profile, cluster))
    step_s = workers / throughput(workers, think_s, [link_s, link_s, cost.server_cpu_s / servers])
    processor_s = _processor_s(cost, cluster, profile, workers)
    step_s = max(step_s, processor_s, batch * profile.read_s)
    compute_s = profile.compute_s(batch)
    found = {"server's link": workers * link_s, "worker's link": 2 * max(0.0, alone_s),
             "server's work": max(workers * cost.server_cpu_s / servers, processor_s - compute_s),
             "compute": compute_s}
    return _prediction("ps-async", profile, cluster, step_s, found, found)


def throughput(customers: int, think_s: float, demands_s: Sequence[float]) -> float:
    """Rounds per second of customers between a delay and stations (mean value analysis)."""
    lengths = [0.0] * len(demands_s)
    rate = 0.0
    for number in range(1, customers + 1):
        stays = [demand * (1 + length) for demand, length in zip(demands_s, lengths, strict=True)]
        rate = number / (think_s + sum(stays))
        lengths = [rate * stay for stay in stays]
    return rate


def _exchange(profile: Profile, collective: str) -> ExchangeCost:
    if collective not in profile.exchange:
        raise ConfigError(
            f"The profile has no cost of {collective}. Measure anew, with an --on of "
            f"{'one host' if collective == 'shared-memory' else 'several hosts'} among the others.")
    return profile.exchange[collective]


def _servers(profile: Profile) -> ServerCost:
    if profile.servers is None:
        raise ConfigError("The profile has no step with parameter servers. Measure anew with "
                          "--engines that name ps-sync or ps-async.")
    return profile.servers


def _processor_s(cost: ServerCost, cluster: Cluster, profile: Profile, workers: int) -> float:
    """The processor time of a step over the cores for it, where every process shares them."""
    if cluster.hosts == 1 or cluster.one_machine:
        spent_s = workers * (cost.worker_cpu_s + cost.server_cpu_s) + cost.chief_cpu_s
    else:
        spent_s = cluster.ranks_per_host * cost.worker_cpu_s
    return spent_s / profile.cores


def _latency(profile: Profile, cluster: Cluster) -> float:
    return profile.latency_s if cluster.latency_s is None else cluster.latency_s


def _prediction(engine: Engine, profile: Profile, cluster: Cluster, step_s: float,
                found: Mapping[str, float], parts_s: Mapping[str, float]) -> Prediction:
    ranks, batch = cluster.size, profile.batch_on(cluster.size)
    single = profile.batch_on(1) / profile.single_s(profile.batch_on(1))
    steps = math.ceil(profile.samples / (ranks * batch))
    return Prediction(
        engine=engine, cluster=cluster, batch=batch, step_s=step_s, parts_s=parts_s,
        efficiency=batch / step_s / single, epoch_s=steps * step_s,
        bound=max(found, key=found.__getitem__), bound_s=max(found.values()))


ENGINES: dict[str, Callable[[Profile, Cluster, int], Prediction]] = {
    "allreduce": lambda profile, cluster, _: allreduce(profile, cluster),
    "ps-sync": ps_sync, "ps-async": ps_async}
"""How each engine is predicted, from a profile, a cluster and a number of servers."""

"""What must travel: bytes per step and the least time for them. Pure functions.

A *step* is one batch of each of N workers. M is the size of all trainable
parameters as float32. A link carries its bandwidth in both directions at the same time.

Ring allreduce (Patarasuk and Yuan, 2009): each rank sends and receives 2 (N - 1) / N * M.
Parameter servers: each worker receives M (the parameters) and sends M (the gradients), so that
2 N M pass through all servers together, half in each direction. A synchronous step pulls first and
pushes then, so that its links are half idle.
"""

from __future__ import annotations

from collections.abc import Sequence


def ring_bytes(workers: int, parameter_bytes: float) -> float:
    """Bytes that each rank of a ring allreduce sends, and as many receives, per step.

    Args:
        workers: Integer, the ranks.
        parameter_bytes: Float, M.
    """
    return 2 * (workers - 1) / workers * parameter_bytes


def worker_bytes(parameter_bytes: float) -> float:
    """Bytes that a worker sends to the parameter servers, and as many receives, per step."""
    return parameter_bytes


def server_bytes(workers: int, servers: int, parameter_bytes: float) -> float:
    """Bytes that each of several balanced parameter servers sends, and as many receives, per step.

    Args:
        workers: Integer, which pull and push once each.
        servers: Integer, which hold equal shares.
        parameter_bytes: Float, M.
    """
    return workers * parameter_bytes / servers


def host_bytes(workers: int, server_hosts: Sequence[int], parameter_bytes: float) -> list[float]:
    """Bytes that each host sends over its link, and as many receives, per step with servers.

    Worker i stands on host i. What a worker exchanges with a server on its own host does not
    travel.

    Args:
        workers: Integer, at least 1.
        server_hosts: The number of the host of each server; hosts from `workers` on have none of
            the workers.
        parameter_bytes: Float, M.

    Returns:
        One figure per host.
    """
    share = parameter_bytes / len(server_hosts)
    hosts = max(workers, max(server_hosts) + 1)
    found = []
    for host in range(hosts):
        here = sum(at == host for at in server_hosts)
        has_worker = host < workers
        from_worker = (len(server_hosts) - here) * share if has_worker else 0.0
        from_servers = here * share * (workers - has_worker)
        found.append(from_worker + from_servers)
    return found


def ring_seconds(workers: int, parameter_bytes: float, bytes_per_s: float) -> float:
    """The least time for the bytes of a step of a ring with one rank on each host.

    Args:
        workers: Integer, the hosts.
        parameter_bytes: Float, M.
        bytes_per_s: Float, of each host's link in each direction.
    """
    return ring_bytes(workers, parameter_bytes) / bytes_per_s


def server_seconds(workers: int, server_hosts: Sequence[int], parameter_bytes: float,
                   bytes_per_s: float, *, in_phases: bool) -> float:
    """The least time for the bytes of a step with servers: that of the busiest link.

    Args:
        workers: Integer, one on each of as many hosts.
        server_hosts: As for `host_bytes`.
        parameter_bytes: Float, M.
        bytes_per_s: Float, of each host's link in each direction.
        in_phases: Boolean. True: all workers pull, and then all push, so that a link is used in
            one direction at a time (`ps-sync`): 2 N M / b with one server on a host of its own.
            False: pulls and pushes of different workers overlap.
    """
    if not in_phases:
        return max(host_bytes(workers, server_hosts, parameter_bytes)) / bytes_per_s
    share = parameter_bytes / len(server_hosts)
    busiest = 0.0
    for host in range(max(workers, max(server_hosts) + 1)):
        here = sum(at == host for at in server_hosts)
        has_worker = host < workers
        pulled_from_here = here * share * (workers - has_worker)
        pulled_to_here = (len(server_hosts) - here) * share if has_worker else 0.0
        busiest = max(busiest, pulled_from_here, pulled_to_here)
    return 2 * busiest / bytes_per_s


def shared_server_seconds(workers: int, parameter_bytes: float, bytes_per_s: float) -> float:
    """The time to be expected for a step of workers that do not wait for each other.

    One server, on a host of its own. Each worker pulls M over one direction of its link, then
    pushes M over the other, and the N workers share both. That is a closed queueing network with
    two stations of the same demand s = M / b and N customers, whose throughput is N / ((N + 1) s)
    (Zahorjan et al., 1982, "Balanced job bound analysis of queueing networks"): N batches take
    (N + 1) M / b, between the bound N M / b and the 2 N M / b of workers in step.

    Args:
        workers: Integer, N.
        parameter_bytes: Float, M.
        bytes_per_s: Float, b.
    """
    return (workers + 1) * parameter_bytes / bytes_per_s

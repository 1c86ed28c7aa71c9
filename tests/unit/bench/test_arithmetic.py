"""Bytes and bounds that can be worked out by hand."""

import pytest

from hvdtrain.bench.measure import computed, link_bytes
from hvdtrain.bench.plan import Point

M = 120.0


def ring_bytes(workers, size):
    return computed("allreduce-gloo", Point(job="j", workers=workers, servers=1), size)[
        "roles"]["rank"]


def host_bytes(workers, server_hosts, size):
    return list(map(sum, link_bytes(workers, server_hosts, size)))


@pytest.mark.parametrize(("workers", "expected"), [(1, 0), (2, M), (3, 160), (4, 180), (8, 210)])
def test_a_ring(workers, expected):
    assert ring_bytes(workers, M) == pytest.approx(expected)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (4, 3), (5, 5)])
def test_what_workers_send_servers_receive(workers, servers):
    roles = computed("ps-sync", Point(job="j", workers=workers, servers=servers), M)["roles"]
    assert servers * roles["server"] == pytest.approx(workers * roles["worker"])


@pytest.mark.parametrize(("workers", "server_hosts", "expected"), [
    (2, [2], [M, M, 2 * M]),                 # apart: all meet at the server
    (3, [3, 4], [M, M, M, 180, 180]),        # two servers share it
    (2, [0], [M, M]),                        # the worker beside the server moves nothing itself
    (3, [0], [2 * M, M, M]),
    (3, [0, 0], [2 * M, M, M]),
    (2, [0, 1], [M, M]),
    (1, [0], [0]),
])
def test_bytes_of_hosts(workers, server_hosts, expected):
    assert host_bytes(workers, server_hosts, M) == pytest.approx(expected)


@pytest.mark.parametrize("workers", [2, 3, 4, 7])
def test_a_server_on_every_workers_host_is_as_good_as_a_ring(workers):
    assert host_bytes(workers, list(range(workers)), M) == pytest.approx(
        [ring_bytes(workers, M)] * workers)


@pytest.mark.parametrize(("workers", "server_hosts"), [(2, [0]), (3, [1, 2]), (4, [4, 5])])
def test_every_byte_that_is_sent_over_a_link_is_received_over_another(workers, server_hosts):
    share = M / len(server_hosts)
    pairs = [(worker, at) for worker in range(workers) for at in server_hosts if worker != at]
    assert sum(host_bytes(workers, server_hosts, M)) == pytest.approx(2 * share * len(pairs))


@pytest.mark.parametrize(("engine", "workers", "servers", "servers_on", "seconds"), [
    ("allreduce-gloo", 4, 1, "apart", 12.0),
    ("ps-async", 4, 1, "apart", 32.0),
    ("ps-async", 4, 4, "workers", 12.0),
    ("ps-sync", 4, 1, "apart", 64.0),
    ("ps-sync", 4, 4, "workers", 12.0),
    # More servers than workers: a worker's link, which carries all of M, is the busiest.
    ("ps-sync", 2, 3, "apart", 16.0),
    # One server beside a worker: the others pull from it, one after the other.
    ("ps-sync", 4, 1, "workers", 48.0),
])
def test_bounds(engine, workers, servers, servers_on, seconds):
    point = Point(job="j", workers=workers, servers=servers, servers_on=servers_on, rate="100mbit")
    assert computed(engine, point, 100e6)["seconds"] == pytest.approx(seconds)


def test_workers_that_share_a_server_overlap_in_part():
    for workers in (1, 2, 4, 50):
        point = Point(job="j", workers=workers, servers=1, servers_on="apart", rate="8mbit")
        found, in_step = (computed(engine, point, 1e6) for engine in ("ps-async", "ps-sync"))
        assert found["seconds"] < found["expected_seconds"] <= in_step["seconds"]
        assert found["expected_seconds"] == pytest.approx(workers + 1)

"""Bytes and bounds that can be worked out by hand."""

import pytest

from hvdtrain.bench.arithmetic import (
    host_bytes,
    ring_bytes,
    ring_seconds,
    server_bytes,
    server_seconds,
    shared_server_seconds,
    worker_bytes,
)

M = 120.0


@pytest.mark.parametrize(("workers", "expected"), [(1, 0), (2, M), (3, 160), (4, 180), (8, 210)])
def test_a_ring(workers, expected):
    assert ring_bytes(workers, M) == pytest.approx(expected)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (4, 3), (5, 5)])
def test_what_workers_send_servers_receive(workers, servers):
    assert servers * server_bytes(workers, servers, M) == pytest.approx(workers * worker_bytes(M))


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


def test_bounds():
    assert ring_seconds(4, 100e6, 12.5e6) == pytest.approx(12.0)
    apart, beside = [4], [0, 1, 2, 3]
    assert server_seconds(4, apart, 100e6, 12.5e6, in_phases=False) == pytest.approx(32.0)
    assert server_seconds(4, beside, 100e6, 12.5e6, in_phases=False) == pytest.approx(12.0)
    assert server_seconds(4, apart, 100e6, 12.5e6, in_phases=True) == pytest.approx(64.0)
    assert server_seconds(4, beside, 100e6, 12.5e6, in_phases=True) == pytest.approx(12.0)
    # More servers than workers: a worker's link, which carries all of M, is the busiest.
    assert server_seconds(2, [2, 3, 4], 100e6, 12.5e6, in_phases=True) == pytest.approx(16.0)
    # One server beside a worker: the others pull from it, one after the other.
    assert server_seconds(4, [0], 100e6, 12.5e6, in_phases=True) == pytest.approx(48.0)


def test_workers_that_share_a_server_overlap_in_part():
    for workers in (1, 2, 4, 50):
        expected = shared_server_seconds(workers, 100e6, 12.5e6)
        bound = server_seconds(workers, [workers], 100e6, 12.5e6, in_phases=False)
        in_step = server_seconds(workers, [workers], 100e6, 12.5e6, in_phases=True)
        assert bound < expected <= in_step
    assert shared_server_seconds(4, 100e6, 12.5e6) == pytest.approx(40.0)

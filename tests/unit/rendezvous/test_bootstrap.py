"""Ranks that find each other without a starter's help. In threads: nothing of it is Horovod."""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from hvdtrain.errors import WorldError
from hvdtrain.rendezvous.barrier import rendezvous_barrier
from hvdtrain.rendezvous.bootstrap import bootstrap, candidate_ports, start_bootstrap
from hvdtrain.rendezvous.secret import JobKey
from hvdtrain.rendezvous.serve import (
    RendezvousServer,
    listen_on_all,
    scope_sizes,
    serve,
)
from hvdtrain.world import World, detect_world
from hvdtrain.world.network import interface_of, route_to

KEY = JobKey("the secret of this test")


def world(rank: int, size: int, hosts: str = "here", slots: str | None = None) -> World:
    return detect_world({
        "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": slots or str(size), "SLURM_STEP_NODELIST": hosts})


def in_threads(actions: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in threads)


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    """A rendezvous of two ranks on one host."""
    running = serve(listen_on_all(["127.0.0.1"]), hosts=["here"], slots=[2], key=KEY)
    yield running
    running.close()


def request(server: RendezvousServer, method: str, path: str, body: bytes | None = None
            ) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, f"/{KEY.capability}{path}", body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def variables_of(server: RendezvousServer) -> dict[str, str]:
    return {"HOROVOD_GLOO_RENDEZVOUS_ADDR": f"127.0.0.1:{server.port}/{KEY.capability}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.port), "HVDTRAIN_SECRET": KEY.secret}


def test_all_ranks_get_the_variables_of_one_rendezvous() -> None:
    found = {}

    def start(rank: int) -> None:
        found[rank] = start_bootstrap(world(rank, 3), {"SLURM_JOB_ID": "11"}, timeout_s=15)

    in_threads([lambda rank=rank: start(rank) for rank in (2, 1, 0)])  # type: ignore[misc]
    server = found[0].server
    assert server is not None
    try:
        assert found[1].server is None
        address = found[1].variables.pop("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        key = JobKey(found[1].variables.pop("HVDTRAIN_SECRET"))
        assert address == f"127.0.0.1:{server.port}/{key.capability}"
        assert found[1].variables == {
            "HOROVOD_RANK": "1", "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": "1",
            "HOROVOD_LOCAL_SIZE": "3", "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_HOSTNAME": "here", "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.port)}
        ports = {made.variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] for made in found.values()}
        assert ports == {str(server.port)}
    finally:
        server.close()


def test_a_taken_port_is_passed_over() -> None:
    environ = {"SLURM_JOB_ID": "12"}
    first = start_bootstrap(world(0, 2), environ, timeout_s=5)
    assert first.server is not None
    first.server.close()
    ports = candidate_ports(JobKey(first.variables["HVDTRAIN_SECRET"]))
    assert first.server.port == ports[0]
    with socket.create_server(("127.0.0.1", ports[0])):
        made = start_bootstrap(world(0, 2), environ, timeout_s=5)
    assert made.server is not None
    made.server.close()
    assert made.server.port == ports[1]


def test_a_chief_that_is_not_there_is_named() -> None:
    with pytest.raises(WorldError, match="Is rank 0 running"):
        start_bootstrap(world(1, 2), {"SLURM_JOB_ID": "13"}, timeout_s=0.0)


def test_a_host_that_cannot_be_resolved_is_named() -> None:
    with pytest.raises(WorldError, match=r"nowhere\.invalid cannot be resolved"):
        start_bootstrap(world(0, 2, "here,nowhere.invalid", "1,1"), {}, timeout_s=0.0)


def test_other_worlds_need_no_bootstrap() -> None:
    assert bootstrap(detect_world({}), {}) == {}


def test_the_store_speaks_horovods_protocol(server: RendezvousServer) -> None:
    assert request(server, "GET", "/global/0")[0] == 404
    assert request(server, "PUT", "/global/0", b"address") == (200, b"")
    assert request(server, "GET", "/global/0") == (200, b"address")


def test_a_scope_is_emptied_when_all_members_have_left(server: RendezvousServer) -> None:
    request(server, "PUT", "/global/0", b"1")
    request(server, "DELETE", "/global/0")
    assert request(server, "GET", "/global/0")[0] == 200
    request(server, "DELETE", "/global/1")
    assert request(server, "GET", "/global/0")[0] == 404


def test_scopes_are_those_of_horovod() -> None:
    assert scope_sizes(["a", "b", "c"], [2, 2, 1]) == {
        "global": 5, "local_a": 2, "local_b": 2, "local_c": 1, "cross_0": 3, "cross_1": 2}


def test_meet_returns_when_the_last_rank_has_come(server: RendezvousServer) -> None:
    environ = variables_of(server)
    met: list[int] = []

    def come(rank: int) -> None:
        rendezvous_barrier(world(rank, 2), environ, timeout_s=15)
        met.append(rank)

    in_threads([lambda: come(0), lambda: come(1)])
    assert sorted(met) == [0, 1]


@pytest.mark.parametrize(("rank", "message"), [
    (0, "missing: rank 1 on here .*, rank 2 on here "), (1, "missing: rank 0 on here ")])
def test_meet_names_who_is_missing(server: RendezvousServer, rank: int, message: str) -> None:
    environ = variables_of(server)
    with pytest.raises(WorldError, match=message):
        rendezvous_barrier(world(rank, 3), environ, timeout_s=0.0)


def test_meet_says_when_the_rendezvous_has_gone(server: RendezvousServer) -> None:
    server.close()
    environ = variables_of(server)
    with pytest.raises(WorldError, match="does not answer"):
        rendezvous_barrier(world(0, 2), environ)


def test_meet_without_a_rendezvous_does_nothing() -> None:
    rendezvous_barrier(world(0, 2), {})


def test_the_way_to_this_host_is_the_loopback() -> None:
    route = route_to("localhost")
    assert (route.own_address, route.interface, route.address) == ("127.0.0.1", "lo", "127.0.0.1")


def test_an_address_of_no_interface_is_an_error() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        interface_of("192.0.2.1")

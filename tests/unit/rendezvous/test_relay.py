"""The relay in each rank, through which Horovod's client asks; and requests that wait."""

import http.client
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from hvdtrain.rendezvous import server as serving
from hvdtrain.rendezvous.client import RendezvousClient
from hvdtrain.rendezvous.relay import relayed
from hvdtrain.rendezvous.secret import JobKey
from hvdtrain.rendezvous.serve import gloo_variables, listen_on_all, scope_sizes
from hvdtrain.rendezvous.server import Server
from hvdtrain.rendezvous.store import KeyValueStore, part_for
from hvdtrain.world import World, detect_world

KEY = JobKey("the secret of this test")
SIZE = 5
PART = "{}>{}-"


class CountingServer(Server):
    """Counts its requests by scope."""

    def answer(self, data: bytes) -> tuple[int, bytes] | None:
        found = super().answer(data)
        if found is not None:
            self.requests[data.split(b"/")[2].decode()] += 1
        return found


@pytest.fixture
def server() -> Iterator[CountingServer]:
    """A rendezvous of five ranks on one host, in a thread."""
    [listener] = listen_on_all(["127.0.0.1"])
    made = CountingServer([listener], {
        "key": KEY.key.hex(), "capability": KEY.capability, "who": {}, "names": [],
        "sizes": scope_sizes(["here"], [SIZE]), "sources": ["127.0.0.1"]})
    made.requests, made.port = Counter[str](), listener.getsockname()[1]
    control, watched = socket.socketpair()
    thread = threading.Thread(target=made.serve, args=(os.getppid(), watched.fileno()))
    thread.start()
    yield made
    control.close()
    thread.join(10.0)
    assert not thread.is_alive()
    made.close()
    watched.close()


def client_of(server: CountingServer) -> RendezvousClient:
    return RendezvousClient("127.0.0.1", server.port, "hvdtrain.test", key=KEY,
                            capability=KEY.capability)


def world(rank: int, size: int = SIZE) -> World:
    return detect_world({
        "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "here"})


def environment(server: CountingServer) -> dict[str, str]:
    return {"HVDTRAIN_SECRET": KEY.secret, **gloo_variables(
        address="127.0.0.1", port=server.port, interface="lo", key=KEY)}


def connect(environ: dict[str, str], scope: str, rank: int, size: int, time_of: str) -> list[str]:
    """What Horovod's client and Gloo do in a scope: what each peer has told this rank."""
    address = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")
    port = environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]

    def request(method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
        # It adds the port to the address, and so to the capability.
        connection.request(method, f"/{address[2]}:{port}/{scope}/{key}", body)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def told(value: bytes) -> bytes:
        part = len(value) // (size - 1)
        place = rank - 1 if rank > other else rank
        return value[place * part:(place + 1) * part]

    assert request("PUT", f"rank_{rank}", b"here")[0] == 200
    for other in range(rank):
        assert request("GET", f"rank_{other}")[0] in (200, 404)
    mine = "".join(PART.format(rank, other) + time_of for other in range(size) if other != rank)
    assert request("PUT", str(rank), mine.encode())[0] == 200
    found = []
    for other in range(size):
        if other == rank:
            continue
        while request("GET", str(other))[0] == 404:
            time.sleep(0.01)
        found.append(told(request("GET", str(other))[1]).decode())
    barrier.wait()  # Gloo's
    assert request("DELETE", str(rank))[0] == 200
    return found


barrier = threading.Barrier(SIZE)


def test_horovod_finds_its_peers_by_a_few_requests_of_each_rank(server: CountingServer) -> None:
    """In a scope of known size, in that of a process set, and once more after a shutdown."""
    found: dict[tuple[int, str], list[str]] = {}

    def run(rank: int) -> None:
        environ = environment(server)
        for again in ("1", "2"):
            with relayed(world(rank), environ):
                for scope in ("global", "global_process_set_hash_1f"):
                    found[rank, scope + again] = connect(environ, scope, rank, SIZE, again)
        assert environ == environment(server)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert found == {
        (rank, scope + again): [PART.format(other, rank) + again for other in range(SIZE)
                                if other != rank]
        for rank in range(SIZE) for scope in ("global", "global_process_set_hash_1f")
        for again in ("1", "2")}
    assert server.requests == {scope: 2 * 3 * SIZE  # its value, its peers, its end
                               for scope in ("global", "global_process_set_hash_1f")}


def test_one_rank_and_other_rendezvous_have_no_relay(server: CountingServer) -> None:
    horovodruns = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                   "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.port)}
    for own, environ in ((world(0, 1), environment(server)), (world(0), horovodruns),
                         (world(0), {})):
        before = dict(environ)
        with relayed(own, environ):
            assert environ == before


def test_a_rendezvous_that_has_gone_is_an_error_of_the_server_for_horovod(
        server: CountingServer) -> None:
    environ = environment(server)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = str(closed.getsockname()[1])
    environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = gone
    with relayed(world(0), environ):
        connection = http.client.HTTPConnection(
            "127.0.0.1", int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]), timeout=10)
        connection.request("PUT", f"/{KEY.capability}/global/0", b"x")
        assert connection.getresponse().status == 503
        connection.close()


def test_a_request_that_waits_is_answered_when_the_value_comes(server: CountingServer) -> None:
    client, found = client_of(server), []
    threads = [threading.Thread(target=lambda: found.append(client.get("late", waits=True)))
               for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert client.put("other")
    assert found == []
    assert client.put("late", b"value")
    for thread in threads:
        thread.join(5.0)
    assert found == [b"value"] * 3
    assert client.get("late", waits=True) == b"value"
    assert server._held == {}


def test_who_waits_in_vain_is_told_and_who_leaves_is_forgotten(
        server: CountingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(f"GET /{KEY.capability}/hvdtrain.test/never?wait HTTP/1.1\r\n\r\n".encode())
        deadline = time.monotonic() + 5.0
        while not server._held and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(server._held) == 1
    while server._held and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server._held == {}
    monkeypatch.setattr(serving, "_HOLD_S", 0.2)
    assert client_of(server).get("never", waits=True) is None


@pytest.mark.parametrize(("asked", "expected"), [
    ("peers.1.3", b"01_21_"), ("peers.0.3", b"10_20_"), ("peers.2.3", b"02_12_"),
    ("peers.3.3", None), ("peers.0.4", None), ("peers.x.3", None)])
def test_what_all_have_told_one_of_them(asked: str, expected: bytes | None) -> None:
    store = KeyValueStore({"global": 3}, KEY.key)
    for rank, value in enumerate((b"01_02_", b"10_12_")):
        assert store.put("global", str(rank), value) == 200
    assert store.get("global", "peers.1.3") is None
    assert store.put("global", "2", b"20_21_") == 200
    assert store.get("global", asked) == expected


def test_values_without_equal_parts_have_none() -> None:
    assert part_for(0, [b"abc", b"ab", b"abc"]) == b""
    assert part_for(0, [b"abc", b"abc", b"abc"]) == b""
    assert part_for(0, [b""]) == b""

"""Who can connect to a listening socket whose server knows nothing of it. Real sockets."""

import os
import socket

import pytest

from hvdtrain.runtime.admission import admit_only


def reaches(port, source, address="127.0.0.1"):
    try:
        with socket.create_connection((address, port), timeout=0.3, source_address=(source, 0)):
            return True
    except TimeoutError:
        return False


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "both"])
def listener(request):
    """As TensorFlow listens, and as others do."""
    with socket.create_server(("", 0), family=request.param,
                              dualstack_ipv6=request.param == socket.AF_INET6) as made:
        yield made


def test_without_it_everybody_comes_in(listener):
    assert reaches(listener.getsockname()[1], "127.0.0.2")


@pytest.mark.parametrize("others", [[], ["127.0.0.3"], [f"10.0.{n // 200}.{n % 200}" for n in
                                                        range(700)] + ["127.0.0.3"]])
def test_only_the_addresses_that_are_named_come_in(listener, others):
    port, before = listener.getsockname()[1], len(os.listdir("/proc/self/fd"))
    assert admit_only(port, others)
    assert [reaches(port, f"127.0.0.{n}") for n in (1, 2, 3)] == [True, False, bool(others)]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_connection_that_came_in_carries_what_it_carried(listener):
    port = listener.getsockname()[1]
    admit_only(port, [])
    with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0] as server:
        client.sendall(b"x" * 100_000)
        client.shutdown(socket.SHUT_WR)
        received = b""
        while data := server.recv(65536):
            received += data
    assert len(received) == 100_000


def test_several_sockets_at_one_port_are_all_guarded():
    made = []
    for _ in range(4):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(("127.0.0.1", made[0].getsockname()[1] if made else 0))
        one.listen()
        made.append(one)
    port = made[0].getsockname()[1]
    assert admit_only(port, [])
    assert [reaches(port, "127.0.0.2") for _ in range(4)] == [False] * 4
    assert all(reaches(port, "127.0.0.1") for _ in range(4))
    for one in made:
        one.close()


def test_a_port_at_which_nothing_listens():
    assert not admit_only(1, [])

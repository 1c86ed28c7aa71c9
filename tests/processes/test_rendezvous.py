"""The key-value server that Horovod's Gloo ranks talk to, and what each rank is told."""

from __future__ import annotations

import http.client

from hvdtrain.hosts import Host, assign_ranks, rank_variables
from hvdtrain.world.rendezvous import gloo_variables, listen, serve


def _ask(port: int, method: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, "/global/0", body)
    answer = connection.getresponse()
    result = answer.status, answer.read()
    connection.close()
    return result


def test_values_are_kept_until_all_members_of_the_scope_are_done() -> None:
    server = serve(listen("127.0.0.1"), hosts=["localhost"], slots=[2])
    try:
        assert _ask(server.port, "GET")[0] == 404
        assert _ask(server.port, "PUT", b"address")[0] == 200
        assert _ask(server.port, "DELETE")[0] == 200
        assert _ask(server.port, "GET") == (200, b"address")
    finally:
        server.close()


def test_every_rank_is_told_its_place() -> None:
    slots = assign_ranks((Host("localhost", 2),), 2)
    env = rank_variables(slots[1], 2) | gloo_variables(
        address="127.0.0.1", port=4711, interface="lo")
    assert (env["HOROVOD_RANK"], env["HOROVOD_SIZE"]) == ("1", "2")
    assert env["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4711"

"""The key-value server that Horovod's Gloo ranks talk to."""

from __future__ import annotations

import http.client

from hvdtrain.build_horovod.rendezvous import gloo_environment, rendezvous_server


def _ask(port: int, method: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, "/global_/0", body)
    answer = connection.getresponse()
    result = answer.status, answer.read()
    connection.close()
    return result


def test_values_are_kept_for_the_whole_run() -> None:
    with rendezvous_server() as port:
        assert _ask(port, "GET")[0] == 404
        assert _ask(port, "PUT", b"address")[0] == 200
        assert _ask(port, "DELETE")[0] == 200
        assert _ask(port, "GET") == (200, b"address")


def test_every_rank_is_told_its_place() -> None:
    env = gloo_environment(1, 2, 4711)
    assert (env["HOROVOD_RANK"], env["HOROVOD_SIZE"]) == ("1", "2")
    assert env["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4711"

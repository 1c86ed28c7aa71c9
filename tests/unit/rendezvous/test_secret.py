"""The secret of a job: what is derived from it, and what is refused."""

import json

import pytest

from hvdtrain.errors import WorldError
from hvdtrain.rendezvous.client import RendezvousClient
from hvdtrain.rendezvous.secret import JobKey, job_key, new_secret, secret_in
from hvdtrain.rendezvous.server import Server
from hvdtrain.rendezvous.store import KeyValueStore

KEY = JobKey("the secret of this test")


def test_a_seal_holds_for_one_path_one_value_and_one_job() -> None:
    sealed = KEY.seal("hvdtrain.meet.start/0", b"value")
    assert KEY.unseal("hvdtrain.meet.start/0", sealed) == b"value"
    assert KEY.unseal("hvdtrain.meet.start/1", sealed) is None
    assert KEY.unseal("hvdtrain.meet.start/0", sealed + b"x") is None
    assert JobKey("another secret").unseal("hvdtrain.meet.start/0", sealed) is None
    assert KEY.unseal("hvdtrain.meet.start/0", b"") is None


def test_nothing_that_is_sent_or_shown_is_the_secret() -> None:
    shown = f"{KEY!r} {KEY.capability} {KEY.seal('p', b'v').decode()}"
    assert KEY.secret not in shown
    assert KEY.key.hex() not in shown


def test_jobs_differ_by_secret_and_by_identity() -> None:
    environ = {"HVDTRAIN_SECRET": new_secret()}
    keys = {job_key(env, identity).secret for env in ({}, environ) for identity in ("a", "b")}
    assert len(keys) == 4
    assert job_key(environ, "a") == job_key(dict(environ), "a")


def test_a_secret_that_is_none_is_refused() -> None:
    assert secret_in({}) is None
    with pytest.raises(WorldError, match="has 6 characters. Expected at least 16"):
        secret_in({"HVDTRAIN_SECRET": "sesame"})


@pytest.mark.parametrize("answer", [
    b"", b"[]", b"{}", b"\xff", b'{"who": 1, "mac": ""}', b'{"who": "[]", "mac": ""}',
    b'{"who": "{}", "mac": null}', b"<html>"])
def test_the_answer_of_a_stranger_proves_nothing(answer: bytes) -> None:
    assert KEY.identify("0" * 32, answer)[0] is False


def test_an_answer_holds_for_its_question_only() -> None:
    server = Server([], {"key": KEY.key.hex(), "capability": KEY.capability, "sizes": {"global": 2},
                         "sources": [], "names": [], "who": {"host": "a", "pid": 1}})
    request = b"GET /hvdtrain/identity/%s HTTP/1.1\r\n\r\n"
    status, answer = server.answer(request % (b"0" * 32)) or (0, b"")
    assert (status, KEY.identify("0" * 32, answer)) == (200, (True, {"host": "a", "pid": "1"}))
    assert KEY.identify("1" * 32, answer)[0] is False
    forged = json.loads(answer) | {"who": '{"host": "b", "pid": 1}'}
    assert KEY.identify("0" * 32, json.dumps(forged).encode())[0] is False
    for odd in (b"0", b"0" * 65, b"../../" + b"0" * 20, b"g" * 32):
        assert server.answer(request % odd) == (403, b"")


@pytest.mark.parametrize(("address", "expected"), [
    ("10.0.0.1", ("10.0.0.1", 4711, "")), ("10.0.0.1:4711/abc", ("10.0.0.1", 4711, "abc"))])
def test_where_a_rendezvous_is(address: str, expected: tuple[str, int, str]) -> None:
    client = RendezvousClient.of({"HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
                                  "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"}, "hvdtrain.test")
    assert client is not None
    assert (client.address, client.port, client._capability) == expected


@pytest.fixture
def store() -> KeyValueStore:
    """Of two ranks on hosta and one on hostb."""
    return KeyValueStore({"global": 3, "local_hosta": 2, "local_hostb": 1, "cross_0": 2,
                          "cross_1": 1}, KEY.key)


@pytest.mark.parametrize(("scope", "name", "status"), [
    ("global", "0", 200), ("global", "rank_2", 200), ("local_hosta", "1", 200),
    ("cross_0", "rank_0", 200), ("global_process_set_hash_1f", "1", 200),
    ("local_hosta_process_set_hash_ab12", "rank_1", 200),
    ("global", "3", 403), ("global", "rank_3", 403), ("global", "x", 403), ("global", "-1", 403),
    ("local_hostb", "1", 403), ("local_hostc", "0", 403), ("cross_2", "0", 403),
    ("global_process_set_hash_", "0", 403), ("global_process_set_hash_1/..", "0", 403),
    ("globalx", "0", 403), ("", "0", 403), ("hvdtrain.meet.start", "0", 403)])
def test_only_what_gloo_needs_can_be_set(store: KeyValueStore, scope: str, name: str,
                                         status: int) -> None:
    assert store.put(scope, name, b"x") == status
    assert store.get(scope, name) == (b"x" if status == 200 else None)


def test_a_value_stays_until_all_have_left(store: KeyValueStore) -> None:
    assert [store.put("global", "0", value) for value in (b"a", b"a", b"b")] == [200, 200, 409]
    assert [store.delete("global", name) for name in ("3", "x", "-1", "0", "1")] == [
        403, 403, 403, 200, 200]
    assert store.get("global", "0") == b"a"
    assert store.delete("global", "2") == 200
    assert store.get("global", "0") is None
    assert store.put("global", "0", b"b") == 200


def test_sealed_values_of_ours_stay_for_ever(store: KeyValueStore) -> None:
    sealed = KEY.seal("hvdtrain.ps/done", b"1")
    assert store.put("hvdtrain.ps", "done", sealed) == 200
    assert store.put("hvdtrain.ps", "done", KEY.seal("hvdtrain.ps/done", b"2")) == 409
    assert store.put("hvdtrain.ps", "other", sealed) == 403  # sealed for another path
    assert store.delete("hvdtrain.ps", "done") == 403
    assert store.get("hvdtrain.ps", "done") == sealed


def test_numbers_and_sizes_are_bounded(store: KeyValueStore) -> None:
    assert store.limit("global") < 10_000 < store.limit("hvdtrain.ps") == 1 << 20
    codes = [store.put(f"global_process_set_hash_{n:x}", "0", b"x") for n in range(3000)]
    assert codes[0] == 200
    assert codes[-1] == 507
    sealed = [(str(n), KEY.seal(f"hvdtrain.ps/{n}", b"")) for n in range(3000)]
    assert [store.put("hvdtrain.ps", name, value) for name, value in sealed][-1] == 507


def test_all_values_together_are_bounded(store: KeyValueStore) -> None:
    value = b"x" * ((1 << 20) - 64)
    codes = [store.put("hvdtrain.ps", str(n), KEY.seal(f"hvdtrain.ps/{n}", value))
             for n in range(70)]
    assert (codes[60], codes[-1]) == (200, 507)

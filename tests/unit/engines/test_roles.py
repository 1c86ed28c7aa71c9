"""Which rank is what; what is told to the process of a role."""

import json
import socket
import threading

import pytest

from hvdtrain.config import TrainConfig
from hvdtrain.engine_config import PsConfig
from hvdtrain.engines.parameter_server import supervisor
from hvdtrain.engines.parameter_server.child import greets, is_stopped
from hvdtrain.engines.parameter_server.roles import (
    Assignment,
    Role,
    plan_roles,
    tf_config_roles,
)
from hvdtrain.engines.parameter_server.supervisor import _devices, _threads, make_supervisor
from hvdtrain.errors import ConfigError, WorldError
from hvdtrain.process import StopFlag
from hvdtrain.rendezvous.secret import SECRET_VARIABLE, JobKey
from hvdtrain.rendezvous.serve import gloo_variables, listen_on_all, serve
from hvdtrain.world.detect import detect_world

SECRET = "the secret of this test"
KEY = JobKey(SECRET)


def names(size, **settings):
    return [str(role) for role in plan_roles(size, PsConfig(**settings))]


def test_roles_of_one_host_that_draw_one_port_get_two(monkeypatch, tmp_path):
    """Each of them is told all addresses, by the rendezvous of a launcher."""
    draws = {rank: iter([21000, 21001 + rank, 21010 + rank]) for rank in range(3)}
    told = {}

    def randint(low, high):
        return next(draws[int(threading.current_thread().name)])
    monkeypatch.setattr(supervisor.random, "randint", randint)
    monkeypatch.setattr(supervisor, "Supervisor", lambda assignment, *_: told.__setitem__(
        assignment.rank, assignment.cluster))
    server = serve(listen_on_all(["127.0.0.1"]), hosts=["localhost"], slots=[3], key=KEY)
    environ = {"HOROVOD_SIZE": "3", "HOROVOD_LOCAL_SIZE": "3", SECRET_VARIABLE: SECRET} | (
        gloo_variables(address="127.0.0.1", port=server.ports["127.0.0.1"], interface="lo",
                       key=KEY))
    try:
        threads = [threading.Thread(name=str(number), target=lambda world: make_supervisor(
            TrainConfig(engine="ps"), world, environ, [], StopFlag()), args=[
                detect_world(environ | {"HOROVOD_RANK": str(number), "HOROVOD_LOCAL_RANK":
                                        str(number)})]) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    finally:
        server.close()
    assert len(told) == 3
    addresses = [address for some in told[0].values() for address in some]
    assert len(addresses) == len(set(addresses)) == 3, told[0]
    assert "127.0.0.1:21000" in addresses


def test_the_chief_the_workers_the_servers_the_evaluator():
    assert names(5, servers=2) == ["the chief", "worker 0", "worker 1", "server 0", "server 1"]
    assert names(4, evaluator=True) == ["the chief", "worker 0", "server 0", "the evaluator"]


@pytest.mark.parametrize(("size", "settings"), [
    (2, {}), (3, {"servers": 2}), (3, {"evaluator": True})])
def test_no_worker_is_left(size, settings):
    with pytest.raises(ConfigError, match=rf"Received: {size}. Start it with: hvdtrain launch"):
        plan_roles(size, PsConfig(**settings))


def test_backup_workers_alone_train_nothing():
    with pytest.raises(ConfigError, match="leave none to train"):
        plan_roles(4, PsConfig(mode="sync", backup_workers=2))


@pytest.mark.parametrize(("settings", "words"), [
    ({"mode": "async", "backup_workers": 1}, "belong to mode 'sync'"),
    ({"mode": "sync", "staleness": 1}, "belongs to mode 'async'"),
    ({"partitioner": "halves"}, "fixed:SHARDS"), ({"servers": 0}, "at least 1"),
    ({"staleness": -1}, "at least 0")])
def test_settings_that_contradict_each_other(settings, words):
    with pytest.raises(ConfigError, match=words):
        PsConfig(**settings)


CLUSTER = {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"]}


def tf_config(kind, index=0, cluster=CLUSTER):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(("kind", "index", "rank", "size"), [
    ("chief", 0, 0, 4), ("worker", 1, 2, 4), ("ps", 0, 3, 4), ("evaluator", 0, 4, 5)])
def test_tf_config_names_rank_and_role(kind, index, rank, size):
    text = tf_config(kind, index)
    world = detect_world({"TF_CONFIG": text}, parameter_servers=True)
    assert (world.rank, world.size, world.hosts) == (rank, size, ("a", "b", "c", "d"))
    roles, role, addresses = tf_config_roles(text)
    assert role == Role(kind=kind, index=index)
    assert len(roles) == 4
    assert addresses == CLUSTER
    if kind in ("ps", "evaluator"):
        with pytest.raises(WorldError, match="--engine ps"):
            detect_world({"TF_CONFIG": text})


def test_a_cluster_without_servers_is_no_parameter_server():
    cluster = {"chief": ["a:1"], "worker": ["b:2"]}
    with pytest.raises(ConfigError, match="has no ps in its cluster"):
        tf_config_roles(tf_config("chief", cluster=cluster))


def test_an_assignment_survives_the_environment():
    told = Assignment(role=Role(kind="worker", index=1), rank=2, size=4, host="b",
                      cluster=CLUSTER, hosts=["a", "b", "c", "d"], threads=3, starts=1)
    again = Assignment.from_json(told.to_json())
    assert again == told
    assert (again.workers, again.servers) == (2, 1)


def test_workers_of_a_host_get_its_gpus_in_turn():
    roles = plan_roles(6, PsConfig(servers=2))
    hosts = ["a", "a", "a", "b", "a", "b"]
    chosen = [_devices(rank, hosts, roles, {})["CUDA_VISIBLE_DEVICES"] for rank in range(6)]
    assert chosen == ["-1", "0", "1", "0", "-1", "-1"]
    assert _devices(2, hosts, roles, {"CUDA_VISIBLE_DEVICES": "4,6"}) == {
        "CUDA_VISIBLE_DEVICES": "6"}
    assert _devices(2, hosts, roles, {"CUDA_VISIBLE_DEVICES": "5"}) == {}
    assert _threads(1, hosts, roles) >= 1


def test_only_a_grpc_server_greets():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert not greets(address)

        def answer():
            connection, _ = silent.accept()  # the first one was not taken up
            connection.close()
            connection, _ = silent.accept()
            connection.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            connection.close()
        thread = threading.Thread(target=answer)
        thread.start()
        assert greets(address)
        thread.join()
    assert not greets(address)


def test_a_process_that_runs_is_not_stopped():
    import os
    assert not is_stopped(os.getpid())

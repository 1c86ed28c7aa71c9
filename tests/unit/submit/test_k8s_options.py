"""What `hvdtrain k8s` refuses, and what it makes of the rest."""

from typing import Any

import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.submit.k8s_options import Claim, KubernetesOptions


def options(**changes: Any) -> KubernetesOptions:
    return KubernetesOptions(**({"kind": "mpijob", "name": "digits", "image": "a/b:1"} | changes))


@pytest.mark.parametrize(("changes", "message"), [
    ({"name": "Digits"}, "--name is 'Digits'"), ({"name": ""}, "--name"),
    ({"name": "1a"}, "begin with a letter"), ({"name": "a_b"}, "--name"),
    ({"name": "a-"}, "--name"), ({"name": "a.b"}, "--name"), ({"name": "a\n"}, "--name"),
    ({"name": "a" * 55}, "at most 54 lower-case"),
    ({"name": "a" * 54, "workers": 11}, "at most 53 lower-case"),
    ({"namespace": "A"}, "--namespace"), ({"service_account": "a/b"}, "--service-account"),
    ({"image": ""}, "--image"), ({"image": "a b"}, "--image"), ({"image": "-x"}, "--image"),
    ({"program": ""}, "--program"), ({"program": "-x"}, "--program"),
    ({"workers": 0}, "--workers is 0"), ({"slots_per_worker": 0}, "--slots-per-worker is 0"),
    ({"gpus_per_worker": -1}, "--gpus-per-worker is -1"), ({"ttl_s": -1}, "--ttl is -1"),
    ({"backoff_limit": -1}, "--backoff-limit"), ({"grace_s": 0}, "--grace is 0"),
    ({"gpus_per_worker": 2, "slots_per_worker": 4}, "4 ranks in each pod have 2 GPUs"),
    ({"kind": "tfjob", "slots_per_worker": 2}, "one rank in each pod"),
    ({"kind": "tfjob", "gpus_per_worker": 2}, "one rank in each pod, which uses one GPU"),
    ({"restart_policy": "ExitCode"}, "Expected one of: Never, OnFailure"),
    ({"kind": "tfjob", "restart_policy": "x"}, "Never, OnFailure, Always, ExitCode"),
    ({"clean_pod_policy": "running"}, "Running, All, None"),
    ({"implementation": "OpenMPI"}, "openmpi, intel, mpich"),
    ({"cpu": "1.5.0"}, "--cpu"), ({"cpu": "4 "}, "--cpu"), ({"memory": "16GB"}, "--memory"),
    ({"shm": "lots"}, "--shm"), ({"memory": "-1Gi"}, "--memory"),
    ({"env": ("A",)}, "Expected VAR=VALUE"), ({"env": ("A b=1",)}, "--env"),
    ({"pvc": ("data",)}, "Expected NAME:MOUNT"), ({"pvc": ("data:data",)}, "begins with /"),
    ({"pvc": ("data:/",)}, "--pvc"), ({"pvc": ("Data:/d",)}, "--pvc"),
    ({"pvc": ("a:/d:ro",)}, "holds no colon"),
    ({"pvc": ("a:/d", "b:/d/")}, "Two volumes are mounted at /d"),
    ({"pvc": ("a:/dev/shm",)}, "Two volumes are mounted at /dev/shm"),
])
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changes)


@pytest.mark.parametrize(("changes", "slots"), [
    ({}, 1), ({"slots_per_worker": 3}, 3), ({"gpus_per_worker": 4}, 4),
    ({"gpus_per_worker": 4, "slots_per_worker": 2}, 2), ({"kind": "tfjob"}, 1)])
def test_a_rank_for_each_gpu(changes: dict[str, Any], slots: int) -> None:
    assert options(**changes).slots == slots


@pytest.mark.parametrize(("cpu", "slots", "threads"), [
    (None, 1, None), ("8", 1, 8), ("8", 3, 2), ("500m", 1, 1), ("7500m", 2, 3), ("2.5", 1, 2)])
def test_ranks_share_the_processors_of_their_pod(cpu: str | None, slots: int,
                                                 threads: int | None) -> None:
    assert options(cpu=cpu, slots_per_worker=slots).threads == threads


def test_the_longest_names_and_claims() -> None:
    assert options(name="a" * 54).name == "a" * 54  # with -worker-0 63 characters
    assert options(pvc=("a.b:/x/y/",)).claims == (Claim(name="a.b", mount="/x/y"),)

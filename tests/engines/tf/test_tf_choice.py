"""Which strategy trains: pure, no TensorFlow."""

import dataclasses
import json
import subprocess
import sys

import pytest

from hvdtrain.engine_config import TfConfig
from hvdtrain.engines.tf_distribute.choice import choose_strategy, cluster_in
from hvdtrain.errors import ConfigError, DeviceError, WorldError
from hvdtrain.world.detect import detect_world

ALONE = detect_world({}, hostname="host")
OF_TWO = dataclasses.replace(ALONE, size=2, local_size=2, starter="native")


@pytest.mark.parametrize(("config", "world", "gpus", "name", "devices", "cross_device"), [
    ({}, ALONE, 0, "default", ("CPU:0",), "auto"),
    ({}, ALONE, 1, "default", ("GPU:0",), "auto"),
    ({}, ALONE, 2, "mirrored", ("GPU:0", "GPU:1"), "nccl"),
    ({"devices": 3}, ALONE, 4, "mirrored", ("GPU:0", "GPU:1", "GPU:2"), "nccl"),
    ({"devices": 2}, ALONE, 0, "mirrored", ("CPU:0", "CPU:1"), "reduction_to_one_device"),
    ({}, OF_TWO, 0, "multi_worker_mirrored", ("CPU:0",), "ring"),
    ({}, OF_TWO, 1, "multi_worker_mirrored", ("GPU:0",), "nccl"),
    ({"strategy": "multi_worker_mirrored", "cross_device": "ring"}, OF_TWO, 1,
     "multi_worker_mirrored", ("GPU:0",), "ring"),
    ({"strategy": "one_device"}, ALONE, 1, "one_device", ("GPU:0",), "auto"),
    ({"device": "cpu:1"}, ALONE, 1, "one_device", ("CPU:1",), "auto"),
    ({"strategy": "mirrored"}, ALONE, 0, "mirrored", ("CPU:0",), "reduction_to_one_device"),
    ({"strategy": "central_storage"}, ALONE, 2, "central_storage", ("GPU:0", "GPU:1"), "auto"),
    ({"strategy": "mirrored", "devices": 2, "cross_device": "hierarchical_copy"}, ALONE, 2,
     "mirrored", ("GPU:0", "GPU:1"), "hierarchical_copy"),
    ({"tpu": "local"}, ALONE, 0, "tpu", (), "auto"),
])
def test_the_choice(config, world, gpus, name, devices, cross_device):
    choice = choose_strategy(TfConfig(**config), world, gpus=gpus)
    assert (choice.name, choice.devices, choice.cross_device) == (name, devices, cross_device)


def test_the_cpu_is_split_for_its_replicas_only():
    parts = [choose_strategy(TfConfig(**config), ALONE, gpus=gpus).logical_cpus
             for config, gpus in (({"devices": 3}, 0), ({"devices": 2}, 2), ({}, 0),
                                  ({"device": "CPU:1"}, 0))]
    assert parts == [3, 1, 1, 2]


@pytest.mark.parametrize(("config", "world", "gpus", "error", "said"), [
    ({"strategy": "mirrored"}, OF_TWO, 0, ConfigError, "in one process, and 2 were started"),
    ({"strategy": "default"}, OF_TWO, 0, ConfigError, "in one process, and 2 were started"),
    ({"strategy": "default", "devices": 2}, ALONE, 0, ConfigError,
     "devices=2 belongs to strategy mirrored or central_storage"),
    ({"strategy": "mirrored", "device": "CPU:0"}, ALONE, 0, ConfigError, "device='CPU:0' belongs"),
    ({"strategy": "mirrored", "tpu": "x"}, ALONE, 0, ConfigError, "tpu='x' belongs"),
    ({"strategy": "mirrored", "devices": 3}, ALONE, 2, DeviceError, "can use 2 GPUs"),
    ({"strategy": "one_device", "device": "GPU:1"}, ALONE, 1, DeviceError, "can use 1 GPU"),
    ({"strategy": "one_device", "device": "gpu"}, ALONE, 1, ConfigError, "written as CPU:0"),
    ({"strategy": "mirrored", "cross_device": "ring"}, ALONE, 0, ConfigError,
     "cannot add gradients by 'ring'"),
    ({"strategy": "mirrored", "cross_device": "nccl"}, ALONE, 0, ConfigError, "between GPUs"),
    ({"strategy": "central_storage", "cross_device": "nccl"}, ALONE, 2, ConfigError,
     "one of: auto"),
])
def test_what_does_not_fit_is_refused(config, world, gpus, error, said):
    with pytest.raises(error, match=said):
        choose_strategy(TfConfig(**config), world, gpus=gpus)


def test_a_given_cluster_is_used_as_it_is():
    text = json.dumps({"cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"]},
                       "task": {"type": "worker", "index": 1}})
    world = detect_world({"TF_CONFIG": text}, hostname="host")
    cluster = cluster_in(text)
    assert cluster.addresses == {"chief": ("a:1",), "worker": ("b:2", "c:3")}
    assert (cluster.task_type, cluster.task_index, world.rank) == ("worker", 1, 2)


def test_a_task_that_does_not_train_is_refused():
    text = json.dumps({"cluster": {"master": ["a:1"], "worker": ["b:2"]},
                       "task": {"type": "master", "index": 0}})
    with pytest.raises(WorldError, match="'master' with index 0"):
        cluster_in(text)


def test_a_process_that_is_missing_is_named():
    program = """
import dataclasses
from hvdtrain.engines.tf_distribute.choice import find_cluster
from hvdtrain.world.detect import detect_world
world = dataclasses.replace(detect_world({}), size=2, local_size=2, starter="native",
                            rendezvous="bootstrap", hosts=("127.0.0.1",), slots=(2,))
find_cluster(world, {}, timeout_s=0.2)
"""  # in a process of its own: the store is served to the end of it
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "WorldError: Not all of the 2 processes have started" in done.stderr
    assert "Missing: rank 1" in done.stderr

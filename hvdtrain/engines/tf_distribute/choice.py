"""Strategy, devices and addresses, without TensorFlow. All pure but `find_cluster`."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hvdtrain.engine_config import CrossDevice, TfConfig
from hvdtrain.errors import ConfigError, DeviceError, WorldError
from hvdtrain.rendezvous.barrier import barrier_at_port, exchange, open_rendezvous
from hvdtrain.runtime.watchdog import own_addresses
from hvdtrain.world import World
from hvdtrain.world.detect import parse_tf_config
from hvdtrain.world.network import interfaces

ChosenName = Literal["default", "one_device", "mirrored", "central_storage",
                     "multi_worker_mirrored", "tpu"]
_DEVICE = re.compile(r"^(CPU|GPU):(\d{1,3})$")
_SCOPE = "hvdtrain.tf"


@dataclass(frozen=True)
class _Strategy:
    """Name in TensorFlow, ways to add gradients, and settings that only some strategies use."""

    text: str
    settings: tuple[str, ...] = ()
    cross_device: tuple[CrossDevice, ...] = ("auto",)


_STRATEGIES: dict[ChosenName, _Strategy] = {
    "default": _Strategy("no strategy, one replica"),
    "one_device": _Strategy("OneDeviceStrategy", ("device",)),
    "mirrored": _Strategy("MirroredStrategy", ("devices",), (
        "auto", "nccl", "hierarchical_copy", "reduction_to_one_device")),
    "central_storage": _Strategy("CentralStorageStrategy", ("devices",)),
    "multi_worker_mirrored": _Strategy("MultiWorkerMirroredStrategy", (), ("auto", "nccl", "ring")),
    "tpu": _Strategy("TPUStrategy", ("tpu",)),
}


@dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """What a process makes; equal on all processes except for the devices.

    `devices` are this process' replicas, such as `GPU:1`; empty: TensorFlow decides. The CPU is
    split into `logical_cpus` to hold several replicas. `cross_device` is `auto` if there is only
    one way.
    """

    name: ChosenName
    devices: tuple[str, ...]
    logical_cpus: int
    cross_device: CrossDevice
    tpu: str = ""

    def describe(self) -> str:
        """One line for the plan."""
        how = "" if self.cross_device == "auto" else f", {self.cross_device.replace('_', ' ')}"
        return f"tf.distribute {self.name} ({_STRATEGIES[self.name].text}{how})"


def choose_strategy(config: TfConfig, world: World, *, gpus: int) -> StrategyChoice:
    """Decide this process' strategy, with so many GPUs. Pure.

    ConfigError if settings contradict each other or the processes; DeviceError if a device is
    missing.
    """
    name = _name(config, world, gpus)
    _refuse_settings_of_others(config, name)
    if world.size > 1 and name != "multi_worker_mirrored":
        raise ConfigError(
            f"Strategy {name!r} trains in one process, and {world.size} were started: they would "
            "train apart. Use --strategy multi_worker_mirrored for several processes, or start "
            "one.")
    devices = _devices(config, name, gpus)
    cpus = [int(device.split(":")[1]) for device in devices if device.startswith("CPU")]
    return StrategyChoice(
        name=name, devices=devices, logical_cpus=max([0, *cpus]) + 1,
        cross_device=_cross_device(config, name, on_gpu=gpus > 0), tpu=config.tpu or "")


def _name(config: TfConfig, world: World, gpus: int) -> ChosenName:
    if config.strategy != "auto":
        return config.strategy
    if world.size > 1:
        return "multi_worker_mirrored"
    if config.tpu is not None:
        return "tpu"
    if config.device is not None:
        return "one_device"
    return "mirrored" if (config.devices or gpus) > 1 else "default"


def _refuse_settings_of_others(config: TfConfig, name: ChosenName) -> None:
    """A setting that the strategy does not use would be a mistake that nobody sees."""
    for setting in ("devices", "device", "tpu"):
        value = getattr(config, setting)
        if value is not None and setting not in _STRATEGIES[name].settings:
            owners = [other for other, one in _STRATEGIES.items() if setting in one.settings]
            raise ConfigError(
                f"{setting}={value!r} belongs to strategy {' or '.join(owners)}, and the "
                f"strategy is {name!r}. Leave one of the two out.")
    known = _STRATEGIES[name].cross_device
    if config.cross_device not in known:
        raise ConfigError(
            f"Strategy {name!r} cannot add gradients by {config.cross_device!r}. Expected "
            f"cross_device to be one of: {', '.join(known)}.")


def _devices(config: TfConfig, name: ChosenName, gpus: int) -> tuple[str, ...]:
    kind = "GPU" if gpus else "CPU"
    if name == "one_device":
        asked = config.device or f"{kind}:0"
        match = _DEVICE.match(asked.upper())
        if match is None:
            raise ConfigError("device must be written as CPU:0 or GPU:1. Received: "
                              f"device={asked!r}")
        if match[1] == "GPU" and int(match[2]) >= gpus:
            raise DeviceError(f"device={asked!r} was asked for, and this process can use {gpus} "
                              f"GPU{'' if gpus == 1 else 's'}. Expected a device that is here.")
        return (match[0],)
    if name in ("mirrored", "central_storage"):
        count = config.devices or max(1, gpus)
        if 0 < gpus < count:
            raise DeviceError(
                f"{count} replicas were asked for, and this process can use {gpus} GPU"
                f"{'s' if gpus > 1 else ''}. Give devices={gpus} or less, or train on the CPU "
                "with CUDA_VISIBLE_DEVICES=-1.")
        return tuple(f"{kind}:{number}" for number in range(count))
    return () if name == "tpu" else (f"{kind}:0",)


def _cross_device(config: TfConfig, name: ChosenName, *, on_gpu: bool) -> CrossDevice:
    """Decide how gradients are added."""
    # Between CPU replicas TensorFlow's default runs collectives, which Keras' loop over several
    # steps breaks; plain copies work.
    if config.cross_device == "nccl" and not on_gpu:
        raise ConfigError("cross_device='nccl' adds gradients between GPUs, and this process has "
                          "none. Leave it out.")
    if config.cross_device != "auto" or name not in ("mirrored", "multi_worker_mirrored"):
        return config.cross_device
    if on_gpu:
        return "nccl"
    return "reduction_to_one_device" if name == "mirrored" else "ring"


@dataclass(frozen=True, kw_only=True)
class WorkerCluster:
    """The processes of `multi_worker_mirrored`, and which one this is, as in TF_CONFIG.

    `addresses` are `HOST:PORT` by task type; TensorFlow's server takes connections only from
    `admitted` (empty: from all).
    """

    addresses: dict[str, tuple[str, ...]]
    task_type: str
    task_index: int
    admitted: tuple[str, ...] = ()


def find_cluster(world: World, environ: Mapping[str, str], *,
                 timeout_s: float = 600.0) -> WorkerCluster:
    """Agree on the addresses of all processes; an error names absent ones. All processes."""
    # A TF_CONFIG's cluster is used as is, after all met at the first one's address (before
    # TensorFlow listens there). Otherwise each process offers an address and a free port.
    if world.starter == "tf_config":
        cluster = cluster_in(environ["TF_CONFIG"])
        first = (cluster.addresses.get("chief") or cluster.addresses["worker"])[0]
        barrier_at_port(world, environ, int(first.rpartition(":")[2]), timeout_s=timeout_s)
        return cluster
    client = open_rendezvous(world, environ, _SCOPE, timeout_s=timeout_s)
    address = own_addresses(world, environ)[0]
    with socket.create_server((address, 0)) as held:  # so that no one else takes it
        mine = [f"{address}:{held.getsockname()[1]}", *interfaces().values()]
        told = [json.loads(text) for text in exchange(
            client, world, "address", json.dumps(mine), timeout_s=timeout_s)]
    return WorkerCluster(addresses={"worker": tuple(place for place, *_ in told)},
                         task_type="worker", task_index=world.rank,
                         admitted=tuple(sorted({a for _, *sources in told for a in sources})))


def cluster_in(tf_config: str) -> WorkerCluster:
    """The cluster of a TF_CONFIG that `world.detect` has checked."""
    cluster, kind, index = parse_tf_config(tf_config)
    addresses = {kind: tuple(places) for kind, places in cluster.items()
                 if kind in ("chief", "worker")}
    if index >= len(addresses.get(kind, ())):
        raise WorldError(
            f"TF_CONFIG makes this process the {kind!r} with index {index}. Strategy "
            "multi_worker_mirrored knows tasks 'chief' and 'worker'. Name it one of these.")
    return WorkerCluster(addresses=addresses, task_type=kind, task_index=index)

"""Which strategy trains, on which devices: decided from values, so that it is tested anywhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hvdtrain.engine_config import CrossDevice, TfConfig
from hvdtrain.errors import ConfigError, DeviceError
from hvdtrain.world import World

ChosenName = Literal["default", "one_device", "mirrored", "central_storage",
                     "multi_worker_mirrored", "tpu"]
_DEVICE = re.compile(r"^(CPU|GPU):(\d{1,3})$")
_CROSS_DEVICE: dict[str, tuple[CrossDevice, ...]] = {
    "mirrored": ("auto", "nccl", "hierarchical_copy", "reduction_to_one_device"),
    "multi_worker_mirrored": ("auto", "nccl", "ring"),
}
_IN_WORDS = {
    "default": "no strategy, one replica",
    "one_device": "OneDeviceStrategy",
    "mirrored": "MirroredStrategy",
    "central_storage": "CentralStorageStrategy",
    "multi_worker_mirrored": "MultiWorkerMirroredStrategy",
    "tpu": "TPUStrategy",
}


@dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """What a process makes. Equal on all processes but for their devices."""

    name: ChosenName
    devices: tuple[str, ...]
    """The replicas of this process, such as `GPU:1`; empty where TensorFlow decides."""
    logical_cpus: int
    """Parts that the CPU is split into, so that it holds several replicas; 1 leaves it whole."""
    cross_device: CrossDevice
    """How gradients are added; `auto` where the strategy has one way only."""
    tpu: str = ""

    def describe(self) -> str:
        """One line for the plan."""
        how = "" if self.cross_device == "auto" else f", {self.cross_device.replace('_', ' ')}"
        return f"tf.distribute {self.name} ({_IN_WORDS[self.name]}{how})"


def choose_strategy(config: TfConfig, world: World, *, gpus: int) -> StrategyChoice:
    """Decide which strategy this process makes. Pure.

    Args:
        config: What was asked for.
        world: What the starter promised.
        gpus: Integer, GPUs that this process may use.

    Raises:
        ConfigError: The settings contradict each other, or the number of processes.
        DeviceError: A device is asked for that is not here.
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
        name=name, devices=devices, logical_cpus=max([1, *(number + 1 for number in cpus)]),
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
    """A setting that the strategy does not heed would be a mistake that nobody sees."""
    for setting, value, owners in (
            ("devices", config.devices, ("mirrored", "central_storage")),
            ("device", config.device, ("one_device",)),
            ("tpu", config.tpu, ("tpu",))):
        if value is not None and name not in owners:
            raise ConfigError(
                f"{setting}={value!r} belongs to strategy {' or '.join(owners)}, and the "
                f"strategy is {name!r}. Leave one of the two out.")
    known = _CROSS_DEVICE.get(name, ("auto",))
    if config.cross_device not in known:
        raise ConfigError(
            f"Strategy {name!r} cannot add gradients by {config.cross_device!r}. Expected "
            f"cross_device to be one of: {', '.join(known)}.")


def _devices(config: TfConfig, name: ChosenName, gpus: int) -> tuple[str, ...]:
    if name == "one_device":
        return (_one_device(config.device or ("GPU:0" if gpus else "CPU:0"), gpus),)
    if name in ("mirrored", "central_storage"):
        count = config.devices or max(1, gpus)
        if 0 < gpus < count:
            raise DeviceError(
                f"{count} replicas were asked for, and this process can use {gpus} GPU"
                f"{'s' if gpus > 1 else ''}. Give devices={gpus} or less, or train on the CPU "
                "with CUDA_VISIBLE_DEVICES=-1.")
        return tuple(f"{'GPU' if gpus else 'CPU'}:{number}" for number in range(count))
    if name == "tpu":
        return ()
    return ("GPU:0" if gpus else "CPU:0",)


def _one_device(text: str, gpus: int) -> str:
    device = text.upper()
    match = _DEVICE.match(device)
    if match is None:
        raise ConfigError(f"device must be written as CPU:0 or GPU:1. Received: device={text!r}")
    if match[1] == "GPU" and int(match[2]) >= gpus:
        raise DeviceError(f"device={text!r} was asked for, and this process can use {gpus} GPU"
                          f"{'' if gpus == 1 else 's'}. Expected a device that is here.")
    return device


def _cross_device(config: TfConfig, name: ChosenName, *, on_gpu: bool) -> CrossDevice:
    """Decide how gradients are added.

    Between CPU replicas of one process TensorFlow's default runs collectives, which Keras' loop
    over several steps breaks; plain copies work.
    """
    if config.cross_device == "nccl" and not on_gpu:
        raise ConfigError("cross_device='nccl' adds gradients between GPUs, and this process has "
                          "none. Leave it out.")
    if config.cross_device != "auto":
        return config.cross_device
    if name == "mirrored":
        return "nccl" if on_gpu else "reduction_to_one_device"
    if name == "multi_worker_mirrored":
        return "nccl" if on_gpu else "ring"
    return "auto"

"""Makes the strategy that was chosen: before TensorFlow has run anything in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvdtrain.engine_config import TfConfig
from hvdtrain.engines.tf_distribute.choice import StrategyChoice
from hvdtrain.engines.tf_distribute.cluster import Cluster
from hvdtrain.errors import DeviceError, WorldError
from hvdtrain.runtime.admission import admit_only
from hvdtrain.train import devices
from hvdtrain.world import World

_CROSS_DEVICE_OPS = {
    "hierarchical_copy": "HierarchicalCopyAllReduce",
    "nccl": "NcclAllReduce",
    "reduction_to_one_device": "ReductionToOneDevice",
}


def visible_gpus(config: TfConfig, world: World, environ: Mapping[str, str]) -> int:
    """Pin this process' devices and threads, and count the GPUs it may use.

    A worker of `multi_worker_mirrored` is pinned as a rank of allreduce is. Every process;
    before TensorFlow runs its first operation.

    Raises:
        DeviceError: More processes on this host than GPUs, or TensorFlow is already in use.
    """
    if world.size > 1 or config.strategy == "multi_worker_mirrored":
        return 0 if devices.pin(world, environ).gpu is None else 1
    found = tf.config.list_physical_devices("GPU")
    threads = devices.usable_cores()
    try:
        for gpu in found:
            tf.config.experimental.set_memory_growth(gpu, True)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    except RuntimeError as error:
        raise _already_in_use(error) from error
    return len(found)


def make_strategy(choice: StrategyChoice, cluster: Cluster | None) -> Any:
    """Make the strategy. Every process; it returns when all processes have met.

    Args:
        choice: What to make.
        cluster: The addresses of all processes; None for one process.

    Returns:
        A `tf.distribute.Strategy`.

    Raises:
        DeviceError: TensorFlow is already in use, or the TPU is not there.
    """
    _split_cpu(choice.logical_cpus)
    if choice.name == "default":
        return tf.distribute.get_strategy()
    if choice.name == "one_device":
        return tf.distribute.OneDeviceStrategy(choice.devices[0])
    if choice.name == "mirrored":
        return _mirrored(choice)
    if choice.name == "central_storage":
        return tf.distribute.experimental.CentralStorageStrategy(
            compute_devices=list(choice.devices), parameter_device="CPU:0")
    if choice.name == "tpu":
        return _tpu(choice.tpu)
    return _multi_worker(choice, cluster)


def check_promise(strategy: Any, choice: StrategyChoice, world: World) -> None:
    """Stop a process that was promised to be one of N and finds itself elsewhere.

    Raises:
        WorldError: The strategy has another number of replicas than was promised.
    """
    found = int(strategy.num_replicas_in_sync)
    expected = max(1, len(choice.devices)) * world.size
    if choice.name == "tpu" or found == expected:
        return
    raise WorldError(
        f"{world.starter} started this process as {world.rank} of {world.size}, which makes "
        f"{expected} replica{'s' if expected > 1 else ''} in strategy {choice.name!r}, but "
        f"TensorFlow finds {found}. Give all processes the same settings and, where TF_CONFIG is "
        "set, the same cluster in it.")


def _split_cpu(parts: int) -> None:
    if parts == 1:
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or ()) >= parts:
        return
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(parts)])
    except RuntimeError as error:
        raise _already_in_use(error) from error


def _mirrored(choice: StrategyChoice) -> Any:
    make = getattr(tf.distribute, _CROSS_DEVICE_OPS[choice.cross_device])
    return tf.distribute.MirroredStrategy(list(choice.devices), cross_device_ops=make())


def _multi_worker(choice: StrategyChoice, cluster: Cluster | None) -> Any:
    kinds = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=kinds.NCCL if choice.cross_device == "nccl" else kinds.RING)
    resolver = None
    if cluster is not None:
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({kind: list(places)
                                  for kind, places in cluster.addresses.items()}),
            task_type=cluster.task_type, task_id=cluster.task_index, rpc_layer="grpc")
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        cluster_resolver=resolver, communication_options=options)
    _take_sigterm_back()
    if cluster is not None and cluster.admitted:
        admit_only(cluster.own_port, cluster.admitted)
    return strategy


def _take_sigterm_back() -> None:
    """TensorFlow's coordination service takes SIGTERM for itself, past Python, and does nothing.

    The process could then be neither stopped on request nor ended but by SIGKILL.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _tpu(name: str) -> Any:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        if name != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        said = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
        raise DeviceError(
            f"The TPU {name!r} cannot be used ({type(error).__name__}: {said}). Expected a name "
            "or address that this machine reaches, or 'local' on a TPU machine, and a TensorFlow "
            "built for TPUs. Give it with --tpu NAME, or train on what is here: --strategy "
            "auto.") from error


def _already_in_use(error: RuntimeError) -> DeviceError:
    return DeviceError(
        f"TensorFlow was used before the devices of this process were set ({error}). Run no "
        "TensorFlow operation before the training, not even where the job's module is imported.")

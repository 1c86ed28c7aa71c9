"""Makes the chosen strategy, and exchanges what its replicas and processes need besides gradients.

The strategy is made before TensorFlow has run anything in this process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Array, Collective, ReduceOp, Tensor
from hvdtrain.collectives.plain import decode, encode
from hvdtrain.engine_config import TfConfig
from hvdtrain.engines.tf_distribute.choice import StrategyChoice, WorkerCluster
from hvdtrain.errors import CollectiveError, DeviceError, RanksDifferError, WorldError
from hvdtrain.optim import state
from hvdtrain.runtime.admission import admit_only
from hvdtrain.train import devices
from hvdtrain.world import World

_CROSS_DEVICE_OPS = {
    "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    "nccl": tf.distribute.NcclAllReduce,
    "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
}
_REDUCE_OPS = {"average": tf.distribute.ReduceOp.MEAN, "sum": tf.distribute.ReduceOp.SUM}
_WORD = 4  # bytes of an int32, which every collective of TensorFlow supports


def visible_gpus(config: TfConfig, world: World, environ: Mapping[str, str]) -> int:
    """Pin devices and threads, and count the usable GPUs. All processes."""
    # A worker of `multi_worker_mirrored` is pinned as a rank of allreduce.
    if world.size > 1 or config.strategy == "multi_worker_mirrored":
        return 0 if devices.pin(world, environ).gpu is None else 1
    found = tf.config.list_physical_devices("GPU")
    threads = devices.usable_cores()
    with _before_use():
        for gpu in found:
            tf.config.experimental.set_memory_growth(gpu, True)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    return len(found)


def make_strategy(choice: StrategyChoice, world: World, cluster: WorkerCluster | None) -> Any:
    """Make a `tf.distribute.Strategy`; returns when all of `cluster` have met. All processes."""
    # DeviceError if TensorFlow is in use or there is no TPU; WorldError if the number of replicas
    # is not what the starter promised.
    cpu, parts = tf.config.list_physical_devices("CPU")[0], choice.logical_cpus
    if parts > 1 and len(tf.config.get_logical_device_configuration(cpu) or ()) < parts:
        with _before_use():
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(parts)])
    names = list(choice.devices)
    if choice.name == "default":
        strategy = tf.distribute.get_strategy()
    elif choice.name == "one_device":
        strategy = tf.distribute.OneDeviceStrategy(names[0])
    elif choice.name == "mirrored":
        strategy = tf.distribute.MirroredStrategy(
            names, cross_device_ops=_CROSS_DEVICE_OPS[choice.cross_device]())
    elif choice.name == "central_storage":
        strategy = tf.distribute.experimental.CentralStorageStrategy(
            compute_devices=names, parameter_device="CPU:0")
    elif choice.name == "tpu":
        return _tpu(choice.tpu)
    else:
        strategy = _multi_worker(choice, cluster)
    found, expected = int(strategy.num_replicas_in_sync), len(names) * world.size
    if found != expected:
        raise WorldError(
            f"{world.starter} started this process as {world.rank} of {world.size}, which makes "
            f"{expected} replica{'s' if expected > 1 else ''} in strategy {choice.name!r}, but "
            f"TensorFlow finds {found}. Give all processes the same settings and, where TF_CONFIG "
            "is set, the same cluster in it.")
    return strategy


def _multi_worker(choice: StrategyChoice, cluster: WorkerCluster | None) -> Any:
    kinds = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=kinds.NCCL if choice.cross_device == "nccl" else kinds.RING)
    resolver = None
    if cluster is not None:
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({kind: list(own) for kind, own in cluster.addresses.items()}),
            task_type=cluster.task_type, task_id=cluster.task_index, rpc_layer="grpc")
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        cluster_resolver=resolver, communication_options=options)
    # TensorFlow's coordination service takes SIGTERM for itself, past Python, and does nothing: the
    # process could then be neither stopped on request nor ended but by SIGKILL.
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
    if cluster is not None and cluster.admitted:
        own = cluster.addresses[cluster.task_type][cluster.task_index]
        admit_only(int(own.rpartition(":")[2]), cluster.admitted)
    return strategy


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


@contextmanager
def _before_use() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(
            f"TensorFlow was used before the devices of this process were set ({error}). Run no "
            "TensorFlow operation before the training, not even where the job's module is "
            "imported.") from error


class StrategyCollective(Collective):
    """The processes of a `MultiWorkerMirroredStrategy` with one replica each. Eager only."""

    name = "tf.distribute"

    def __init__(self, strategy: Any, rank: int) -> None:
        self._strategy = strategy
        self.rank = rank
        self.size = int(strategy.num_replicas_in_sync)

    def reduce(self, tensors: Sequence[Tensor], *, name: str, op: ReduceOp) -> list[Tensor]:
        if op not in _REDUCE_OPS:
            raise CollectiveError(f"tf.distribute reduces by average or sum. Received: op={op!r}")
        return [self._strategy.reduce(_REDUCE_OPS[op], tensor, axis=None) for tensor in tensors]

    def _sum(self, array: Array) -> Array:
        return np.asarray(self.reduce([tf.constant(array)], name="", op="sum")[0])

    def _gather(self, array: Array) -> list[Array]:
        """All processes' arrays, of any length: a sum of tables with each process' own rows."""
        # `Strategy.gather` traces a graph at every call, which takes ten times as long.
        lengths = np.zeros(self.size, np.int32)
        lengths[self.rank] = len(array)
        ends = np.cumsum(self._sum(lengths))
        table = np.zeros((int(ends[-1]), *array.shape[1:]), array.dtype)
        end = int(ends[self.rank])
        table[end - len(array):end] = array
        return np.split(self._sum(table), ends[:-1])

    def allgather(self, tensor: Tensor, *, name: str) -> Tensor:
        return tf.constant(np.concatenate(self._gather(np.asarray(tensor))))

    def broadcast_array(self, array: Array, *, root: int = 0) -> Array:
        words = _as_words(array.tobytes())  # a sum to which only the root adds its bits
        received = self._sum(words if self.rank == root else np.zeros_like(words)).tobytes()
        return np.frombuffer(received[:array.nbytes], array.dtype).reshape(array.shape).copy()

    def gather_objects(self, value: object) -> list[Any]:
        return [decode(words.tobytes()) for words in self._gather(_as_words(encode(value)))]


def _as_words(data: bytes) -> Array:
    """Bytes as int32, padded with zeros."""
    return np.frombuffer(data + bytes(-len(data) % _WORD), np.int32)


def average_statistics(strategy: Any, collective: Collective, model: Any) -> None:
    """Give all replicas the mean of BatchNorm's moving statistics. All processes."""
    # They move linearly, so the mean at an epoch's end is that of means at every step. A variable
    # that is equal on all replicas stays as it is, bit for bit.
    if collective.size > 1:  # of one replica each
        state.average_statistics(collective, model)
        return
    for variable in model.non_trainable_weights:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        parts = local_values(strategy, variable)
        if keras.backend.is_float_dtype(dtype) and len({part.tobytes() for part in parts}) > 1:
            variable.assign(np.mean(parts, axis=0, dtype=np.float64).astype(dtype))


def local_values(strategy: Any, variable: Any) -> list[Array]:
    """The values of a Keras variable in the replicas of this process."""
    return [np.asarray(part.numpy())
            for part in strategy.experimental_local_results(variable.value)]


def check_replicas_equal(strategy: Any, variables: list[Any], *, when: str) -> None:
    """Stop if this process' replicas hold different weights; `when` is for the message."""
    for variable in variables:
        first, *others = local_values(strategy, variable)
        for number, other in enumerate(others, start=1):
            if first.tobytes() != other.tobytes():
                raise RanksDifferError(
                    f"The replicas of this process no longer hold the same weights {when}: "
                    f"replica {number} differs from replica 0, first in `{variable.path}`. "
                    "Something updates weights within a replica (a custom train_step or layer "
                    "that bypasses the optimizer). Training was stopped; the last checkpoint is "
                    "from before.")

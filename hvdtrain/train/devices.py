"""Which GPU and CPU threads a rank uses: `plan_devices` decides without a GPU, `pin` acts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from hvdtrain.errors import DeviceError
from hvdtrain.log import get_logger
from hvdtrain.world import World

_MORE_CORES = {"openmpi": "give mpirun --bind-to none",
               "slurm": "give sbatch and srun --cpus-per-task"}
_STARTERS = ("mpirun", "prterun", "prted", "orted", "hydra_pmi_proxy", "mpiexec.hydra")


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """A rank's GPU (number among those visible; None: CPU) and its threads in TensorFlow.

    `threads` work on one operation, and `starting` ones start operations.
    """

    gpu: int | None
    threads: int
    starting: int
    crowded: bool = False
    note: str = ""

    def __str__(self) -> str:
        where = "CPU" if self.gpu is None else f"GPU {self.gpu}"
        threads = f"{where}, {self.threads} CPU thread{'s' if self.threads > 1 else ''}"
        return f"{threads}; {self.note}" if self.note else threads


def plan_devices(world: World, *, visible_gpus: int, cores: int, environ: Mapping[str, str],
                 starter_cores: int = 0) -> DevicePlan:
    """Give each local rank one GPU of its host, and its share of the cores. Pure.

    `environ` tells the cores of this rank and of its host (Slurm), and whether the starter chose
    the GPU. The starter may have bound this rank to some of its `starter_cores` (0: not known).
    """
    on_node = environ.get("SLURM_CPUS_ON_NODE", "") if world.starter == "slurm" else ""
    host_cores = max(cores, starter_cores, int(on_node) if on_node.isdecimal() else 0)
    crowded = world.local_size > host_cores
    own = environ.get("SLURM_CPUS_PER_TASK", "")
    # A Slurm that does not bind tasks to cores lets each see those of all the others.
    limit = cores if world.starter == "slurm" else 0
    if own.isdigit() and (int(own) == cores or 0 < int(own) <= limit):
        threads = int(own)
    else:
        threads = max(1, min(cores, host_cores // world.local_size))
    # One such thread takes what became ready last, so that reductions would leave only when the
    # backward pass has ended (benchmarks/overlap.py). Within one host nothing is gained by it.
    starting = threads if world.local_size == world.size else max(2, threads)
    return DevicePlan(gpu=_plan_gpu(world, visible_gpus, environ), crowded=crowded,
                      threads=threads, starting=starting,
                      note=_note(world, cores, host_cores, crowded=crowded))


def _note(world: World, cores: int, host_cores: int, *, crowded: bool) -> str:
    many = f"{host_cores} core{'s' if host_cores > 1 else ''}"
    if crowded:
        return f"{world.local_size} ranks share {many}, so they wait for each other"
    if cores < host_cores // world.local_size:
        advice = _MORE_CORES.get(world.starter)
        return f"bound to {cores} of {many}{f': {advice}' if advice else ''}"
    return ""


def _plan_gpu(world: World, visible_gpus: int, environ: Mapping[str, str]) -> int | None:
    if visible_gpus == 0:
        return None
    if world.local_rank < visible_gpus and world.local_size <= visible_gpus:
        return world.local_rank
    # Slurm's --gpus-per-task (and users) give each rank one visible GPU.
    chosen = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("HIP_VISIBLE_DEVICES") or ""
    if visible_gpus == 1 and chosen and "," not in chosen:
        return 0
    raise DeviceError(
        f"Host {world.host} has {visible_gpus} GPU{'s' if visible_gpus > 1 else ''} for "
        f"{world.local_size} ranks; one GPU per rank is needed. Start at most {visible_gpus} "
        f"ranks on {world.host} (-H {world.host}:{visible_gpus}), or train on its CPUs with "
        "CUDA_VISIBLE_DEVICES=-1.")


def starter_cores() -> int:
    """Cores of the MPI process that started this rank, perhaps bound to fewer; 0 without one."""
    with suppress(psutil.Error):
        for parent in psutil.Process().parents():
            if parent.name() in _STARTERS:
                return len(parent.cpu_affinity())
    return 0


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def pin(world: World, environ: Mapping[str, str], *, late: bool = False) -> DevicePlan:
    """Pin GPU and threads; DeviceError if GPUs are too few or TensorFlow is in use. All ranks.

    `late`: on CPUs it is only a warning that TensorFlow is in use, and the threads stay.
    """
    import tensorflow as tf
    gpus: list[Any] = tf.config.list_physical_devices("GPU")
    plan = plan_devices(world, visible_gpus=len(gpus), cores=usable_cores(), environ=environ,
                        starter_cores=starter_cores())
    try:
        if plan.gpu is not None:
            tf.config.set_visible_devices(gpus[plan.gpu], "GPU")
            # All of them: scripts for Horovod do the same after `init`, when it is too late for
            # a change.
            for gpu in gpus:
                tf.config.experimental.set_memory_growth(gpu, True)
        tf.config.threading.set_intra_op_parallelism_threads(plan.threads)
        tf.config.threading.set_inter_op_parallelism_threads(plan.starting)
    except RuntimeError as error:
        if late and plan.gpu is None:
            get_logger().warning(
                "TensorFlow was used before hvd.init(), so its threads stay as they are. Call "
                "hvd.init() first, so that each rank takes its share of the cores.")
            return plan
        raise DeviceError(
            f"TensorFlow was used before hvdtrain could pin this rank's devices ({error}). "
            "Call hvdtrain.init() before the first TensorFlow or Keras operation.") from error
    return plan

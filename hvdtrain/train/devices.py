"""Which GPU and how many CPU threads a rank uses.

`plan_devices` decides from values (so that it is tested without a GPU); `pin` acts, before
TensorFlow touches a device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import DeviceError
from hvdtrain.world import World

_MORE_CORES = {"openmpi": "give mpirun --bind-to none",
               "slurm": "give sbatch and srun --cpus-per-task"}
_STARTERS = ("mpirun", "prterun", "prted", "orted", "hydra_pmi_proxy", "mpiexec.hydra")


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """What one rank uses of its host."""

    gpu: int | None
    """Index among the GPUs that this rank can see; None for CPU."""
    threads: int
    """Threads of TensorFlow's intra-op pool, and of its inter-op pool."""
    crowded: bool = False
    """Whether there are more ranks on this host than cores for them."""
    note: str = ""
    """What makes the rank slow and should be known."""

    def __str__(self) -> str:
        where = "CPU" if self.gpu is None else f"GPU {self.gpu}"
        threads = f"{where}, {self.threads} CPU thread{'s' if self.threads > 1 else ''}"
        return f"{threads}; {self.note}" if self.note else threads


def plan_devices(world: World, *, visible_gpus: int, cores: int, environ: Mapping[str, str],
                 starter_cores: int = 0) -> DevicePlan:
    """Give each local rank one GPU of its host, and its share of the cores. Pure.

    Args:
        world: Who this rank is.
        visible_gpus: Integer, GPUs that this process can see.
        cores: Integer, cores that this process may run on.
        environ: Mapping; `SLURM_CPUS_PER_TASK` tells cores that are this rank's own,
            `SLURM_CPUS_ON_NODE` those of all ranks of the host, and `CUDA_VISIBLE_DEVICES` that
            the starter chose the rank's GPU already.
        starter_cores: Integer, cores that the starter may run on, which may have bound this rank
            to some of them; 0 where that is not known.

    Raises:
        DeviceError: More ranks on this host than GPUs.
    """
    on_node = environ.get("SLURM_CPUS_ON_NODE", "") if world.starter == "slurm" else ""
    host_cores = max(cores, starter_cores, int(on_node) if on_node.isdecimal() else 0)
    crowded = world.local_size > host_cores
    return DevicePlan(gpu=_plan_gpu(world, visible_gpus, environ), crowded=crowded,
                      threads=_plan_threads(world, cores, host_cores, environ),
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
    if visible_gpus == 1 and _starter_chose_gpu(environ):
        return 0
    raise DeviceError(
        f"Host {world.host} has {visible_gpus} GPU{'s' if visible_gpus > 1 else ''} for "
        f"{world.local_size} ranks; one GPU per rank is needed. Start at most {visible_gpus} "
        f"ranks on {world.host} (-H {world.host}:{visible_gpus}), or train on its CPUs with "
        "CUDA_VISIBLE_DEVICES=-1.")


def _starter_chose_gpu(environ: Mapping[str, str]) -> bool:
    """Slurm's --gpus-per-task (and users) give each rank one visible GPU."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("HIP_VISIBLE_DEVICES") or ""
    return chosen != "" and "," not in chosen


def _plan_threads(world: World, cores: int, host_cores: int, environ: Mapping[str, str]) -> int:
    own = environ.get("SLURM_CPUS_PER_TASK", "")
    # A Slurm that does not bind tasks to cores lets each see those of all the others.
    limit = cores if world.starter == "slurm" else 0
    if own.isdigit() and (int(own) == cores or 0 < int(own) <= limit):
        return int(own)
    return max(1, min(cores, host_cores // world.local_size))


def starter_cores() -> int:
    """Cores of the process that an MPI has started this rank with; 0 where there is none.

    It runs on all that its job may use, and may bind each rank to some of them.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
            name, rest = stat.partition("(")[2].rsplit(")", 1)
            if name in _STARTERS:
                return len(os.sched_getaffinity(pid))
            pid = int(rest.split()[1])
        except (OSError, ValueError):
            return 0
    return 0


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def pin(world: World, environ: Mapping[str, str]) -> DevicePlan:
    """Pin this rank's GPU and threads. Every rank; before TensorFlow runs its first operation.

    Raises:
        DeviceError: More ranks on this host than GPUs, or TensorFlow is already in use.
    """
    import tensorflow as tf
    gpus: list[Any] = tf.config.list_physical_devices("GPU")
    plan = plan_devices(world, visible_gpus=len(gpus), cores=usable_cores(), environ=environ,
                        starter_cores=starter_cores())
    try:
        if plan.gpu is not None:
            tf.config.set_visible_devices(gpus[plan.gpu], "GPU")
            tf.config.experimental.set_memory_growth(gpus[plan.gpu], True)
        tf.config.threading.set_intra_op_parallelism_threads(plan.threads)
        tf.config.threading.set_inter_op_parallelism_threads(plan.threads)
    except RuntimeError as error:
        raise DeviceError(
            f"TensorFlow was used before hvdtrain could pin this rank's devices ({error}). "
            "Call hvdtrain.init() before the first TensorFlow or Keras operation.") from error
    return plan

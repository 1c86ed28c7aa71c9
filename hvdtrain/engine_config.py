"""Settings of the engines beside allreduce: the `[ps]` and `[tf]` tables of a job file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import ConfigError
from hvdtrain.settings import at_least, check_types

EngineName = Literal["allreduce", "ps", "tf"]
PsMode = Literal["async", "sync"]
Placement = Literal["greedy", "round_robin"]
PsEvaluation = Literal["direct", "distributed"]
WireDtype = Literal["float32", "bfloat16"]
StrategyName = Literal["auto", "default", "one_device", "mirrored", "central_storage",
                       "multi_worker_mirrored", "tpu"]
CrossDevice = Literal["auto", "nccl", "hierarchical_copy", "reduction_to_one_device", "ring"]

_PARTITIONER = re.compile(
    r"^(?:none|fixed:[1-9]\d*|(?:min|max)_size:[1-9]\d*(?::[1-9]\d*)?)$")


@dataclass(frozen=True, kw_only=True)
class PsConfig:
    """How parameter-server training works. Equal on all ranks."""

    servers: int = 1
    """Ranks that hold the parameters; the ranks are the chief, the workers, the servers and, if
    there is one, the evaluator, in this order."""
    mode: PsMode = "async"
    """`async`: each gradient is applied when it arrives. `sync`: the mean of
    `replicas_to_aggregate` gradients is applied, as one process would with so many batches."""
    replicas_to_aggregate: int | None = None
    """Gradients per update in mode `sync`. Default: the workers without the backup workers."""
    backup_workers: int = 0
    """Workers more than `sync` needs, which compute again what a slow worker has not delivered."""
    staleness: int | None = None
    """In mode `async`: a batch is begun only when all but so many of the batches before it have
    been applied. Default: no bound."""
    steps_per_closure: int = 10
    """In mode `async`: batches that a worker trains on before it reports to the chief. 1 with
    `staleness`."""
    placement: Placement = "greedy"
    """Which server gets which parameter: the one with the fewest bytes, or in turn."""
    partitioner: str = "none"
    """How large parameters are cut along their first axis: `none`, `fixed:SHARDS`,
    `min_size:BYTES[:MAX_SHARDS]` or `max_size:BYTES[:MAX_SHARDS]`."""
    fused: bool | None = None
    """Keep all parameters of a server in one vector. Default: wherever the optimizer treats every
    number alike."""
    sparse_embeddings: bool = True
    """Move only the rows of an embedding that a batch uses."""
    wire_dtype: WireDtype = "float32"
    """How parameters and gradients travel; they are kept in float32."""
    evaluation: PsEvaluation = "distributed"
    """Where validation runs after an epoch: on the workers, or on the chief (`direct`)."""
    evaluator: bool = False
    """The last rank evaluates each checkpoint on its own, beside the training (side-car)."""
    max_restarts: int = 3
    """How often a worker, a server or the chief is started again after it was lost."""
    start_timeout_s: float = 600.0
    """How long to wait for all ranks at the start, and for one that was started again."""

    def __post_init__(self) -> None:
        check_types(self)
        at_least(self, "servers", 1)
        at_least(self, "steps_per_closure", 1)
        at_least(self, "backup_workers", 0)
        at_least(self, "max_restarts", 0)
        at_least(self, "start_timeout_s", 1)
        for name in ("replicas_to_aggregate", "staleness"):
            if getattr(self, name) is not None:
                at_least(self, name, 0 if name == "staleness" else 1)
        if not _PARTITIONER.match(self.partitioner):
            raise ConfigError(
                "partitioner must be none, fixed:SHARDS, min_size:BYTES[:MAX_SHARDS] or "
                f"max_size:BYTES[:MAX_SHARDS]. Received: partitioner={self.partitioner!r}")
        self._check_mode()

    def _check_mode(self) -> None:
        if self.mode == "async" and (self.replicas_to_aggregate or self.backup_workers):
            raise ConfigError("replicas_to_aggregate and backup_workers belong to mode 'sync'. "
                              "Received: mode='async'. Give --ps-mode sync, or leave them out.")
        if self.mode == "sync" and self.staleness is not None:
            raise ConfigError("staleness belongs to mode 'async': in mode 'sync' no gradient is "
                              "stale. Leave one of the two out.")

    def replicas(self, workers: int) -> int:
        """Gradients per update: the number of ranks of allreduce that do the same.

        Raises:
            ConfigError: No worker is left.
        """
        if self.mode == "async":
            return 1
        replicas = self.replicas_to_aggregate or workers - self.backup_workers
        if replicas < 1:
            raise ConfigError(f"{workers} worker{'s' if workers > 1 else ''} of which "
                              f"{self.backup_workers} are backups leave none to train. Start "
                              "more ranks, or give fewer --ps-backup-workers.")
        return replicas


@dataclass(frozen=True, kw_only=True)
class TfConfig:
    """Which strategy of tf.distribute trains. Equal on all processes."""

    strategy: StrategyName = "auto"
    """`auto`: `multi_worker_mirrored` for several processes, `mirrored` for several GPUs in one,
    else `default`."""
    devices: int | None = None
    """Replicas in this process for `mirrored` and `central_storage`. Default: its GPUs, or 1."""
    device: str | None = None
    """The device of `one_device`, such as `GPU:1`. Default: the first GPU, or `CPU:0`."""
    cross_device: CrossDevice = "auto"
    """How replicas add gradients."""
    tpu: str | None = None
    """The name or address of the TPU."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.devices is not None:
            at_least(self, "devices", 1)

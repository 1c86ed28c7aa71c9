"""Settings of the engines beside allreduce: the `[ps]` and `[tf]` tables of a job file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import ConfigError
from hvdtrain.settings import check, setting

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

    servers: int = setting(
        1, "Ranks that hold the parameters. The ranks are the chief, the workers, the servers and, "
        "if there is one, the evaluator, in this order.", least=1, option="--ps")
    mode: PsMode = setting(
        "async", "Apply each gradient when it arrives (`async`), or the mean of several (`sync`). "
        "The mean is that of `replicas_to_aggregate` gradients, as of one process with so many "
        "batches.")
    replicas_to_aggregate: int | None = setting(
        None, "Mode `sync`: gradients per update.", least=1, option="--ps-replicas",
        unset="workers without backups")
    backup_workers: int = setting(
        0, "Mode `sync`: workers more than are needed. They compute again what a slow worker has "
        "not delivered.", least=0)
    staleness: int | None = setting(
        None, "Mode `async`: batches in flight beside the oldest one. A batch is begun only when "
        "all but so many of those before it have been applied.", least=0, unset="no bound")
    steps_per_closure: int = setting(
        10, "Mode `async`: batches that a worker trains on before it reports. 1 with `staleness`.",
        least=1)
    placement: Placement = setting(
        "greedy", "Which server gets which parameter. `greedy`: the one with the fewest bytes; "
        "`round_robin`: in turn.")
    partitioner: str = setting(
        "none", "How large parameters are cut along their first axis: `none`, `fixed:SHARDS`, "
        "`min_size:BYTES[:MAX_SHARDS]` or `max_size:BYTES[:MAX_SHARDS]`.")
    fused: bool | None = setting(
        None, "Keep all parameters of a server in one vector.", unset="wherever the optimizer "
        "treats every number alike")
    sparse_embeddings: bool = setting(
        True, "Move only the rows of an embedding that a batch uses.",
        option="--ps-sparse/--no-ps-sparse")
    wire_dtype: WireDtype = setting(
        "float32", "How parameters and gradients travel. They are kept in float32.")
    evaluation: PsEvaluation = setting(
        "distributed", "Where validation runs after an epoch: on the workers (`distributed`), or "
        "on the chief (`direct`).")
    evaluator: bool = setting(
        False, "The last rank evaluates each checkpoint on its own, beside the training.",
        option="--evaluator/--no-evaluator")
    max_restarts: int = setting(
        3, "How often a worker, a server or the chief is started again after it was lost.", least=0,
        option="--max-restarts")
    start_timeout_s: float = setting(
        600.0, "How long to wait for all ranks at the start, and for one that was started again.",
        least=1, metavar="SECONDS")

    def __post_init__(self) -> None:
        check(self)
        if not _PARTITIONER.match(self.partitioner):
            raise ConfigError(
                "partitioner must be none, fixed:SHARDS, min_size:BYTES[:MAX_SHARDS] or "
                f"max_size:BYTES[:MAX_SHARDS]. Received: partitioner={self.partitioner!r}")
        if self.mode == "async" and (self.replicas_to_aggregate or self.backup_workers):
            raise ConfigError("replicas_to_aggregate and backup_workers belong to mode 'sync'. "
                              "Received: mode='async'. Give --ps-mode sync, or leave them out.")
        if self.mode == "sync" and self.staleness is not None:
            raise ConfigError("staleness belongs to mode 'async': in mode 'sync' no gradient is "
                              "stale. Leave one of the two out.")

    def replicas(self, workers: int) -> int:
        """Gradients per update, the ranks of an equal allreduce; ConfigError without workers."""
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

    strategy: StrategyName = setting(
        "auto", "The strategy of tf.distribute. `auto`: `multi_worker_mirrored` for several "
        "processes, `mirrored` for several GPUs in one, else `default`.", option="--strategy")
    devices: int | None = setting(
        None, "Replicas in this process, for `mirrored` and `central_storage`.", least=1,
        option="--devices", unset="its GPUs, or 1")
    device: str | None = setting(
        None, "The device of `one_device`, such as `GPU:1`.", option="--device", unset="the first "
        "GPU, or `CPU:0`")
    cross_device: CrossDevice = setting(
        "auto", "How replicas add gradients.", option="--cross-device")
    tpu: str | None = setting(None, "The name or address of the TPU.", option="--tpu")

    def __post_init__(self) -> None:
        check(self)

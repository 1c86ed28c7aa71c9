"""Engine `tf`: the entry, without TensorFlow until it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hvdtrain import log
from hvdtrain.config import TrainConfig
from hvdtrain.job import Job
from hvdtrain.optional import require
from hvdtrain.world import World

if TYPE_CHECKING:
    from hvdtrain.train.fit import RunResult


def fit_with_strategy(job: Job, config: TrainConfig, world: World, environ: Mapping[str, str], *,
                      stop_asked: Callable[[], bool], dry_run: bool) -> RunResult:
    """Train a job under the strategy of `config.tf`. Every process must call it.

    It must come before the first TensorFlow operation of the process: devices are split and the
    processes meet here.

    Args:
        job: What to train; its model is compiled with a plain Keras optimizer.
        config: Settings, in place of the job's own.
        world: Which process this is.
        environ: The environment.
        stop_asked: Callable that tells whether this process was told to stop.
        dry_run: Boolean; print the plan and return.

    Returns:
        A `RunResult`, equal on all processes.

    Raises:
        ConfigError: Settings contradict each other, or differ between processes.
        DeviceError: Devices that were asked for are not here.
        WorldError: Processes are missing, or not as many replicas were found as promised.
        OptimizerError: The optimizer is not a plain one, or this Keras is not known.
        DataError: Fewer samples than replicas.
        TrainingError: The loss is not finite, replicas differ, or the run was told to stop.
        CheckpointError: A file could not be written or read.
    """
    log.configure(log.rank_prefix(world.rank, world.size, world.host))
    require("tensorflow", "training")
    require("keras", "training")
    from hvdtrain.engines.tf_distribute.training import StrategyRun
    with StrategyRun.open(config, world, environ) as run:
        return run.fit(job, stop_asked=stop_asked, dry_run=dry_run)

"""Engine `tf`: Keras 3 under the strategies of tf.distribute, with the guarantees of `fit`.

A *replica*, a copy of the model that computes gradients, stands for a rank of allreduce:
`batch_per_rank` is its batch, and replica r sees the samples that rank r would see.
"""

from __future__ import annotations

import os
from typing import Any

from hvdtrain import log
from hvdtrain.bench.usage import start_usage
from hvdtrain.config import TrainConfig
from hvdtrain.job import Job
from hvdtrain.optional import require
from hvdtrain.runtime.guard import Guard
from hvdtrain.world import World
from hvdtrain.world.detect import detect_world


def fit_with_strategy(job: Job, config: TrainConfig, world: World, guarded: Guard, *,
                      dry_run: bool) -> Any:
    """Train a job under the strategy of `config.tf`; the result is equal on all. All processes."""
    # Before TensorFlow's first operation: devices are split, and the processes meet here.
    start_usage(f"rank{world.rank}", os.environ)
    world = detect_world(os.environ)  # servers and the evaluator of a TF_CONFIG have no part in it
    log.configure(log.rank_prefix(world.rank, world.size, world.host))
    require("tensorflow", "training")
    require("keras", "training")
    from hvdtrain.engines.tf_distribute.training import open_strategy, train_job
    with open_strategy(config, world, os.environ) as under:
        return train_job(job, config, under, stop_asked=lambda: guarded.stop.requested,
                         dry_run=dry_run)

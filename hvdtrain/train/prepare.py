"""What comes before the first step: the optimizer checked, the model built, the steps agreed."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.config import TrainConfig
from hvdtrain.data.file_shares import FileShares
from hvdtrain.data.shard import ShardPlan
from hvdtrain.data.source import Source
from hvdtrain.data.stream import StreamSource, one_sample
from hvdtrain.data.stream_plan import StreamPlan
from hvdtrain.errors import OptimizerError
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_seam
from hvdtrain.optim.distributed import DistributedOptimizer, is_distributed
from hvdtrain.session import Session


def plan_steps(train: Source | StreamSource, validation: Source | StreamSource | None,
               session: Session, config: TrainConfig) -> ShardPlan | StreamPlan:
    """Which samples each rank trains on; of streams, how many."""
    collective, world = session.collective, session.world
    if isinstance(validation, StreamSource):
        validation.count_everywhere(collective)
    if isinstance(train, StreamSource):
        with session.progress.phase("counting the samples of the stream"):
            counts = train.count_everywhere(collective)
        return StreamPlan(counts=counts, rank=world.rank, batch_per_rank=config.batch_per_rank,
                          seed=config.seed,
                          shuffle=config.shuffle and isinstance(train, FileShares))
    return ShardPlan(
        samples=len(train), rank=world.rank, size=world.size,
        batch_per_rank=config.batch_per_rank, seed=config.seed, shuffle=config.shuffle,
        remainder=config.remainder)


def prepare_optimizer(model: Any, session: Session) -> None:
    """Check that gradients are reduced, and undo what `compile` did against it."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise OptimizerError("The model is not compiled. Call model.compile(optimizer, loss) "
                             "before training.")
    leaves = keras_seam.leaf_optimizers(optimizer)
    if not is_distributed(optimizer) and not all(is_distributed(leaf) for leaf in leaves):
        raise OptimizerError(
            f"The model's optimizer ({type(optimizer).__name__}) is not distributed: each rank "
            "would train alone. Compile with hvdtrain.DistributedOptimizer(optimizer). A copied, "
            "unpickled or reloaded optimizer is a plain one again: call "
            "hvdtrain.DistributedOptimizer(model.optimizer) after loading.")
    # compile() wraps an optimizer in a plain LossScaleOptimizer under mixed_float16.
    DistributedOptimizer(optimizer, collective=session.collective)
    keras_seam.self_test()
    if model.jit_compile:
        model.jit_compile = False
    model.train_function = None


def build_model(model: Any, train: Source | StreamSource) -> None:
    """Build model and optimizer now: what is built during tracing cannot be broadcast."""
    if not model.built:
        sample = one_sample(train)
        inputs = sample[0] if isinstance(sample, tuple) else sample
        model(tf.nest.map_structure(tf.convert_to_tensor, inputs))
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def fit_steps_per_execution(model: Any, session: Session, steps: int) -> None:
    """Keras runs whole executions: with 2 of them per 3 steps it would take a fourth step."""
    asked = model.steps_per_execution
    fitting = next(n for n in range(min(asked, steps), 0, -1) if steps % n == 0)
    if fitting == asked:
        return
    model.steps_per_execution = fitting
    if session.world.is_chief:
        get_logger().warning(
            "steps_per_execution is %d instead of %d: an epoch has %d steps, which is no "
            "multiple of it. The result is the same.", fitting, asked, steps)

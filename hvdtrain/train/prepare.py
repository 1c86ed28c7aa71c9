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
from hvdtrain.errors import DataError, OptimizerError
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.optim.as_set import distribute_as_set
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.session import Session


def plan_steps(model: Any, train: Source | StreamSource, validation: Source | StreamSource | None,
               session: Session, config: TrainConfig) -> ShardPlan | StreamPlan:
    """Which samples each rank trains on; of streams, how many."""
    collective, world = session.collective, session.world
    if isinstance(validation, StreamSource):
        validation.count_everywhere(collective)
    if isinstance(train, StreamSource):
        with session.progress.phase("counting the samples of the stream"):
            counts = train.count_everywhere(collective)
        if (config.batch_global or 0) % world.size:
            raise DataError(f"{train.name}: a stream is shared sample by sample, so that the "
                            f"global batch must divide by {world.size} ranks. Received: "
                            f"batch_global={config.batch_global}")
        return StreamPlan(counts=counts, rank=world.rank,
                          batch_per_rank=config.rank_batch(world.size), seed=config.seed or 0,
                          growth=1 if config.batch_global else world.size,
                          shuffle=config.shuffle and isinstance(train, FileShares),
                          stream_order=train.order)
    fixed = keras_model.has_fixed_batch(model)
    return ShardPlan(
        samples=len(train), rank=world.rank, size=world.size,
        batch_per_rank=config.rank_batch(world.size), batch_global=config.batch_global,
        seed=config.seed or 0, shuffle=config.shuffle,
        remainder=config.remainder_as("pad" if fixed else "join"), whole_batches=fixed)


def prepare_optimizers(model: Any, session: Session, config: TrainConfig) -> None:
    """Let all optimizers of the model reduce their gradients as set. All ranks."""
    found = keras_seam.found_optimizers(model)
    if not found:
        raise OptimizerError("The model is not compiled. Call model.compile(optimizer, loss) "
                             "before training.")
    for optimizer in found:
        distribute_as_set(optimizer, session.collective, ReducerOptions.of(config),
                          zero=config.zero)
    keras_seam.self_test()
    if model.jit_compile:
        model.jit_compile = False
    model.train_function = None


def build_model(model: Any, train: Source | StreamSource) -> None:
    """Build model and optimizers now: what is built during tracing cannot be broadcast.

    Where a `train_step` of the model's own uses more than its `call`, that is traced once.
    """
    several = len(keras_seam.found_optimizers(model)) > 1
    sample = None if _is_built(model) and not several else one_sample(train)
    if not _is_built(model) and keras_model.has_call(model):
        inputs = sample[0] if isinstance(sample, tuple) else sample
        model(tf.nest.map_structure(tf.convert_to_tensor, inputs))
    if several or not _is_built(model):
        keras_model.trace_train_step(model, sample)
    for optimizer in keras_seam.optimizers_of(model):
        if not optimizer.built:
            optimizer.build(model.trainable_variables)


def _is_built(model: Any) -> bool:
    return all(layer.built for layer in model._flatten_layers())


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

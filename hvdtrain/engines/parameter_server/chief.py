"""The chief's work: connect, build the model, put its parameters on the servers, train, save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.select import Choice
from hvdtrain.collectives.single import SingleCollective
from hvdtrain.config import TrainConfig
from hvdtrain.data.failures import reading_error
from hvdtrain.data.source import DataSplits, check_source, splits_of
from hvdtrain.data.stream import one_sample
from hvdtrain.engines.parameter_server import keras_parts, placement, tf_seam
from hvdtrain.engines.parameter_server.asynchronous import Asynchronous, Machinery
from hvdtrain.engines.parameter_server.feeding import Feed, shard_plan
from hvdtrain.engines.parameter_server.parameters import ServerParameters
from hvdtrain.engines.parameter_server.probe import ModelParts, take_apart
from hvdtrain.engines.parameter_server.server_optimizer import ServerOptimizer, layout
from hvdtrain.engines.parameter_server.step import MetricStates, StateVector, WorkerStep
from hvdtrain.engines.parameter_server.synchronous import Synchronous
from hvdtrain.engines.parameter_server.trainer import Run, Trainer
from hvdtrain.errors import DataError
from hvdtrain.job import Job
from hvdtrain.optim import keras_model
from hvdtrain.runtime.admission import admit_only
from hvdtrain.runtime.progress import Progress
from hvdtrain.session import Session
from hvdtrain.train import schedule
from hvdtrain.train.fit import RunResult
from hvdtrain.train.output import make_writers, open_output, resume, save_final
from hvdtrain.train.plan import TrainPlan, make_plan, verbosity
from hvdtrain.train.prepare import build_model
from hvdtrain.world import World


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The other processes."""

    addresses: Mapping[str, Sequence[str]]
    """`HOST:PORT` of each kind."""
    task: str | None
    """The kind of this process, where it is among them."""
    texts: tuple[str, ...]
    """For each process: what it is and where, in words."""
    feed: str
    """The name under which the workers read data."""
    admitted: Sequence[str] = ()
    """Addresses from which the server of this process takes connections; empty: from all."""

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.addresses["worker"])

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self.addresses["ps"])


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    model: Any
    splits: DataSplits
    parts: ModelParts
    plan: TrainPlan
    fused: bool
    partitioner: str


def train(job: Job, config: TrainConfig, cluster: Cluster, *, world: World, progress: Progress,
          stop_asked: Callable[[], bool], dry_run: bool,
          opened: Callable[[], None] = lambda: None) -> RunResult:
    """Train a job on parameter servers. The chief only, before any TensorFlow operation.

    Args:
        job: What to train.
        config: Settings, in place of the job's own.
        cluster: The other processes; the workers read the job's data under `cluster.feed`.
        world: Which rank this is.
        progress: For the watchdog.
        stop_asked: Callable that tells whether this process was told to stop.
        dry_run: Boolean; print the plan and return, without a connection.
        opened: Called when the output folder is this run's.

    Returns:
        A `RunResult`.

    Raises:
        ConfigError: The job cannot be trained this way.
        DataError: A worker cannot read its data.
        TrainingError: A loss is not finite.
        StoppedError: Stopped on request.
        CheckpointError: A file could not be written or read.
    """
    tf_seam.check_tensorflow()
    if dry_run:
        _show(_prepare(job, config, cluster))
        return RunResult(history={}, first_epoch=0, model_path=None)
    progress.enter("connecting with workers and servers")
    strategy, coordinator = tf_seam.connect(cluster.addresses, cluster.task)
    if cluster.admitted:
        admit_only(int(cluster.addresses["chief"][0].rpartition(":")[2]), cluster.admitted)
    try:
        progress.enter("building data and model")
        ready = _prepare(job, config, cluster)
        _show(ready)
        session = Session(world=world, collective=SingleCollective(), devices="CPU",
                          choice=Choice(name="single", reason="engine ps"), progress=progress)
        return _train(job, ready, config, cluster, session, strategy, coordinator, stop_asked,
                      opened)
    except tf.errors.OpError as error:
        why = reading_error(error)
        if why is None:
            raise
        raise DataError(f"A worker cannot read its data. {why}. Its output has the whole "
                        "traceback.") from None
    finally:
        tf_seam.disconnect(coordinator)


def _show(ready: _Prepared) -> None:
    print(f"hvdtrain plan\n{ready.plan.render()}", flush=True)  # noqa: T201 - promised output


def _train(job: Job, ready: _Prepared, config: TrainConfig, cluster: Cluster, session: Session,
           strategy: Any, coordinator: Any, stop_asked: Callable[[], bool],
           opened: Callable[[], None]) -> RunResult:
    progress, store = session.progress, open_output(session, config)
    opened()
    begin = resume(ready.model, session, config, store, ready.plan)
    writers = [] if store is None else make_writers(
        session, ready.plan, store, begin.epoch, ready.plan.shards.step_after(begin.samples))
    progress.enter("placing the parameters on the servers")
    machinery = _machinery(ready, config, cluster, strategy, coordinator)
    trainer = Trainer(
        Run(model=ready.model, plan=ready.plan, begin=begin, validation=ready.splits.validation,
            callbacks=tuple(job.callbacks()), writers=writers, store=store, progress=progress,
            stop_asked=stop_asked, verbose=verbosity(session.world)),
        machinery, _mode(machinery, config, ready.plan.shards.size))
    history = trainer.fit()
    progress.enter("saving the final model")
    if store is not None:
        store.wait()
    return RunResult(history=history, first_epoch=begin.epoch,
                     model_path=save_final(ready.model, session, config))


def _prepare(job: Job, config: TrainConfig, cluster: Cluster) -> _Prepared:
    """Data, model and plan: all that needs no server."""
    keras.utils.set_random_seed(config.seed or 0)
    splits = splits_of(job.data())
    for source in (splits.train, splits.validation):
        if source is not None:
            check_source(source)
    model = job.model()
    keras_parts.check_model(model)
    build_model(model, lambda: one_sample(splits.train))
    fused, partitioner = layout(model, config.ps)
    keras_model.build_metrics(model, splits.train.read(np.zeros(1, np.int64)))
    elementwise = keras_parts.is_elementwise(model.optimizer)
    parts = take_apart(model, splits.train.signature,
                       sparse=config.ps.sparse_embeddings and elementwise)
    return _Prepared(model=model, splits=splits, parts=parts, fused=fused,
                     partitioner=partitioner,
                     plan=_plan(job.name, model, splits, parts, config, cluster, fused,
                                partitioner))


def _plan(name: str, model: Any, splits: DataSplits, parts: ModelParts, config: TrainConfig,
          cluster: Cluster, fused: bool, partitioner: str) -> TrainPlan:
    ps, replicas = config.ps, config.ps.replicas(cluster.workers)
    shards = shard_plan(splits.train, config, replicas)
    parameters = placement.parameters_of(
        (v.path, tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in parts.trained)
    pieces = placement.place(parameters, servers=cluster.servers, policy=ps.placement,
                             partitioner=partitioner)
    how = "fused" if fused else "each variable of its own"
    tables = f", {len(parts.tables)} embedding tables row by row" if parts.tables else ""
    lines = placement.render(parameters, pieces, cluster.servers)
    return make_plan(
        model, shards, config, job=name, ranks=cluster.texts,
        validation_samples=0 if splits.validation is None else len(splits.validation),
        party="gradient",
        details=(("engine", f"parameter servers, {_mode_words(config, cluster.workers)}"),
                 ("placement", f"{ps.placement} by bytes, {how}{tables}"
                  if ps.placement == "greedy" else f"{ps.placement}, {how}{tables}"),
                 *(("", line) for line in lines)))


def _mode_words(config: TrainConfig, workers: int) -> str:
    ps = config.ps
    if ps.mode == "async":
        bound = "" if ps.staleness is None else f", staleness at most {ps.staleness} batches"
        return f"async: {workers} worker{'s' if workers > 1 else ''}{bound}"
    replicas = ps.replicas(workers)
    backup = f", {ps.backup_workers} for backup" if ps.backup_workers else ""
    return f"sync: {replicas} gradients per update, {workers} workers{backup}"


def _machinery(ready: _Prepared, config: TrainConfig, cluster: Cluster, strategy: Any,
               coordinator: Any) -> Machinery:
    parameters = ServerParameters(strategy, ready.parts, config.ps, fused=ready.fused,
                                  partitioner=ready.partitioner)
    optimizer = ServerOptimizer(
        strategy, parameters, ready.model, schedule.multiplier(ready.plan.lr))
    state = StateVector(strategy, ready.parts.state)
    metrics = MetricStates(ready.model, ready.parts.metrics)
    return Machinery(
        strategy=strategy, coordinator=coordinator, parameters=parameters, optimizer=optimizer,
        state=state, metrics=metrics, workers=cluster.workers,
        step=WorkerStep(ready.model, ready.parts, parameters, state, metrics),
        feed=Feed(cluster.feed, ready.splits))


def _mode(machinery: Machinery, config: TrainConfig, replicas: int) -> Asynchronous | Synchronous:
    if config.ps.mode == "async":
        return Asynchronous(machinery, steps_per_closure=config.ps.steps_per_closure,
                            staleness=config.ps.staleness)
    return Synchronous(machinery, replicas=replicas, backups=config.ps.backup_workers > 0)

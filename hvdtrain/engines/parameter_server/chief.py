"""The chief's run: builds the model, places parameters on servers, runs epochs and callbacks.

The chief's model and optimizer are the user's, plain Keras. They hold the servers' values at the
end of each epoch, before callbacks; what a callback changes (weights, a rate) goes to the servers.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import Choice
from hvdtrain.collectives.single import SingleCollective
from hvdtrain.config import TrainConfig
from hvdtrain.data.pipeline import evaluation_dataset, reading_error
from hvdtrain.data.source import DataSplits, Source, check_source, one_sample, splits_of
from hvdtrain.engines.parameter_server import keras_parts, tf_seam, updates
from hvdtrain.engines.parameter_server.feeding import Reader, shard_plan
from hvdtrain.engines.parameter_server.parameters import Array, Layout, make_layout
from hvdtrain.engines.parameter_server.placement import render
from hvdtrain.engines.parameter_server.roles import Assignment, Role, roles_in
from hvdtrain.errors import DataError, NotFiniteError, TrainingError
from hvdtrain.job import Job
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.optim.state import digests
from hvdtrain.runtime.admission import admit_only
from hvdtrain.runtime.progress import Progress
from hvdtrain.session import Session
from hvdtrain.train import schedule
from hvdtrain.train.checkpoint import RunState
from hvdtrain.train.coordinator import stopped
from hvdtrain.train.plan import TrainPlan, build_model, verbosity
from hvdtrain.train.run import Run, RunResult, build_job
from hvdtrain.train.writers import Checkpoints, Figures

_ON_REGARDLESS = "--no-stop-on-nan goes on regardless."
_LOOPBACK = "127.0.0.1"
_OLD_HOOKS = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}


def train(job: Job, config: TrainConfig, assignment: Assignment, *, progress: Progress,
          stop_asked: Callable[[], bool], dry_run: bool,
          opened: Callable[[], None] = lambda: None) -> RunResult:
    """Train a job on parameter servers. The chief only, before any TensorFlow operation.

    `config` replaces the job's own; the workers read the data. `dry_run` prints the plan without a
    connection; `opened` is called when the output folder belongs to this run.
    """
    tf_seam.check_tensorflow()
    session = Session(world=assignment.world, collective=SingleCollective(), devices="CPU",
                      choice=Choice(name="single", reason="engine ps"), progress=progress)

    def run(coordinator: Any = None) -> ServerRun:
        model, splits = build_job(job, config, session)
        return ServerRun(model=model, session=session, config=config, name=job.name,
                         callbacks=tuple(job.callbacks()), stop_asked=stop_asked, splits=splits,
                         assignment=assignment, coordinator=coordinator, opened=opened)

    if dry_run:
        return run().fit(dry_run=True)
    progress.enter("connecting with workers and servers")
    with tf_seam.connected(assignment.cluster) as coordinator:
        if assignment.admitted:
            admit_only(int(assignment.address.rpartition(":")[2]), assignment.admitted)
        try:
            return run(coordinator).fit()
        except tf.errors.OpError as error:
            why = reading_error(error)
            if why is None:
                raise
            raise DataError(f"A worker cannot read its data. {why}. Its output has the whole "
                            "traceback.") from None


class LocalCluster:
    """Real servers and workers, with TensorFlow's own protocol over the loopback, in one process.

    Make it before any TensorFlow or Keras object: variables made before stop working, in the
    whole process.

    Args:
        workers: Integer, number of workers.
        servers: Integer, number of servers.

    Example:
        ```python
        cluster = hvdtrain.LocalCluster(workers=2, servers=1)
        result = cluster.fit(job)
        ```
    """

    def __init__(self, *, workers: int = 2, servers: int = 1) -> None:
        tf_seam.check_tensorflow()
        with ExitStack() as held:  # until all ports are chosen
            ports = [held.enter_context(socket.create_server((_LOOPBACK, 0))).getsockname()[1]
                     for _ in range(workers + servers)]
        addresses = [f"{_LOOPBACK}:{port}" for port in ports]
        self.addresses = {"worker": addresses[:workers], "ps": addresses[workers:]}
        self._servers = [tf_seam.serve(self.addresses, kind, index, threads=1)
                         for kind, own in self.addresses.items() for index in range(len(own))]
        for port in ports:
            admit_only(port, ())

    def fit(self, job: Job, config: TrainConfig | None = None, *,
            stop_asked: Callable[[], bool] = lambda: False) -> Any:
        """Train a job on this cluster.

        Args:
            job: A `Job`; its functions are called here.
            config: A `TrainConfig`, instead of the job's; `engine` and `ps.servers` are ignored.
            stop_asked: Callable that returns whether to stop.

        Returns:
            A `RunResult`. The trained model is in its `model_path`, if there is an output, and is
            what the job's callbacks see.
        """
        config = config or job.config
        chief = Assignment(role=Role(kind="chief"), rank=0, size=1, host="localhost",
                           cluster=self.addresses,
                           hosts=["this process"] * (1 + sum(map(len, self.addresses.values()))))
        Reader(splits_of(job.data()), config, config.ps.replicas(chief.workers)).register()
        return train(job, config, chief, progress=Progress(), stop_asked=stop_asked, dry_run=False)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        """The servers end with the process: TensorFlow has no way to end one before."""


@dataclass(kw_only=True)
class ServerRun(Run):
    """A run of engine `ps`; `coordinator` is TensorFlow's, once connected."""

    splits: DataSplits
    assignment: Assignment
    coordinator: Any
    opened: Callable[[], None]

    parts: keras_parts.ModelParts = field(init=False)
    layout: Layout = field(init=False)

    def prepare(self) -> TrainPlan:
        model, train, validation = self.model, self.splits.train, self.splits.validation
        ps, assignment = self.config.ps, self.assignment
        for source in (train, validation):
            if source is not None:
                check_source(source)
        keras_parts.check_model(model)
        build_model(model, lambda: one_sample(train))
        keras_model.build_metrics(model, one_sample(train))
        self.parts = keras_parts.take_apart(
            model, train.signature,
            sparse=ps.sparse_embeddings and keras_parts.is_elementwise(model.optimizer))
        self.layout = make_layout(model, self.parts, ps, assignment.servers)
        shards = shard_plan(train, self.config, ps.replicas(assignment.workers))
        roles = ("the chief", *(str(role) for role in roles_in(assignment.cluster)
                                if role.kind != "chief"), "the evaluator")
        return TrainPlan.of(
            model, shards, self.config, job=self.name, party="gradient",
            ranks=tuple(f"{host} ({role})" for host, role in zip(
                assignment.hosts, roles, strict=False)),
            validation_samples=0 if validation is None else len(validation),
            details=(("engine", f"parameter servers, {self._mode_words()}"),
                     ("placement", self._placement_words()),
                     *(("", line) for line in render(self.layout.pieces, assignment.servers))))

    def _mode_words(self) -> str:
        ps, workers = self.config.ps, self.assignment.workers
        if ps.mode == "async":
            bound = "" if ps.staleness is None else f", staleness at most {ps.staleness} batches"
            return f"async: {workers} worker{'s' if workers > 1 else ''}{bound}"
        backup = f", {ps.backup_workers} for backup" if ps.backup_workers else ""
        return f"sync: {ps.replicas(workers)} gradients per update, {workers} workers{backup}"

    def _placement_words(self) -> str:
        policy, tables = self.config.ps.placement, len(self.parts.tables)
        return (f"{policy}{' by bytes' if policy == 'greedy' else ''}, "
                f"{'fused' if self.layout.fused else 'each variable of its own'}"
                f"{f', {tables} embedding tables row by row' if tables else ''}")

    def load(self) -> RunState:
        self.opened()
        return super().load()

    def metric_states(self) -> tuple[tuple[float, ...], ...]:
        return self._c.metrics.total(self._gained)

    def train(self) -> Any:
        model, config = self.model, self.config
        self.session.progress.enter("placing the parameters on the servers")
        c = self._c = updates.Components(
            self.coordinator, model, self.parts, self.layout, self.splits, self.plan.lr, config.ps,
            self.assignment.workers)
        self._mode = updates.MODES[config.ps.mode](c, config.ps)
        self._pushed_rate: float | None = None
        self._checkpoints, history = Checkpoints(self), keras.callbacks.History()
        verbose = verbosity(self.session.world)
        files = [] if self.store is None else [Figures(self), self._checkpoints]
        self._list = keras.callbacks.CallbackList(
            [*self.callbacks, *files, history], model=model, add_progbar=verbose != 0,
            verbose=verbose, epochs=config.epochs, steps=self.plan.shards.steps)
        model.stop_training = False
        self._epoch, self._gained = self.begin.epoch, c.metrics.nothing
        self._call("on_train_begin")
        logs: dict[str, float] = {}
        first_step = self.first_step
        for epoch in range(self.begin.epoch, config.epochs):
            logs = self._train_epoch(epoch, first_step)
            first_step = 0
            if model.stop_training:
                break
        self._mode.flying.drain()  # closures whose gradients are no longer needed
        if getattr(model.optimizer, "use_ema", False):
            model.optimizer.finalize_variable_values(model.trainable_variables)
        self._list.on_train_end(logs)
        self._checkpoints.wait()
        return history

    def _train_epoch(self, epoch: int, first_step: int) -> dict[str, float]:
        c, progress, steps = self._c, self.session.progress, self.plan.shards.steps
        self._epoch, self._told, self._gained = epoch, first_step, c.metrics.nothing
        before = c.metrics.gained_by(self.begin.metrics) if first_step else c.metrics.nothing
        if before is None:
            get_logger().warning("The checkpoint holds other metrics than this job's: those of "
                                 "this epoch count from step %d on.", first_step + 1)
        else:
            self._gained = before
        self._call("on_epoch_begin", epoch)
        self._begin_batch(first_step)
        done = self._mode.run(epoch, first_step, steps, epoch * steps, self._report)
        c.coordinator.join()
        progress.advance(f"the end of epoch {epoch + 1}")
        with progress.phase("copying the parameters from the servers"):
            c.pull()
        # A layer may hide values that are not finite, so that no loss shows them.
        for variable in self.parts.trained if self.config.stop_on_nan else ():
            if not np.isfinite(np.asarray(variable.numpy(), np.float64).sum()):
                raise NotFiniteError(
                    f"{variable.path} is not finite at the end of epoch {epoch + 1}. Look for "
                    "inputs that are not finite, lower the learning rate, or clip gradients "
                    f"(global_clipnorm). {_ON_REGARDLESS}")
        if self.stop_asked() and done < steps:
            self._stop(done)
        logs = c.metrics.results(self._gained)
        logs["learning_rate"] = schedule.effective_rate(self.model.optimizer, self.plan.lr)
        if self.splits.validation is not None:
            with progress.phase("evaluating"):
                logs |= {f"val_{k}": v for k, v in self._validate(self.splits.validation).items()}
        with progress.phase("in the callbacks at the end of an epoch"):
            self._call("on_epoch_end", epoch, logs)
        if self.stop_asked() and epoch + 1 < self.config.epochs:
            self._epoch, self._gained = epoch + 1, c.metrics.nothing
            self._stop(0)
        return logs

    def _report(self, done: int, gained: Array) -> bool:
        """After each closure or update: figures, callbacks; returns whether to go on."""
        steps = self.plan.shards.steps
        self.session.progress.advance(self._epoch * steps + done)
        self._gained = self._gained + gained
        if self.config.stop_on_nan and not np.isfinite(gained).all():
            raise NotFiniteError(
                f"The loss, or a metric, is not finite between steps {self._told + 1} and {done} "
                f"of epoch {self._epoch + 1}. Lower the learning rate, clip gradients "
                f"(global_clipnorm), or look at the data. {_ON_REGARDLESS}")
        logs = self._c.metrics.results(self._gained) if self._wants("on_train_batch_end") else {}
        for step in range(self._told, done):
            if step >= self._begun:
                self._list.on_train_batch_begin(step)
            self._list.on_train_batch_end(step, logs)
        self._told = done
        if self.stop_asked() or self.model.stop_training:
            return False
        if done < steps:
            self._begin_batch(done)
        return True

    def _begin_batch(self, step: int) -> None:
        """Before a batch is sent: a rate that a callback sets for it goes to the servers."""
        self._list.on_train_batch_begin(step)
        self._begun = step + 1
        own = keras_seam.rate_variable(self.model.optimizer)
        rate = None if own is None else float(own.numpy())
        if rate is not None and rate != self._pushed_rate:
            self._c.optimizer.keras._learning_rate.value.assign(rate)
            self._pushed_rate = rate

    def _wants(self, hook: str) -> bool:
        return any(getattr(type(callback), name, None) is not getattr(
            keras.callbacks.Callback, name) for callback in self.callbacks
            for name in (hook, _OLD_HOOKS.get(hook, hook)))

    def _call(self, hook: str, *arguments: Any) -> None:
        """Call callbacks, and push to the servers what they change in model and optimizer."""
        call = getattr(self._list, hook)
        if not self._wants(hook):
            call(*arguments)
            return
        c, optimizer = self._c, self.model.optimizer
        rate = keras_seam.rate_variable(optimizer)
        watched = [v for v in (*self.model.variables, *optimizer.variables) if v is not rate]
        before = digests(watched)
        call(*arguments)
        changed = {id(v) for v, a, b in zip(watched, before, digests(watched), strict=True)
                   if a != b}
        for fixed in self.parts.constant:
            if id(fixed) in changed:
                raise TrainingError(
                    f"A callback has changed {fixed.path} in {hook}. It is not trained, and engine "
                    "ps has sent it to the workers once. Use the engine allreduce (--engine "
                    "allreduce).")
        if changed:
            c.push()

    def _validate(self, validation: Source) -> dict[str, float]:
        c, model, batch = self._c, self.model, self.config.rank_batch(1)
        own = type(model).test_step is not keras.Model.test_step
        if own or self.config.ps.evaluation == "direct":
            dataset = evaluation_dataset(validation, np.arange(len(validation)), batch)
            found = model.evaluate(dataset, verbose=0, return_dict=True, callbacks=self._list)
            model.reset_metrics()
            return dict(found)
        self._call("on_test_begin")
        batches = -(-len(validation) // batch)
        logs = c.metrics.results(c.evaluate(batches))
        if self._wants("on_test_batch_begin") or self._wants("on_test_batch_end"):
            for step in range(batches):  # they run on workers, in no order
                self._list.on_test_batch_begin(step)
                self._list.on_test_batch_end(step, logs)
        self._call("on_test_end", logs)
        return logs

    def _stop(self, done: int) -> None:
        path = self._checkpoints.save(self._epoch, done)
        self._checkpoints.wait()
        raise stopped(done, self._epoch, path)

"""Program: trains the first steps of a job on one rank, with several batches, and tells the times.

Started by `forecast.py` with `python -m`, since it loads TensorFlow. The run is that of `fit`, but
for its collective: a `Recorder` claims to be one of two ranks, so that the reducer makes the
collectives that it makes for several, and notes when each would begin.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

from hvdtrain.collectives.base import ReduceOp, Tensor
from hvdtrain.collectives.single import SingleCollective
from hvdtrain.config import TrainConfig
from hvdtrain.entry import load_job
from hvdtrain.errors import HvdtrainError
from hvdtrain.job import Job
from hvdtrain.process import print_answer

RANKS = 2  # that the recorder claims to be
_WARM_STEPS = 5
_LEAST_STEPS = 10
_READ_S = 1.0


class Recorder(SingleCollective):
    """One rank that claims to be the first of two, whose results are made of its own tensors.

    It sums up, over the steps, when the batch is there, when each collective would begin, and when
    all gradients are reduced. It is the reducer's observer in place of the `StepClock`, which would
    make the first collective wait for the last gradient.
    """

    name = "recorder"
    size = RANKS

    def __init__(self, *, one_host: bool) -> None:
        import tensorflow as tf
        self.one_host = one_host
        self._tf = tf
        self._base_s = time.time()
        self._kinds: list[str] = []
        self._sums: list[Any] = []
        self._place = 0
        with tf.device("CPU:0"):
            self._began, self._reduced = (_sums_of(tf) for _ in range(2))

    def reduce(self, tensors: Sequence[Tensor], *, name: str, op: ReduceOp) -> list[Tensor]:
        self._note_transfer("reduce", tensors)
        return list(tensors)

    def reduce_scatter(self, tensors: Sequence[Tensor], *, name: str,
                       op: ReduceOp) -> list[Tensor]:
        self._note_transfer("divide", tensors)
        return [tensor[:tensor.shape[0] // RANKS] for tensor in tensors]

    def alltoall(self, tensor: Tensor, *, name: str) -> Tensor:
        self._note_transfer("divide", [tensor])
        return tensor

    def allgather(self, tensor: Tensor, *, name: str) -> Tensor:
        joined = self._tf.concat([tensor] * RANKS, 0)
        # Rows of an embedding are as many as the batch has; anything else is a part of a whole.
        if tensor.shape[0] is None:
            self._note_transfer("gather", [tensor])
        else:
            self._note_transfer("divide", [joined])
        return joined

    def gather_objects(self, value: object) -> list[Any]:
        return [value] * RANKS

    def train_step(self, original: Callable[[Any], Any], data: Any) -> Any:
        """Around that of the model: note when the batch is there."""
        tf, self._place = self._tf, 0
        with tf.control_dependencies([self._note(self._began, data)]):
            data = tf.nest.map_structure(
                lambda each: tf.identity(each) if tf.is_tensor(each) else each, data)
        return original(data)

    def gradients_ready(self, gradients: Sequence[Any]) -> None:
        """As the reducer's observer."""

    def reduced(self, gradients: Sequence[Any]) -> None:
        """As the reducer's observer."""
        self._note(self._reduced, gradients)

    def _note_transfer(self, kind: str, tensors: Sequence[Tensor]) -> None:
        tf = self._tf
        if tf.executing_eagerly():
            return  # not in a step
        if self._place == len(self._sums):  # a batch of another size is traced anew
            with tf.init_scope(), tf.device("CPU:0"):
                self._sums.append(_sums_of(tf))
            self._kinds.append(kind)
        sums, self._place = self._sums[self._place], self._place + 1
        self._note(sums, tensors, sum(tf.size(t, tf.int64) * t.dtype.size for t in tensors))

    def _note(self, sums: Any, after: Any, size: Any = 0) -> Any:
        """Let the graph of a step add a one, the moment when tensors are there, and bytes."""
        tf = self._tf
        with tf.device("CPU:0"), tf.control_dependencies(
                [t for t in tf.nest.flatten(after, expand_composites=True) if tf.is_tensor(t)]):
            now = tf.timestamp() - tf.constant(self._base_s, tf.float64)
            return sums.assign_add(tf.stack(
                [tf.constant(1.0, tf.float64), now, tf.cast(size, tf.float64)]))

    def forget(self) -> None:
        """Begin to sum up anew."""
        for sums in (self._began, self._reduced, *self._sums):
            sums.assign([0.0, 0.0, 0.0])

    @property
    def began_s(self) -> float:
        """When a batch was there, since 1970: the mean."""
        return self._base_s + _mean_of(self._began)

    @property
    def compute_s(self) -> float:
        """From there to the gradients; without those of other ranks, reducing takes no time."""
        # ZeRO has no reducer: there the last collective counts.
        ends = [self._reduced] if float(self._reduced[0]) else self._sums
        return max(map(_mean_of, ends), default=0.0) - _mean_of(self._began)

    def transfers(self, steps: int) -> list[dict[str, Any]]:
        """What was noted, as `profile.Transfer` takes it: means over so many steps."""
        found = [{"kind": kind, "size": float(sums.numpy()[2]) / steps,
                  "ready_s": max(0.0, _mean_of(sums) - _mean_of(self._began))}
                 for kind, sums in zip(self._kinds, self._sums, strict=True)]
        return sorted(found, key=lambda one: one["ready_s"])


def _sums_of(tf: Any) -> Any:
    return tf.Variable(tf.zeros([3], tf.float64), trainable=False)


def _mean_of(sums: Any) -> float:
    count, moment_s, _ = sums.numpy().tolist()
    return float(moment_s / count)


class _EnoughError(Exception):
    """Ends a run of Keras when it was measured."""


class Watch:
    """Around the train function: sums up the steps after the first ones, and ends the run."""

    def __init__(self, recorder: Recorder, seconds: float) -> None:
        self._recorder, self._seconds = recorder, seconds
        self._calls, self._ended_s = 0, 0.0
        self._gap_s, self._gaps = 0.0, 0
        self._starts_s = self._ends_s = 0.0
        self.steps = 0

    def new_epoch(self) -> None:
        """What lies between two epochs is no part of a step."""
        self._ended_s = 0.0

    def around(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The train function, watched."""
        def watched(iterator: Any) -> Any:
            if self._calls == _WARM_STEPS:
                self._recorder.forget()
                self._first_s, self._first_cpu_s = time.time(), time.process_time()
            start_s = time.time()
            logs = function(iterator)
            end_s = time.time()
            self._calls += 1
            if self._calls > _WARM_STEPS:
                self._count(start_s, end_s)
            self._ended_s = end_s
            return logs
        return watched

    def _count(self, start_s: float, end_s: float) -> None:
        if self.steps and self._ended_s:
            self._gap_s, self._gaps = self._gap_s + start_s - self._ended_s, self._gaps + 1
        self.steps += 1
        self._starts_s, self._ends_s = self._starts_s + start_s, self._ends_s + end_s
        if self.steps >= _LEAST_STEPS and end_s - self._first_s > self._seconds:
            self._cores_used = (time.process_time() - self._first_cpu_s) / (end_s - self._first_s)
            raise _EnoughError

    def found(self) -> dict[str, Any]:
        """Means over the steps."""
        recorder, steps = self._recorder, self.steps
        began_s, compute_s = recorder.began_s, recorder.compute_s
        return {
            "compute_s": compute_s, "stall_s": max(0.0, began_s - self._starts_s / steps),
            "update_s": max(0.0, self._ends_s / steps - began_s - compute_s),
            "gap_s": self._gap_s / max(1, self._gaps), "cores_used": self._cores_used,
            "transfers": recorder.transfers(steps)}


def measure(job: Job, config: TrainConfig, session: Any, seconds: float, *,
            one_host: bool = False) -> dict[str, Any]:
    """The times of a step with the batch of `config`, and the collectives of a step."""
    import keras

    from hvdtrain.optim.keras_seam import hooked
    from hvdtrain.optim.reducer import GradientReducer
    from hvdtrain.train.feed import SourceFeed
    from hvdtrain.train.fit import AllreduceRun
    from hvdtrain.train.run import build_job

    recorder = Recorder(one_host=one_host)
    watch = Watch(recorder, seconds)

    class Epochs(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            watch.new_epoch()

    class ProfiledRun(AllreduceRun):
        @contextmanager
        def installed(self, coordinator: Any) -> Iterator[None]:
            with (hooked(self.model, train_step=recorder.train_step),
                  super().installed(coordinator)):
                GradientReducer.observer = recorder
                self.model.train_function = watch.around(self.model.train_function)
                yield

    session = dataclasses.replace(session, collective=recorder)
    model, splits = build_job(job, config, session)
    run = ProfiledRun(model=model, session=session, config=config, name=job.name, verbose=0,
                      callbacks=(*job.callbacks(), Epochs()),
                      data=SourceFeed(splits.train, session, config))
    with suppress(_EnoughError):
        run.fit()
    return {**watch.found(), "samples": run.data.samples, "read_s": _reading_s(run.data),
            "parameter_bytes": 4 * sum(prod(v.shape) for v in model.trainable_variables)}


def _reading_s(feed: Any) -> float:
    """Seconds to read a batch when nothing else is done."""
    batches = iter(feed.training(0, 0, begun=None)["x"])
    for _ in range(2):
        next(batches)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < _READ_S:
        next(batches)
        count += 1
    return (time.perf_counter() - began) / count


def main() -> None:
    """Print one line of JSON.

    The argument is JSON with `job`; `batch` or null; `cores`, from the `first_core` on; `seconds`;
    and whether the ranks will be on `one_host`.
    """
    told = json.loads(sys.argv[1])
    # Before TensorFlow is loaded: threads are as many as cores.
    first = told["first_core"]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[first:first + told["cores"]])
    try:
        job = load_job(told["job"])
        config = dataclasses.replace(
            job.config, epochs=1_000_000, checkpoint_every_epochs=0, checkpoint_every_steps=0,
            checkpoint_every_s=0.0, output=None, resume=False, check_weights=False)
        from hvdtrain.session import init
        session = init(collective="single")
        batch = told["batch"] or config.rank_batch(1)
        print_answer({
            "batch": batch, "batch_global": None if told["batch"] else config.batch_global,
            "runs": {size: measure(job, config.with_options({"batch_per_rank": size}), session,
                                   told["seconds"], one_host=told["one_host"])
                     for size in sorted({max(1, batch // 2), batch, 2 * batch})}})
    except HvdtrainError as error:
        sys.exit(f"hvdtrain: {error}")


if __name__ == "__main__":
    main()

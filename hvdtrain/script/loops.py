"""Training loops with a `GradientTape` in a plain script, on N ranks.

The scan knows the loops. Where one begins to iterate over a `tf.data.Dataset`, it gets this rank's
part of each batch. A tape averages the gradients of variables over the ranks, each weighted by its
samples:

    w_r = N n_r / n,  so that  mean_r(w_r grad L_r) = sum_r(n_r grad L_r) / n

for a loss that is a mean over samples. Metrics that were updated in such a loop give the results of
all ranks. Gradients that were not averaged are refused by Keras' optimizers.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import TrainConfig
from hvdtrain.data.divided import divided
from hvdtrain.data.plans import Part
from hvdtrain.errors import ConfigError
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_seam, state
from hvdtrain.optim.options import ReducerOptions
from hvdtrain.optim.reducer import GradientReducer
from hvdtrain.runtime.progress import IDLE
from hvdtrain.script.inside import is_inside, note_used, replace_attribute
from hvdtrain.script.scan import Scan, real_path
from hvdtrain.session import Session
from hvdtrain.train.chief import needs_all
from hvdtrain.train.evaluate import result_of_all

_DIVIDED = "_hvdtrain_updated_in_parts"
_BEGINS = "begins the training loop in line"
_HOW = ("hvdtrain run divides the data of `for batch in dataset:`, where dataset is a "
        "tf.data.Dataset of batches, outside of a tf.function. For any other loop write "
        "hvdtrain.init(), then take batches from hvdtrain.shard(...) and gradients from "
        "hvdtrain.DistributedGradientTape (docs/from-keras.md)")


@dataclass(eq=False)
class Loops:
    """The loops of one script; `weight` is that of this rank in the batch that was taken last."""

    session: Session
    scan: Scan
    config: TrainConfig
    weight: Any = field(default_factory=lambda: tf.Variable(
        1.0, trainable=False, name="hvdtrain_weight"))
    _value: float = 1.0
    _active: bool = False
    _averaged: bool = False
    _told: set[tuple[str, int]] = field(default_factory=set)
    _is_open: bool = False  # a loop has begun, and `settle` has not ended it
    _sent: set[str | None] = field(default_factory=set)
    _models: list[Any] = field(default_factory=list)  # weak references
    _reducer: GradientReducer | None = None
    _in_result: bool = False
    _iterator: Callable[[Any], Any] = tf.data.Dataset.__iter__

    def install(self) -> Callable[[], None]:
        """Serve the loops from now on; gives a function that undoes it."""
        undo = ExitStack()

        def put(owner: Any, name: str, ours: Callable[..., Any]) -> None:
            original = getattr(owner, name)

            @functools.wraps(original)
            def method(obj: Any, *args: Any, **kwargs: Any) -> Any:
                return original(obj, *args, **kwargs) if is_inside() else ours(
                    functools.partial(original, obj), obj, *args, **kwargs)
            undo.callback(replace_attribute(
                owner, name, tf.autograph.experimental.do_not_convert(method)))

        served: set[type] = set()

        def new_metric(original: Callable[..., Any], metric: Any, *args: Any,
                       **kwargs: Any) -> None:
            original(*args, **kwargs)
            for kind in type(metric).__mro__:
                if issubclass(kind, keras.metrics.Metric) and kind not in served:
                    served.add(kind)
                    for name, ours in (("update_state", self._update), ("result", self._result)):
                        if name in vars(kind):
                            put(kind, name, ours)
        put(keras.metrics.Metric, "__init__", new_metric)
        put(tf.data.Dataset, "__iter__", self._iterate)
        put(tf.GradientTape, "gradient", self._gradient)
        put(keras.optimizers.Optimizer, "apply", self._apply)
        return undo.close

    def _iterate(self, original: Callable[[], Any], dataset: Any) -> Any:
        at = self._line()
        if at is None or at not in self.scan.training_lines:
            self._active = False
            if at is not None:
                self.settle()
            return original()
        world = self.session.world
        found = divided(dataset, Part(rank=world.rank, size=world.size),
                        batches_per_step=world.size if self.config.batch == "per_rank" else 1)
        self.settle()
        with needs_all("begins a training loop"):
            everyone = self.session.collective.gather_objects((f"{_BEGINS} {at[1]}", ""))
        if len(set(map(tuple, everyone))) > 1:
            raise ConfigError("The ranks do not begin the same training loop. Do not put it behind "
                              "a condition on the rank.")
        note_used("a training loop")
        if at not in self._told:
            self._told.add(at)
            if world.is_chief:
                get_logger().info("%s, line %d: %s; %d ranks.", *at, found.why, world.size)
        return _Batches(self._batches(found.dataset, at[1], weighted=found.weighted),
                        dataset.element_spec)

    def _batches(self, dataset: Any, line: int, *, weighted: bool) -> Iterator[Any]:
        progress, step = self.session.progress, 0
        try:
            for part in self._iterator(dataset):
                weight, batch = part if weighted else (1.0, part)
                if weighted or self._value != 1.0:
                    self._value = float(weight)
                    self.weight.assign(self._value)
                self._active = self._is_open = True
                step += 1
                progress.advance(f"batch {step} of the loop in line {line}")
                yield batch
        finally:
            self._active = False
            progress.enter(IDLE)
        self.settle()

    def settle(self) -> None:
        """End a loop that the script has left: statistics become equal, weights are compared.

        All ranks.
        """
        if not self._is_open:
            return
        self._is_open = self._active = False
        collective = self.session.collective
        with needs_all("ends a training loop"):
            for model in [model for known in self._models if (model := known()) is not None]:
                state.average_statistics(collective, model)
                state.check_equal(collective, model.trainable_variables,
                                  when="at the end of a training loop")

    def _gradient(self, original: Callable[..., Any], tape: Any, target: Any, sources: Any,
                  output_gradients: Any = None, **kwargs: Any) -> Any:
        variables = tf.nest.flatten(sources)
        on_variables = bool(variables) and all(map(_is_variable, variables))
        if not self._active or not on_variables:
            if on_variables:
                self._averaged = False
            return original(target, sources, output_gradients, **kwargs)
        self._send(variables)
        given = output_gradients if output_gradients is not None else tf.nest.map_structure(
            tf.ones_like, target)
        weighted = tf.nest.map_structure(
            lambda one: one * tf.cast(self.weight, one.dtype), given)
        gradients = tf.nest.flatten(original(target, sources, weighted, **kwargs))
        if self._reducer is None:
            self._reducer = GradientReducer(self.session.collective, "hvdtrain.script",
                                            ReducerOptions.of(self.config))
        self._averaged = True
        return tf.nest.pack_sequence_as(sources, self._reducer(
            gradients, variables, range(len(variables))))

    def _send(self, variables: list[Any]) -> None:
        """Before their first gradient, give all ranks the chief's values. All ranks."""
        # A Sequential that a traced step builds has no values yet: in the next trace.
        with tf.init_scope():
            fresh = [v for v in variables if keras_seam.variable_key(v) not in self._sent
                     and keras_seam.has_value(v)]
        if not fresh:
            return
        wanted = set(map(keras_seam.variable_key, fresh))
        self._sent |= wanted
        known = [model() for model in self._models]
        models = [m for m in _living_models() if not any(m is one for one in known)
                  and wanted & set(map(keras_seam.variable_key, m.trainable_variables))]
        with tf.init_scope():
            every = {id(v): v for v in [*fresh, *(v for m in models for v in m.variables
                                                  if keras_seam.has_value(v))]}
            state.broadcast_variables(list(every.values()), collective=self.session.collective)
            for model in models:
                state.fold_rank_into_seeds(model.variables, self.session.world.rank)
        self._models += map(weakref.ref, models)

    def _apply(self, original: Callable[..., Any], optimizer: Any, *args: Any,
               **kwargs: Any) -> Any:
        if not self._averaged:
            raise ConfigError(
                "An optimizer was given gradients that are of this rank alone: each of "
                f"{self.session.world.size} ranks would train on all data. {_HOW}.")
        return original(*args, **kwargs)

    def _update(self, original: Callable[..., Any], metric: Any, *args: Any,
                **kwargs: Any) -> Any:
        flag = self._flag_of(metric)
        if not self._active:
            flag.assign(False)
            return original(*args, **kwargs)
        flag.assign(True)
        before = [tf.identity(tf.convert_to_tensor(v)) for v in metric.variables]
        result = original(*args, **kwargs)
        # A rank without a sample in this batch has computed with one that does not count.
        for variable, old in zip(metric.variables, before, strict=False):
            variable.assign(tf.where(self.weight > 0, tf.convert_to_tensor(variable), old))
        return result

    def _result(self, original: Callable[..., Any], metric: Any) -> Any:
        flag = vars(metric).get(_DIVIDED)
        if flag is None or self._in_result or not tf.executing_eagerly() or not bool(flag.value):
            return original()
        self._in_result = True
        self.session.progress.advance(f"result() of {metric.name}, which all ranks must read")
        try:
            with needs_all(f"reads the result of {metric.name}"):
                return result_of_all(self.session.collective, metric, original)
        finally:
            self._in_result = False

    def _flag_of(self, metric: Any) -> Any:
        if _DIVIDED not in vars(metric):
            with tf.init_scope():
                keras_seam.set_on_instance(metric, _DIVIDED, keras_seam.Hidden(
                    tf.Variable(False, trainable=False)))  # noqa: FBT003
        return vars(metric)[_DIVIDED].value

    def _line(self) -> tuple[str, int] | None:
        """The line of the script that is running, the innermost."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = real_path(frame.f_code.co_filename)
            if path in self.scan.trees:
                return path, frame.f_lineno
            frame = frame.f_back
        return None


def _is_variable(source: Any) -> bool:
    return isinstance(source, (tf.Variable, keras.Variable))


def _living_models() -> list[Any]:
    # Not isinstance, which a dead proxy answers with an error.
    return [each for each in gc.get_objects() if issubclass(type(each), keras.Model)]


class _Batches:
    """An iterator with the names of that of TensorFlow."""

    def __init__(self, batches: Iterator[Any], element_spec: Any) -> None:
        self._batches, self.element_spec = batches, element_spec

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def get_next(self) -> Any:
        """As of `tf.data.Iterator`."""
        try:
            return next(self._batches)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None

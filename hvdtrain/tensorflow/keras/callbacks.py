"""Horovod's callbacks for Keras 3's own `model.fit`. All ranks give the same callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import ConfigError, TrainingError
from hvdtrain.optim import keras_seam, state
from hvdtrain.tensorflow import current
from hvdtrain.tensorflow.distributed import LocalVariables
from hvdtrain.train import evaluate

__all__ = ["BestModelCheckpoint", "BroadcastGlobalVariablesCallback",
           "LearningRateScheduleCallback", "LearningRateWarmupCallback", "MetricAverageCallback"]
Logs = dict[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Copies the variables of one rank to all ranks, before the first step.

    These are the weights, the statistics and the optimizer's state; not the states of random
    generators, so that each rank has dropout masks of its own. A model that is not built, or that
    has a `train_step` of its own, is first traced; run eagerly, it does its first step before.

    Args:
        root_rank: Integer, the rank whose values are copied.
        device: Not used: values are copied in host memory.
        local_variables: A variable, or several, that each rank keeps as its own.
    """

    def __init__(self, root_rank: int, device: str = "",
                 local_variables: Any | Iterable[Any] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local = LocalVariables()
        self._undo: Callable[[], None] | None = None
        several = [local_variables] if hasattr(local_variables, "assign") else local_variables
        for variable in several or ():
            if not hasattr(variable, "assign"):
                raise ConfigError("local_variables must be variables. Received: "
                                  f"{type(variable).__name__}")
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Let each rank keep a variable as its own."""
        self._local.register(var)

    def set_model(self, model: Any) -> None:
        """Prepare to copy in the first step, if the model is not built before."""
        super().set_model(model)
        # Keras makes the train function before the training begins.
        if not (self.broadcast_done or current.is_alone() or self._undo or _is_ready(model)):
            model.train_function = None
            self._undo = keras_seam.replaced(
                model, "train_step", lambda original: partial(self._first_step, original))

    def on_train_begin(self, logs: Logs = None) -> None:
        """Copy at once, if the model is built. All ranks."""
        del logs
        if self.broadcast_done or current.is_alone() or self._undo:
            return
        for optimizer in keras_seam.found_optimizers(self.model):
            if not optimizer.built:
                keras_seam.build(optimizer, self.model.trainable_variables)
        self._broadcast()

    def on_train_end(self, logs: Logs = None) -> None:
        """Leave the model as it was."""
        del logs
        self._release()

    def _first_step(self, original: Callable[[Any], Any], data: Any) -> Any:
        result = original(data)
        # All ranks trace their first step, before any of them runs one.
        if not self.broadcast_done:
            with tf.init_scope():
                self._broadcast()
        self._release()
        return result

    def _release(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def _broadcast(self) -> None:
        # State that was made while tracing has no value yet: it will be the same constants.
        found = [v for v in state.state_without_seeds(self.model)
                 if not self._local(v) and keras_seam.has_value(v)]
        state.broadcast_variables(found, root=self.root_rank,
                                  collective=current.session().collective)
        self.broadcast_done = True


def _is_ready(model: Any) -> bool:
    """Whether all variables of a training are there, or can be made without a batch."""
    return model.built and (type(model).train_step is keras.Model.train_step or all(
        optimizer.built for optimizer in keras_seam.found_optimizers(model)))


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces the figures of an epoch by those over all ranks. All ranks.

    It stands before callbacks that decide by them (`ReduceLROnPlateau`, `EarlyStopping`). Figures
    of metrics are computed from their states summed over ranks, so each sample counts alike; where
    a state is no sum, and for any other number, it is the mean over the ranks that have it. A rank
    without validation data gets the figures of the others.

    Args:
        device: Not used: figures are gathered in host memory.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device
        self._kept: dict[str, tuple[Mapping[str, Any], list[tuple[Any, Any]]]] = {}
        self._prefix = ""
        self._undo: Callable[[], None] | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Begin to note the states of metrics."""
        del logs
        if not current.is_alone() and self._undo is None:
            self._undo = keras_seam.replaced(
                self.model, "_get_metrics_result_or_logs",
                lambda original: partial(self._keep, original))

    def on_train_end(self, logs: Logs = None) -> None:
        """Leave the model as it was."""
        del logs
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Forget the epoch before."""
        del epoch, logs
        self._kept.clear()

    def on_test_begin(self, logs: Logs = None) -> None:
        """The figures that follow are those of the validation."""
        del logs
        self._prefix = "val_"

    def on_test_end(self, logs: Logs = None) -> None:
        """The figures that follow are those of the training."""
        del logs
        self._prefix = ""

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Replace the figures in `logs`. All ranks."""
        del epoch
        if logs is None or current.is_alone():
            return
        mine = {name: float(value) for name, value in logs.items()
                if isinstance(value, (int, float, np.number)) or np.ndim(value) == 0}
        everyone = current.session().collective.gather_objects((sorted(self._kept), mine))
        figures = {name: _mean([theirs[name] for _, theirs in everyone if name in theirs])
                   for name in dict.fromkeys(n for _, theirs in everyone for n in theirs)}
        if _are_sums(self.model):
            for prefix in sorted({prefix for kept, _ in everyone for prefix in kept}):
                figures |= {name: value for name, value in self._merged(prefix)
                            if name in figures}
        logs.update(figures)

    def _keep(self, original: Callable[[Any], Any], logs: Any) -> Any:
        found = original(logs)
        self._kept[self._prefix] = (evaluate.as_figures(found), _states(self.model))
        return found

    def _merged(self, prefix: str) -> Iterator[tuple[str, Any]]:
        """The figures of a training or validation over all ranks. All ranks."""
        held = _states(self.model)
        figures, states = self._kept.get(prefix, (
            {}, [(variable, np.zeros_like(value)) for variable, value in held]))
        for variable, value in states:
            variable.assign(value)
        merged = evaluate.merged_logs(current.session().collective, self.model, figures)
        for variable, value in held:
            variable.assign(value)
        for name, value in merged.items():
            yield prefix + name, value


def _states(model: Any) -> list[tuple[Any, Any]]:
    return [(v, np.asarray(v.numpy())) for metric in model.metrics for v in metric.variables]


def _are_sums(model: Any) -> bool:
    try:
        evaluate.refuse_unmergeable(current.session().collective, model)
    except TrainingError:
        return False
    return True


def _mean(values: list[float]) -> float:
    return values[0] if all(value == values[0] for value in values) else float(np.mean(values))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)`, from one epoch to another.

    With momentum correction, the momentum of each variable is multiplied by new / old rate when
    the rate changes, as in Goyal et al., 2017, "Accurate, Large Minibatch SGD".

    Args:
        initial_lr: Float, the learning rate that is multiplied.
        multiplier: Function of the epoch, or a number m for `m ** (epoch - start_epoch)`.
        start_epoch: Integer, the first epoch in which it acts, counted from 0.
        end_epoch: Integer, the epoch before which it ends; None: never.
        staircase: Boolean, set the rate once per epoch; else in each step, with a fraction of an
            epoch.
        momentum_correction: Boolean, for optimizers with `momentum`.
        steps_per_epoch: Integer, where Keras does not know it.

    Raises:
        ConfigError: `initial_lr` or the steps are not known, or the optimizer has a schedule.
    """

    def __init__(self, initial_lr: float, multiplier: float | Callable[[float], float],
                 start_epoch: float = 0, end_epoch: float | None = None, staircase: bool = True,
                 momentum_correction: bool = True, steps_per_epoch: int | None = None) -> None:
        super().__init__()
        if initial_lr is None:
            raise ConfigError("initial_lr is needed: the learning rate that is multiplied.")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else (
            lambda epoch: multiplier ** (epoch - start_epoch))

    def on_train_begin(self, logs: Logs = None) -> None:
        """Look for the steps of an epoch, if they are needed."""
        del logs
        self._rates()
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ConfigError(
                    f"The steps of an epoch are not known from the data. Give them: "
                    f"{type(self).__name__}(..., steps_per_epoch=...).")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Note the epoch."""
        del logs
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the learning rate."""
        del logs
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._set(self.multiplier(epoch))
        elif not self.staircase:
            self._set(self.multiplier(epoch + batch / (self.steps_per_epoch or 1)))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the learning rate to the figures, as `lr`."""
        del epoch
        if logs is not None:
            logs["lr"] = self._rate()

    def _rates(self) -> list[tuple[Any, Any]]:
        """The optimizers, each with the variable of its learning rate."""
        found = [(leaf, keras_seam.rate_variable(leaf))
                 for leaf in keras_seam.leaf_optimizers(self.model.optimizer)]
        for leaf, rate in found:
            if rate is None:
                raise ConfigError(
                    f"{type(self).__name__} sets the learning rate, but that of `{leaf.name}` is "
                    "a schedule, which computes it in each step. Give the optimizer a number, or "
                    "leave this callback out.")
        return found

    def _rate(self) -> float:
        return float(self._rates()[0][1].numpy())

    def _set(self, multiplier: float) -> None:
        new = self.initial_lr * multiplier
        for leaf, rate in self._rates():
            old = float(rate.numpy())
            rate.assign(new)
            if self.momentum_correction and old and new != old:
                # The momentum itself is a number in Keras 3's compiled step. It counts once per
                # step, so the velocities may be multiplied in its place.
                for velocity in keras_seam.velocities(leaf):
                    velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr`, step by step.

    In the step that ends at epoch e (with fractions) it is
    `initial_lr / size * (1 + e * (size - 1) / warmup_epochs)`.

    Args:
        initial_lr: Float, the learning rate after the warm-up; already scaled by the ranks.
        warmup_epochs: Number of epochs.
        momentum_correction: Boolean, as for `LearningRateScheduleCallback`.
        steps_per_epoch: Integer, where Keras does not know it.
        verbose: Integer, 1: rank 0 prints when it has ended.
    """

    def __init__(self, initial_lr: float, warmup_epochs: float = 5,
                 momentum_correction: bool = True, steps_per_epoch: int | None = None,
                 verbose: int = 0) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1 / (self.steps_per_epoch or 1)  # round numbers at the ends of epochs
            size = current.size()
            return (epoch * (size - 1) / warmup_epochs + 1) / size
        super().__init__(initial_lr, multiplier, end_epoch=warmup_epochs, staircase=False,
                         momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the learning rate to the figures, and tell when it has ended."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and (
                current.rank() == 0):
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to "  # noqa: T201
                  f"{self._rate():g}.", flush=True)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint` of the best model; rank 0 writes.

    Args:
        monitor: String, as in Keras.
        verbose: Integer, as in Keras.
        save_weights_only: Boolean, as in Keras.
        mode: String, as in Keras.
        save_freq: String or integer, as in Keras.
        filepath: String or path, as in Keras; it may be set later: `callback.filepath = ...`.
    """

    def __init__(self, monitor: str = "val_loss", verbose: int = 0,
                 save_weights_only: bool = False, mode: str = "auto",
                 save_freq: str | int = "epoch", filepath: Any = None) -> None:
        valid = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(filepath=f"best{valid}" if filepath is None else filepath,
                         monitor=monitor, verbose=verbose, save_best_only=True,
                         save_weights_only=save_weights_only, mode=mode, save_freq=save_freq)
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Refuse to begin without a file."""
        if self.filepath is None:
            raise ConfigError("BestModelCheckpoint does not know where to write. Give it "
                              "filepath=..., or set callback.filepath.")
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Write on rank 0, if it is time."""
        if current.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Write on rank 0, if it is time."""
        if current.rank() == 0:
            super().on_epoch_end(epoch, logs)

"""Steps in which ranks count differently: fewer samples, masked ones, weights of samples.

The mean of gradients over ranks is that of one process when the loss is a mean over samples and all
ranks have equally many. Otherwise the loss is scaled before its gradient is taken. With n_r samples
of n on rank r of N, and a loss S_r / D_r:

    weight of the step   w_r = N n_r / n              so that  mean_r(w_r L_r) = sum_r(n_r L_r) / n
    reduction "sum"      L_r = S_r N / w_r            so that  mean_r(w_r L_r) = sum_r S_r
    other denominators   L_r = S_r N / (w_r sum_r D)  so that  mean_r(w_r L_r) = sum S / sum D

D_r is the number of samples that are not masked (a mask, `ignore_class`), or the sum of the sample
weights (`mean_with_sample_weight`); their sum over ranks takes one small collective per step and
loss, which overlaps with the forward pass of the next layers at best. The reported loss becomes
that of one process as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.errors import ConfigError
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.optim.keras_seam import Hidden, hooked
from hvdtrain.optim.state import seed_variables
from hvdtrain.optim.tracing import CallNames, inside_xla, tapes_watched

_MEANS = ("sum_over_batch_size", "mean")
_WEIGHT = "_hvdtrain_step_weight"
_traced: list[StepWeight] = []


@dataclass(kw_only=True)
class StepWeight:
    """The weight of this rank in the step that is being traced.

    `active` while all ranks take a step together; `value` is a float32 scalar, or None where all
    ranks have equally many samples.
    """

    active: bool = False
    value: Any | None = None

    def divide(self, number: Any) -> Any:
        """`number` divided by the weight; 0 on a rank without samples."""
        if self.value is None:
            return number
        return tf.math.divide_no_nan(number, tf.cast(self.value, number.dtype))


def has_samples() -> Any | None:
    """A boolean tensor: this rank has samples in the traced step. None where all always do."""
    weight = _traced[-1].value if _traced else None
    return None if weight is None else weight > 0


class LossOverRanks(keras.losses.Loss):  # type: ignore[misc]
    """A loss whose gradient, averaged over ranks, is that of one process.

    Each step assigns to the variable `after`, which keeps the collectives of two steps apart.
    """

    def __init__(self, loss: Any, weight: StepWeight, collective: Collective, name: str,
                 after: Any) -> None:
        super().__init__(name=loss.name, reduction=loss.reduction, dtype=loss.dtype)
        self.inner = loss
        self._weight = weight
        self._collective = collective
        self._names = CallNames(name)
        self._after = after

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """The loss of this rank, corrected as described in the module."""
        if not self._weight.active:
            return self.inner(y_true, y_pred, sample_weight)
        value, mask = self._value_and_mask(y_true, y_pred, sample_weight)
        size = float(self._collective.size)
        if self.reduction == "sum":
            return self._weight.divide(value * size)
        if self.reduction == "mean_with_sample_weight" and not (
                mask is None and sample_weight is None):
            from keras.src.losses.loss import apply_mask
            given = None if sample_weight is None else tf.cast(sample_weight, value.dtype)
            own = tf.reduce_sum(apply_mask(given, mask, value.dtype, self.reduction))
        elif self.reduction in _MEANS and mask is not None:
            own = tf.reduce_sum(tf.cast(mask, value.dtype))
        else:
            return value
        own = tf.stop_gradient(own)
        if self._weight.value is not None:  # 0 on a rank without samples
            own = tf.where(self._weight.value > 0, own, tf.zeros_like(own))
        if inside_xla():
            raise ConfigError(
                f"The loss `{self.name}` counts samples over all ranks (masks, or weights of "
                "samples), which takes a collective; it cannot be compiled by XLA. Leave xla out.")
        with tf.control_dependencies([tf.convert_to_tensor(self._after)]):
            sent = tf.identity(tf.cast(own, tf.float32))
        everyone = tf.cast(self._collective.reduce(
            [sent], name=self._names.next(), op="sum")[0], value.dtype)
        return value * self._weight.divide(tf.math.divide_no_nan(own * size, everyone))

    def _value_and_mask(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Any]:
        from keras.src.backend import get_keras_mask
        masks = [get_keras_mask(y_pred)]

        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            losses = original(*args, **kwargs)
            masks.append(get_keras_mask(losses))
            return losses
        with hooked(self.inner, call=call):
            value = self.inner(y_true, y_pred, sample_weight)
        found = [m for m in masks if m is not None]
        if len(found) == 2:  # noqa: PLR2004 - of the prediction, and of the loss
            return value, tf.logical_and(*found)
        return value, found[0] if found else None


def weigh_losses(model: Any, collective: Collective) -> StepWeight:
    """Make compiled losses count samples over all ranks; returns their weight. All ranks."""
    # Losses that are no Keras losses, or override `__call__`, stay: they are taken as means.
    compiled = getattr(model, "_compile_loss", None)
    if compiled is None or collective.size == 1:
        return StepWeight()
    known = compiled.__dict__.get(_WEIGHT)
    if known is not None and known.value[0] is collective:
        return known.value[1]  # type: ignore[no-any-return]
    weight = StepWeight()
    keras_seam.set_on_instance(compiled, _WEIGHT, Hidden((collective, weight)))
    after = keras_seam.iterations(keras_seam.optimizers_of(model))

    def wrap(number: int, loss: Any) -> Any:
        inner = _plain(number, loss)
        if not isinstance(inner, keras.losses.Loss) or (
                type(inner).__call__ is not keras.losses.Loss.__call__):
            return loss
        return LossOverRanks(inner, weight, collective, f"hvdtrain.loss{number}", after)
    keras_model.replace_losses(compiled, wrap)
    return weight


def unweigh_losses(model: Any) -> None:
    """Undo `weigh_losses`."""
    compiled = getattr(model, "_compile_loss", None)
    if compiled is not None and compiled.__dict__.pop(_WEIGHT, None) is not None:
        keras_model.replace_losses(compiled, _plain)


def _plain(number: int, loss: Any) -> Any:
    return loss.inner if isinstance(loss, LossOverRanks) else loss


@contextmanager
def weigh_training(model: Any, weight: StepWeight, *, weighted: bool) -> Iterator[None]:
    """Within it, each training step is weighted. All ranks."""
    # Enter it before the train function is made. With `weighted`, the data are pairs `(weight,
    # batch)` and the metrics are built.
    with ExitStack() as undo:
        undo.callback(setattr, model, "train_function", None)  # traced again
        undo.enter_context(hooked(model, train_step=_weighed(model, weight, weighted)))
        for optimizer in keras_seam.optimizers_of(model) if weighted else []:
            undo.enter_context(_gradients_weighed(optimizer, weight))
        yield


def weigh_evaluation(model: Any, weight: StepWeight, *,
                     weighted: bool) -> AbstractContextManager[None]:
    """As `weigh_training`, for an evaluation in which all ranks take the same steps."""
    return hooked(model, test_step=_weighed(model, weight, weighted))


def _gradients_weighed(optimizer: Any, weight: StepWeight) -> AbstractContextManager[None]:
    """Multiply the loss by the weight of the step in `scale_loss`, else its gradients."""
    # A custom `train_step` need not call `scale_loss`.
    is_scaled = False

    def scale_loss(original: Any, loss: Any) -> Any:
        nonlocal is_scaled
        if weight.value is not None:
            is_scaled = True
            loss = loss * tf.cast(weight.value, loss.dtype)
        return original(loss)

    def apply(original: Any, grads: Any, trainable_variables: Any = None) -> Any:
        nonlocal is_scaled
        if weight.value is not None and not is_scaled:
            grads = [_times(gradient, weight.value) for gradient in grads]
        is_scaled = False
        return original(grads, trainable_variables)
    return hooked(optimizer, scale_loss=scale_loss, apply=apply)


def _times(gradient: Any, weight: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, weight), gradient.indices,
                                gradient.dense_shape)
    return gradient * tf.cast(weight, gradient.dtype)


def _weighed(model: Any, weight: StepWeight, weighted: bool) -> Callable[[Any, Any], Any]:
    """A step that counts by its samples, and changes nothing on a rank that has none."""
    kept = _without_trace(model) if weighted else []

    def step(original: Any, data: Any) -> Any:
        weight.active = True
        weight.value, batch = data if weighted else (None, data)
        _traced.append(weight)
        before = [tf.identity(tf.convert_to_tensor(v)) for v in kept]
        try:
            with keras_model.means_weighted(model, weight.value), tapes_watched():
                result = original(batch)
            if weighted:
                result = _weighted_figures(model, result, weight.value)
                present = tf.convert_to_tensor(weight.value) > 0
                for variable, old in zip(kept, before, strict=True):
                    variable.assign(tf.where(present, tf.convert_to_tensor(variable), old))
        finally:
            weight.active, weight.value = False, None
            _traced.pop()
        return result
    return step


def _weighted_figures(model: Any, figures: Any, weight: Any) -> Any:
    """Weight logs that a step computed itself, so that their mean over ranks is exact."""
    if not isinstance(figures, dict):
        return figures
    of_metrics: set[str] = set()
    for metric in model.metrics:
        result = metric.result()
        of_metrics |= set(result) if isinstance(result, dict) else {metric.name}
    return {name: value * tf.cast(weight, value.dtype)
            if name not in of_metrics and isinstance(value, tf.Tensor)
            and value.dtype.is_floating and not len(value.shape) else value
            for name, value in figures.items()}


def _without_trace(model: Any) -> list[Any]:
    """Variables that a step must not change on a rank without samples: metrics, statistics."""
    # Those of synchronized layers are of the samples of all ranks.
    changed = {id(v) for v in [*seed_variables(model.non_trainable_variables), *(
        v for layer in model._flatten_layers() if keras_model.MOMENTS in vars(layer)
        for v in layer.non_trainable_variables)]}
    found = {id(v): v for v in [*model.non_trainable_variables,
                                *(v for m in model.metrics for v in m.variables)]}
    return [v for key, v in found.items() if key not in changed]

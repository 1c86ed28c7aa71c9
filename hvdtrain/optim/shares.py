"""Steps in which ranks do not count alike: fewer samples, masked ones, weights of samples.

Gradients are averaged over ranks. That is the gradient of one process when the loss is a mean
over samples and each rank has as many. Otherwise the loss is multiplied, before its gradient is
taken, by what makes it so again. With n_r samples of n on rank r of N, and a loss S_r / D_r:

    weight of the step   w_r = N n_r / n              so that  mean_r(w_r L_r) = sum_r(n_r L_r) / n
    reduction "sum"      L_r = S_r N / w_r            so that  mean_r(w_r L_r) = sum_r S_r
    other denominators   L_r = S_r N / (w_r sum_r D)  so that  mean_r(w_r L_r) = sum S / sum D

D_r is the number of samples that are not masked (a mask, `ignore_class`), or the sum of the
samples' weights (`mean_with_sample_weight`); their sum over ranks takes one small collective per
step and loss, which runs beside the forward pass of the next layers at best. Figures of the loss
become those of one process as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.errors import ConfigError
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.optim.keras_seam import Hidden
from hvdtrain.optim.names import CallNames
from hvdtrain.optim.provenance import tapes_watched
from hvdtrain.optim.state import seed_variables

_MEANS = ("sum_over_batch_size", "mean")
_SHARE = "_hvdtrain_share"
_traced: list[StepShare] = []


@dataclass(kw_only=True)
class StepShare:
    """This rank's part of the step that is being traced."""

    active: bool = False
    """A step that all ranks take together is being traced."""
    weight: Any | None = None
    """Float32 scalar tensor; None where all ranks have as many samples."""

    def over_weight(self, value: Any) -> Any:
        """`value` divided by the weight; 0 on a rank without samples."""
        if self.weight is None:
            return value
        return tf.math.divide_no_nan(value, tf.cast(self.weight, value.dtype))

    def counted(self, value: Any) -> Any:
        """`value`, or 0 on a rank without samples."""
        if self.weight is None:
            return value
        return tf.where(self.weight > 0, value, tf.zeros_like(value))


def has_samples() -> Any | None:
    """Of the step that is being traced: whether this rank has samples in it, a boolean tensor.

    None outside of such a step, and where every rank always has some.
    """
    weight = _traced[-1].weight if _traced else None
    return None if weight is None else weight > 0


class LossOverRanks(keras.losses.Loss):  # type: ignore[misc]
    """A loss whose gradient, averaged over ranks, is that of one process.

    Args:
        loss: A Keras loss.
        share: Of the step that is being traced.
        collective: The collective of the run.
        name: String, begins the names of its collectives; equal on all ranks.
        after: Variable that each step assigns to: keeps the collectives of two steps apart.
    """

    def __init__(self, loss: Any, share: StepShare, collective: Collective, name: str,
                 after: Any) -> None:
        super().__init__(name=loss.name, reduction=loss.reduction, dtype=loss.dtype)
        self.inner = loss
        self._share = share
        self._collective = collective
        self._names = CallNames(name)
        self._after = after

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """The loss of this rank, corrected as the module says."""
        if not self._share.active:
            return self.inner(y_true, y_pred, sample_weight)
        value, mask = self._value_and_mask(y_true, y_pred, sample_weight)
        size = float(self._collective.size)
        if self.reduction == "sum":
            return self._share.over_weight(value * size)
        if self.reduction in _MEANS and mask is None:
            return value
        if self.reduction == "mean_with_sample_weight":
            if mask is None and sample_weight is None:
                return value
            own = keras_model.sum_of_weights(sample_weight, mask, value.dtype)
        elif self.reduction in _MEANS:
            own = tf.reduce_sum(tf.cast(mask, value.dtype))
        else:
            return value
        own = self._share.counted(tf.stop_gradient(own))
        everyone = tf.cast(self._sum(tf.cast(own, tf.float32)), value.dtype)
        return value * self._share.over_weight(tf.math.divide_no_nan(own * size, everyone))

    def _value_and_mask(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Any]:
        """The loss of Keras, and the mask that it has used."""
        masks = [keras_model.mask_of(y_pred)]
        call: Callable[..., Any] = self.inner.call

        def watched(*args: Any, **kwargs: Any) -> Any:
            losses = call(*args, **kwargs)
            masks.append(keras_model.mask_of(losses))
            return losses
        keras_seam.set_on_instance(self.inner, "call", watched)
        try:
            value = self.inner(y_true, y_pred, sample_weight)
        finally:
            keras_seam.restore_method(self.inner, "call", call)
        found = [m for m in masks if m is not None]
        if len(found) == 2:  # noqa: PLR2004 - of the prediction, and of the loss
            return value, tf.logical_and(*found)
        return value, found[0] if found else None

    def _sum(self, own: Any) -> Any:
        if self._collective.size == 1:
            return own
        if keras_seam.inside_xla():
            raise ConfigError(
                f"The loss `{self.name}` counts samples over all ranks (masks, or weights of "
                "samples), which takes a collective; it cannot be compiled by XLA. Leave xla out.")
        with tf.control_dependencies([tf.convert_to_tensor(self._after)]):
            own = tf.identity(own)
        return self._collective.reduce([own], name=self._names.next(), op="sum")[0]


def share_losses(model: Any, collective: Collective) -> StepShare:
    """Let the compiled losses of a model count samples over all ranks. All ranks.

    Losses that are no Keras losses, or bring a `__call__` of their own, stay as they are: they
    are taken as means over samples.

    Args:
        model: A compiled model with a distributed optimizer.
        collective: The collective of the run.

    Returns:
        The share that the losses look at.
    """
    compiled = getattr(model, "_compile_loss", None)
    if compiled is None or collective.size == 1:
        return StepShare()
    known = compiled.__dict__.get(_SHARE)
    if known is not None and known.value[0] is collective:
        return known.value[1]  # type: ignore[no-any-return]
    share = StepShare()
    keras_seam.set_on_instance(compiled, _SHARE, Hidden((collective, share)))
    after = keras_seam.leaf_optimizers(keras_seam.optimizers_of(model))[0]._iterations

    def wrap(number: int, loss: Any) -> Any:
        inner = loss.inner if isinstance(loss, LossOverRanks) else loss
        if not isinstance(inner, keras.losses.Loss) or (
                type(inner).__call__ is not keras.losses.Loss.__call__):
            return loss
        return LossOverRanks(inner, share, collective, f"hvdtrain.loss{number}", after)
    keras_model.replace_losses(compiled, wrap)
    return share


def unshare_losses(model: Any) -> None:
    """Undo `share_losses`."""
    compiled = getattr(model, "_compile_loss", None)
    if compiled is not None and compiled.__dict__.pop(_SHARE, None) is not None:
        keras_model.replace_losses(
            compiled, lambda _, loss: loss.inner if isinstance(loss, LossOverRanks) else loss)


def share_steps(model: Any, share: StepShare, *, weighted: bool) -> Callable[[], None]:
    """Tell the share of each training step. Every rank; before the train function is made.

    Args:
        model: A compiled, built model.
        share: What its losses look at.
        weighted: Boolean; the data are pairs `(weight, batch)`, and the metrics are built.

    Returns:
        A function that undoes it.
    """
    original = model.train_step
    undos = [_weight_gradients(o, share) for o in keras_seam.optimizers_of(model)] if (
        weighted) else []

    def step(batch: Any) -> Any:
        with tapes_watched():
            return original(batch)

    def undo() -> None:
        for each in undos:
            each()
        keras_seam.restore_method(model, "train_step", original)
        model.train_function = None

    keras_seam.set_on_instance(model, "train_step", _shared(model, step, share, weighted=weighted))
    return undo


def _weight_gradients(optimizer: Any, share: StepShare) -> Callable[[], None]:
    """Multiply the loss by the weight of the step where it is scaled, else its gradients.

    A `train_step` of the model's own need not call `scale_loss`.
    """
    scale_loss, apply = optimizer.scale_loss, optimizer.apply
    is_scaled = False

    def scale_loss_by_share(loss: Any) -> Any:
        nonlocal is_scaled
        if share.weight is not None:
            is_scaled = True
            loss = loss * tf.cast(share.weight, loss.dtype)
        return scale_loss(loss)

    def apply_by_share(grads: Any, trainable_variables: Any = None) -> Any:
        nonlocal is_scaled
        if share.weight is not None and not is_scaled:
            grads = [_times(gradient, share.weight) for gradient in grads]
        is_scaled = False
        return apply(grads, trainable_variables)

    def undo() -> None:
        keras_seam.restore_method(optimizer, "scale_loss", scale_loss)
        keras_seam.restore_method(optimizer, "apply", apply)
    keras_seam.set_on_instance(optimizer, "scale_loss", scale_loss_by_share)
    keras_seam.set_on_instance(optimizer, "apply", apply_by_share)
    return undo


def _times(gradient: Any, weight: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, weight), gradient.indices,
                                gradient.dense_shape)
    return gradient * tf.cast(weight, gradient.dtype)


def share_evaluation(model: Any, share: StepShare, *, weighted: bool) -> Callable[[], None]:
    """Tell the share of each step of an evaluation, in which all ranks take the same steps.

    Args:
        model: As for `share_steps`.
        share: As there.
        weighted: As there.

    Returns:
        A function that undoes it.
    """
    original = model.test_step
    keras_seam.set_on_instance(model, "test_step",
                               _shared(model, original, share, weighted=weighted))
    return lambda: keras_seam.restore_method(model, "test_step", original)


def _shared(model: Any, step: Callable[[Any], Any], share: StepShare, *,
            weighted: bool) -> Callable[[Any], Any]:
    """A step of which this rank has a share, and which leaves no trace where it has none."""
    kept = _without_trace(model) if weighted else []

    def shared_step(data: Any) -> Any:
        share.active = True
        share.weight, batch = data if weighted else (None, data)
        _traced.append(share)
        before = [tf.identity(tf.convert_to_tensor(v)) for v in kept]
        try:
            with keras_model.means_weighted(model, share.weight):
                result = step(batch)
            if weighted:
                result = _weighted_figures(model, result, share.weight)
            if weighted:
                present = tf.convert_to_tensor(share.weight) > 0
                for variable, old in zip(kept, before, strict=True):
                    variable.assign(tf.where(present, tf.convert_to_tensor(variable), old))
        finally:
            share.active, share.weight = False, None
            _traced.pop()
        return result
    return shared_step


def _weighted_figures(model: Any, figures: Any, weight: Any) -> Any:
    """Figures that a step has computed by itself, so that their mean over ranks is exact."""
    if not isinstance(figures, dict):
        return figures
    of_metrics = keras_model.names_of_figures(model)
    return {name: value * tf.cast(weight, value.dtype)
            if name not in of_metrics and isinstance(value, tf.Tensor)
            and value.dtype.is_floating and not len(value.shape) else value
            for name, value in figures.items()}


def _without_trace(model: Any) -> list[Any]:
    """What a step must not change on a rank without samples: metrics, statistics of layers.

    Those of synchronized layers are of the samples of all ranks.
    """
    seeds = {id(v) for v in [*seed_variables(model.non_trainable_variables),
                             *keras_model.synchronized_statistics(model)]}
    found = {id(v): v for v in [*model.non_trainable_variables,
                                *(v for m in model.metrics for v in m.variables)]}
    return [v for key, v in found.items() if key not in seeds]


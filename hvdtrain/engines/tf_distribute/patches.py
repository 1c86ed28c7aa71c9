"""Faults of Keras 3 under tf.distribute, worked around: all of them, and only here.

Before Keras 3.8 gradients of several replicas are added and not averaged, and before 3.10 the
metrics are wrong, so that these are refused. From 3.10 to 3.15 the places are the same. Each is
compared with the signature that is known before it is replaced, and put back after the training.

Replaced by the optimizer's hooks (`optimizer`) and not here: clipping of gradients, which Keras
does on each replica before it adds them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from packaging.version import Version

from hvdtrain.errors import OptimizerError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.state import SEED_STRIDE

SEVERAL_REPLICAS_MIN = Version("3.10")

_Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One function that is replaced."""

    owner: Any
    """The module, class or object that holds it."""
    name: str
    parameters: tuple[str, ...]
    """Those that are known, without `self`."""
    make: Callable[[_Function], _Function]
    """From the function that was there to the one that takes its place."""

    def check(self) -> None:
        """Refuse to replace what is not known.

        Raises:
            OptimizerError: It is not there, or has other parameters.
        """
        function = getattr(self.owner, self.name, None)
        found = tuple(inspect.signature(function).parameters) if function is not None else None
        known = self.parameters if not inspect.isclass(self.owner) else ("self", *self.parameters)
        if found != known:
            raise OptimizerError(
                f"Keras {keras.__version__} with TensorFlow {tf.__version__}: {self.name}"
                f"({', '.join(known)}) was expected, found "
                f"{'nothing' if found is None else found}. Engine tf does not know these "
                "versions. Install others, or train with engine allreduce: hvdtrain launch -np N "
                "fit ...")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace it, and put it back."""
        self.check()
        original, own = getattr(self.owner, self.name), self.name in vars(self.owner)
        object_or_type = type if inspect.isclass(self.owner) else object
        object_or_type.__setattr__(self.owner, self.name, self.make(original))
        try:
            yield
        finally:
            if own:
                object_or_type.__setattr__(self.owner, self.name, original)
            else:
                object_or_type.__delattr__(self.owner, self.name)


@contextmanager
def applied(strategy: Any) -> Iterator[None]:
    """Everything that this strategy needs, while the model is built and trained.

    Raises:
        OptimizerError: This Keras is not known.
    """
    keras_seam.check_keras()
    patches = patches_of(strategy)
    if patches and Version(keras.__version__) < SEVERAL_REPLICAS_MIN:
        raise OptimizerError(
            f"Keras {keras.__version__} is installed; before {SEVERAL_REPLICAS_MIN} it gives wrong "
            "figures under a strategy with several replicas (and wrong weights before 3.8). "
            f"Install a newer one (pip install 'keras>={SEVERAL_REPLICAS_MIN},"
            f"<{keras_seam.KERAS_BELOW}'), or train with engine allreduce.")
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch.applied())
        yield


def patches_of(strategy: Any) -> list[Patch]:
    """What has to be replaced for a strategy; nothing for a single replica."""
    if strategy.num_replicas_in_sync == 1:
        return []
    from keras.src.backend.tensorflow import core, trainer
    from keras.src.losses import loss
    patches = [
        Patch(owner=keras.random.SeedGenerator, name="next", parameters=("ordered",),
              make=_seeds_of_their_own),
        Patch(owner=loss, name="reduce_values",
              parameters=("values", "sample_weight", "reduction"), make=_scaled_scalars)]
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        patches.append(Patch(
            owner=trainer, name="reduce_per_replica",
            parameters=("values", "strategy", "reduction"), make=_local_logs))
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy):
        patches += [
            Patch(owner=strategy.extended, name="_create_variable",
                  parameters=("next_creator", "kwargs"), make=_with_aggregation),
            Patch(owner=core.Variable, name="_direct_assign", parameters=("value",),
                  make=_sums_grow)]
    return patches


@contextmanager
def built(model: Any) -> Iterator[None]:
    """Keep Keras from building a model that is built.

    Under several workers it would reduce a batch of data for that, and fails.
    """
    keras_seam.set_on_instance(model, "_maybe_symbolic_build", lambda *_, **__: None)
    try:
        yield
    finally:
        object.__delattr__(model, "_maybe_symbolic_build")


def _seeds_of_their_own(original: _Function) -> _Function:
    """All replicas draw the same seeds, and would drop the same units of their samples.

    The stride is that of the ranks of allreduce, so that the masks are theirs.
    """
    def next(self: Any, ordered: bool = True) -> Any:  # noqa: A001 - the name that is replaced
        seed = original(self, ordered)
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return seed
        mine = tf.cast(context.replica_id_in_sync_group, seed.dtype) * SEED_STRIDE
        return seed + tf.stack([mine, tf.zeros_like(mine)])
    return next


def _scaled_scalars(original: _Function) -> _Function:
    """A loss function that returns one number per batch is not divided by the replicas.

    Any other is, so that the sum of all gradients is a mean.
    """
    from keras.src.losses.loss import scale_loss_for_distribution
    means = ("sum_over_batch_size", "mean", "mean_with_sample_weight")

    def reduce_values(values: Any, sample_weight: Any = None,
                      reduction: str = "sum_over_batch_size") -> Any:
        reduced = original(values, sample_weight, reduction)
        if tuple(values.shape) == () and reduction in means:
            return scale_loss_for_distribution(reduced)
        return reduced
    return reduce_values


def _local_logs(original: _Function) -> _Function:
    """Keras reduces the figures of each step over axis 0, which scalars do not have.

    Those of this process do for a progress bar; at the end of an epoch Keras reads the metrics,
    which are summed over all processes.
    """
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction == "concat":
            return original(values, strategy, reduction)
        return keras.tree.map_structure(
            lambda value: strategy.experimental_local_results(value)[0], values)
    return reduce_per_replica


def _with_aggregation(original: _Function) -> _Function:
    """Variables without an aggregation cannot be assigned in a replica (BatchNorm, dropout)."""
    kinds = tf.VariableAggregation

    def create_variable(next_creator: Any, **kwargs: Any) -> Any:
        if kwargs.get("aggregation") in (None, kinds.NONE):
            dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
            kwargs["aggregation"] = kinds.MEAN if dtype.is_floating else kinds.ONLY_FIRST_REPLICA
        return original(next_creator, **kwargs)
    return create_variable


def _sums_grow(original: _Function) -> _Function:
    """Keras adds to a metric by assigning the sum: v + x.

    A strategy that adds what replicas assign makes of it (v + x0) + (v + x1), and counts what
    was there twice.
    """
    def _direct_assign(self: Any, value: Any) -> None:
        inner = self._value
        if (getattr(inner, "aggregation", None) == tf.VariableAggregation.SUM
                and tf.distribute.get_replica_context() is not None):
            inner.assign_add(tf.cast(value, inner.dtype) - inner.read_value())
            return
        original(self, value)
    return _direct_assign

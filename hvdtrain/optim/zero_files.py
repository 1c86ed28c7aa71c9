"""Files of an optimizer whose state is divided: they hold the whole, as a plain one writes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.errors import OptimizerError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.zero import DividedOptimizer, divided

_SAVING = ("BackupAndRestore", "ModelCheckpoint", "OrbaxCheckpoint")


@contextlib.contextmanager
def consolidated(optimizer: Any) -> Iterator[None]:
    """While it is entered, the chief can save the optimizer as a plain one. All ranks.

    The state of all ranks is gathered in the memory of the chief, and of the chief only. Of an
    optimizer that is not divided nothing is done.

    Args:
        optimizer: A Keras optimizer, or None.

    Example:
        >>> with hvdtrain.consolidated(model.optimizer):
        ...     if session.world.is_chief:
        ...         model.save("model.keras")
    """
    found = _leaves(optimizer)
    for leaf in found:
        leaf.gather()
    try:
        yield
    finally:
        for leaf in found:
            leaf.forget()


def share_loaded(optimizer: Any) -> None:
    """Give all ranks their parts of the state that the chief has loaded. All ranks.

    What is equal on all ranks (iterations, learning rate) is broadcast with the weights.
    """
    for leaf in _leaves(optimizer):
        leaf.share_loaded()


def check_use(optimizer: Any, callbacks: Sequence[Any]) -> None:
    """Refuse what does not go together in a training by `fit`.

    Args:
        optimizer: The optimizer of the model.
        callbacks: The user's callbacks.

    Raises:
        OptimizerError: A callback would save it on the chief alone.
    """
    saving = tuple(getattr(keras.callbacks, name) for name in _SAVING
                   if hasattr(keras.callbacks, name))
    found = next((c for c in callbacks if isinstance(c, saving)), None)
    if found is not None and _leaves(optimizer):
        raise OptimizerError(
            f"The callback {type(found).__name__} saves the optimizer on the chief, which has only "
            "its part of the state (zero). Leave it out: fit writes checkpoints of the whole "
            "(checkpoint_every_epochs); or leave zero out.")


def keep_whole_files(optimizer: Any) -> None:
    """Let an optimizer around others save and load what they save and load."""
    if divided(optimizer) is not None or not _leaves(optimizer):
        return

    def load(original: Any) -> Any:
        def load_own_variables(store: Any) -> None:
            values = [np.asarray(store[str(k)]) for k in range(len(store.keys()))]
            if len(values) != _count(optimizer):
                original(store)  # says that it does not fit
                return
            _take(optimizer, values)
        return load_own_variables

    def save(_: Any) -> Any:
        def save_own_variables(store: Any) -> None:
            for number, value in enumerate(_values(optimizer)):
                store[str(number)] = value
        return save_own_variables

    keras_seam.replace_method(optimizer, "save_own_variables", save)
    keras_seam.replace_method(optimizer, "load_own_variables", load)


def _leaves(optimizer: Any) -> list[DividedOptimizer]:
    """What is divided of an optimizer, in order."""
    return [] if optimizer is None else [
        found for leaf in keras_seam.leaf_optimizers(optimizer)
        if (found := divided(leaf)) is not None]


def _values(optimizer: Any) -> Iterator[Any]:
    """What `optimizer.variables` would be if nothing were divided."""
    found = divided(optimizer)
    if found is not None:
        yield from found.values()
        return
    for variable in optimizer._variables:
        yield np.asarray(variable.numpy())
    for inner in keras_seam.inner_optimizers(optimizer):
        yield from _values(inner)


def _count(optimizer: Any) -> int:
    found = divided(optimizer)
    if found is not None:
        return found.count
    return len(optimizer._variables) + sum(map(_count, keras_seam.inner_optimizers(optimizer)))


def _take(optimizer: Any, values: list[Any]) -> None:
    """Set everything to the values of an optimizer of which nothing is divided."""
    found = divided(optimizer)
    if found is not None:
        found.take(values)
        return
    own = len(optimizer._variables)
    for variable, value in zip(optimizer._variables, values[:own], strict=True):
        variable.assign(value)
    for inner in keras_seam.inner_optimizers(optimizer):
        end = own + _count(inner)
        _take(inner, values[own:end])
        own = end

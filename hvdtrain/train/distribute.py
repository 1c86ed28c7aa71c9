"""A model's own methods on several ranks: made to work on all, or refused.

Keras' own `model.fit` is refused where each rank would train alone on all data. It is allowed where
the script takes care: the optimizer is distributed or the `train_step` reduces, weights are equal
or broadcast by a callback, and each rank gives its own data.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.config import TrainConfig
from hvdtrain.data.tf_pipeline import nodes_of
from hvdtrain.errors import ConfigError
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_model, keras_seam, state
from hvdtrain.optim.distributed import (
    DistributedOptimizer,
    is_distributed,
    state_of,
    undo_distribution,
)
from hvdtrain.optim.keras_seam import Hidden, hooked
from hvdtrain.optim.reducer import GradientReducer
from hvdtrain.optim.sample_weights import unweigh_losses
from hvdtrain.optim.zero import consolidated
from hvdtrain.session import Session, session_for
from hvdtrain.train.chief import is_alone, needs_all, on_chief
from hvdtrain.train.coordinator import Coordinator
from hvdtrain.train.keras_door import evaluate, fit, launched, predict
from hvdtrain.whole_file import whole_file

_DOOR = "_hvdtrain_door"
_SAVING = ("save", "save_weights", "export")
_OURS = ("fit", "evaluate", "predict", "train_on_batch", *_SAVING)
_alone: list[bool] = []
_HOW = (
    "Write model = hvdtrain.distribute(model) before: then model.fit, as it is written, divides "
    "the data and does the rest. To train a model on this rank alone on purpose: "
    "with hvdtrain.alone(): model.fit(...)")
_horovod_way: list[bool] = []
"""Not empty: scripts written for Horovod are accepted; whether all data was warned of."""
_HOW_HOROVOD = (
    "Write model.compile(hvd.DistributedOptimizer(optimizer), ...), and "
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0) among the callbacks of model.fit")


def distribute(model: Any, *, config: TrainConfig | None = None) -> Any:
    """Make a model's own methods work on all ranks. All ranks, after `hvdtrain.init()`.

    `model.fit`, `evaluate` and `predict` become `hvdtrain.fit`, `evaluate` and `predict`. `save`,
    `save_weights` and `export`, which all ranks must call, write on the chief only, a file that
    is complete or absent. `undistribute` reverts all of this.

    Args:
        model: A `keras.Model`, compiled before or later.
        config: A `TrainConfig`, for what Keras has no argument for.

    Returns:
        The same model.

    Raises:
        ConfigError: It is not a model, or a setting has no effect here.

    Example:
        ```python
        hvdtrain.init()
        model = hvdtrain.distribute(make_model())
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=64, epochs=3)
        ```
    """
    if not isinstance(model, keras.Model):
        raise ConfigError(f"distribute takes a keras.Model. Received: {type(model).__name__}. "
                          "Write model = hvdtrain.distribute(model).")
    if type(model).fit is not keras.Model.fit:
        raise ConfigError(
            f"{type(model).__name__} has a fit of its own. Call hvdtrain.fit(self, ...) in it, in "
            "place of super().fit(...), and leave distribute out.")
    _close(model)
    config = launched(config)
    session = session_for(config)
    keras_seam.set_on_instance(model, _DOOR, Hidden(config))
    for name, ours in (("fit", fit), ("evaluate", evaluate), ("predict", predict)):
        method: Any = functools.wraps(getattr(type(model), name))(
            functools.partial(ours, model, config=config))
        method.__signature__ = inspect.signature(getattr(model, name))
        keras_seam.set_on_instance(model, name, method)
    for name in _SAVING:
        original = getattr(model, name)
        keras_seam.set_on_instance(model, name, functools.wraps(original)(
            functools.partial(save_on_chief, model, original, session)))
    if session.world.size > 1:
        keras_seam.set_on_instance(model, "train_on_batch", _refuse_train_on_batch)
    return model


def undistribute(model: Any) -> Any:
    """Remove what `distribute` and a training have put on a model and its optimizers.

    Returns:
        The same model, as Keras made it; its weights and the optimizer's state stay.
    """
    _close(model)
    unweigh_losses(model)
    for name in [name for name in vars(model) if name.startswith("_hvdtrain")]:
        object.__delattr__(model, name)
    for optimizer in keras_seam.found_optimizers(model):
        undo_distribution(optimizer)
    model.train_function = None
    return model


@contextmanager
def alone() -> Iterator[None]:
    """While entered, Keras' own `model.fit` trains on this rank alone, as Keras does."""
    _alone.append(True)
    try:
        yield
    finally:
        _alone.pop()


def is_training_alone() -> bool:
    """Whether `alone` is entered."""
    return bool(_alone)


def allow_horovod_way() -> Callable[[], None]:
    """Let `watch_keras` accept scripts written for Horovod; gives a function that undoes it."""
    _horovod_way[:] = _horovod_way or [False]
    return _horovod_way.clear


def watch_keras(collective: Collective) -> Callable[[], None]:
    """Check each call of Keras' own `fit` and `save_model`; gives a function that undoes it."""
    train, save = keras.Model.fit, keras.saving.save_model

    @functools.wraps(train)
    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        if _alone or isinstance(kwargs.get("callbacks"), Coordinator):
            return train(model, *args, **kwargs)
        given = dict(zip(("x", "y", "batch_size", "epochs", "verbose", "callbacks"), args,
                         strict=False)) | kwargs
        with _checked(model, given, collective):
            return train(model, *args, **kwargs)

    @functools.wraps(save)
    def save_model(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if _DOOR in vars(model) and not is_alone():
            return model.save(filepath, *args, **kwargs)
        return save(model, filepath, *args, **kwargs)

    keras.Model.fit = fit
    keras.saving.save_model = keras.models.save_model = save_model

    def undo() -> None:
        if keras.Model.fit is fit:
            del keras.Model.fit
        keras.saving.save_model = keras.models.save_model = save
    return undo


def _close(model: Any) -> None:
    if model.__dict__.pop(_DOOR, None) is not None:
        for name in _OURS:
            model.__dict__.pop(name, None)


def _refuse_train_on_batch(*_: Any, **__: Any) -> Any:
    raise ConfigError(
        "train_on_batch would train each rank alone, on the whole batch. Use fit, or a loop of "
        "your own with hvdtrain.shard and hvdtrain.DistributedOptimizer (docs/from-keras.md).")


def save_on_chief(model: Any, save: Callable[..., Any], session: Session, filepath: Any, *args: Any,
          **kwargs: Any) -> None:
    """Write a complete file on the chief; returns when it is there. All ranks."""
    # In what only the chief does (a callback that writes files) it does not wait for the others.
    if is_alone():
        save(filepath, *args, **kwargs)
        return

    def work() -> None:
        path = Path(filepath) if isinstance(filepath, (str, Path)) else None
        if (path is None or "://" in str(filepath) or path.is_dir()
                or "max_shard_size" in kwargs):
            save(filepath, *args, **kwargs)
            return
        given = inspect.signature(save).bind(filepath, *args, **kwargs).arguments
        if path.exists() and not given.get("overwrite", True):
            raise ConfigError(f"{path} is there already. Give another name, or overwrite=True.")
        suffix = ".weights.h5" if path.name.endswith(".weights.h5") else path.suffix
        with whole_file(path, suffix=suffix) as temporary:
            try:
                save(str(temporary), *args, **kwargs)
            except (ValueError, OSError) as error:
                raise type(error)(str(error).replace(str(temporary), str(path))) from error
    with (session.progress.phase("saving the model, which all ranks must call"),
          needs_all("saves a model"), consolidated(keras_seam.optimizers_of(model))):
        on_chief(session.collective, work)


def _checked(model: Any, given: Mapping[str, Any], collective: Collective
             ) -> AbstractContextManager[Any]:
    """Refuse a training that nobody has divided over the ranks, with the line to write."""
    optimizers, how = keras_seam.found_optimizers(model), _HOW
    if _horovod_way:
        how = _HOW_HOROVOD
        _adopt_loss_scale(optimizers)
    states = [found for o in optimizers for part in [o, *keras_seam.leaf_optimizers(o)]
              if (found := state_of(part)) is not None]
    own_step = type(model).train_step is not keras.Model.train_step
    if not states and not own_step:
        raise ConfigError(
            f"model.fit was called on one of {collective.size} ranks with an optimizer that is "
            f"not distributed: each rank would train alone, on all of its data. {how}")
    if len(among := {id(s.collective): s.collective for s in states}) == 1:
        (collective,) = among.values()  # a process set of Horovod: only its ranks may train
    broadcasts = any("Broadcast" in type(c).__name__
                     for c in keras.tree.flatten(given.get("callbacks") or []))
    # Each rank has statistics of its own, as with Horovod; not so in the other door's scripts.
    mine = state.of_all_ranks(
        model, keras_model.learned_weights(model) if _horovod_way else model.weights)
    everyone = collective.gather_objects((state.digests(mine), data_checksum(given)))
    weights, checksums = map(set, zip(*everyone, strict=True))
    if not broadcasts and len(weights) > 1:
        raise ConfigError(
            "model.fit was called with other weights on each rank, and no callback broadcasts "
            + ("them: they would stay different. " if _horovod_way else
               "them: they would stay different. Call hvdtrain.broadcast_variables(model.weights) "
               "before, once the model is built. Or let hvdtrain do it. ") + how)
    if collective.size > 1 and len(checksums) == 1 and None not in checksums:
        _refuse_same_data(collective)
    with ExitStack() as stack:
        if _horovod_way:
            stack.enter_context(_without_xla(model))
        if not states:
            stack.enter_context(_reducing(model))
        return stack.pop_all()


def _adopt_loss_scale(optimizers: Iterable[Any]) -> None:
    """Distribute the loss scaling that `compile` puts around an optimizer (mixed_float16)."""
    for optimizer in optimizers:
        inner = next(iter(keras_seam.leaf_optimizers(optimizer)))
        known = None if inner is optimizer else state_of(inner)
        if known is not None and not is_distributed(optimizer):
            DistributedOptimizer(optimizer, collective=known.collective)


@contextmanager
def _without_xla(model: Any) -> Iterator[None]:
    """Within it, the step is not compiled as a whole: collectives have no XLA kernel."""
    with keras_model.compiled_settings_kept(model):
        if getattr(model, "jit_compile", False):
            model.jit_compile = False
            model.train_function = None
        yield


def _refuse_same_data(collective: Collective) -> None:
    """Refuse data that is the same on all ranks; of scripts for Horovod warn once."""
    if not _horovod_way:
        raise ConfigError(
            f"model.fit was called with the same data on all {collective.size} ranks: each would "
            f"train on all of it. Give each rank its share, e.g. x[rank::size]. Or let hvdtrain "
            f"do it. {_HOW}")
    if not _horovod_way[0] and collective.rank == 0:
        get_logger().warning(
            "model.fit has the same data on all %d ranks: each trains on all of it, in its own "
            "order. To divide an epoch, give each rank its share: x[hvd.rank()::hvd.size()], or "
            "dataset.shard(hvd.size(), hvd.rank()).", collective.size)
    _horovod_way[0] = True


def _reducing(model: Any) -> AbstractContextManager[None]:
    """Refuse a `train_step` that reduces nothing, when it is traced."""
    def train_step(original: Any, data: Any) -> Any:
        before = GradientReducer.calls
        result = original(data)
        if GradientReducer.calls == before:
            hvd, how = ("hvd", "") if _horovod_way else (
                "hvdtrain", f" Or let hvdtrain do it. {_HOW}")
            raise ConfigError(
                f"The train_step of {type(model).__name__} reduces no gradients over the ranks: "
                f"each would train alone. Compile with {hvd}.DistributedOptimizer(optimizer), or "
                f"use {hvd}.DistributedGradientTape in it.{how}")
        return result
    return hooked(model, train_step=train_step)


def data_checksum(given: Mapping[str, Any]) -> int | None:
    """A checksum of some samples of arrays, or of a Dataset's parts; None where not possible."""
    parts: list[Any] = []
    for data in (given.get("x"), given.get("y")):
        if isinstance(data, tf.data.Dataset):
            found = _of_dataset(data)
            if found is None:
                return None
            parts.append(found)
            continue
        for array in tf.nest.flatten(data):
            if array is None:
                continue
            if not hasattr(array, "__array__") or not hasattr(array, "shape"):
                return None
            rows = np.asarray(array)
            some = rows[::max(1, len(rows) // 16)] if rows.ndim else rows
            parts.append((rows.shape, some.tolist()))
    return zlib.crc32(repr(parts).encode())


def _of_dataset(dataset: Any) -> list[Any] | None:
    parts = []
    for node in nodes_of(dataset):
        name = type(node).__name__
        if "Generator" in name or "FlatMap" in name or "Interleave" in name:
            return None  # its functions may hold what a rank has for itself
        tensors = [getattr(node, key, None) for key in ("_tensors", "_tensor", "_index", "_count")]
        parts.append((name, [np.asarray(t).tobytes()[:4096] for t in tf.nest.flatten(tensors)
                             if isinstance(t, tf.Tensor)]))
    return parts

"""`distribute`: a model's own methods work on all ranks.

Two lines make a script for one process one for N ranks, and the result stays that of the script.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from hvdtrain.config import TrainConfig
from hvdtrain.errors import ConfigError
from hvdtrain.optim import keras_model, keras_seam
from hvdtrain.optim.as_set import undo_distribution
from hvdtrain.optim.keras_seam import Hidden
from hvdtrain.optim.shares import unshare_losses
from hvdtrain.optim.zero_files import consolidated
from hvdtrain.session import Session, session_for
from hvdtrain.train.chief import is_alone, needs_all, on_chief
from hvdtrain.train.keras_door import evaluate, fit, launched, predict
from hvdtrain.whole_file import whole_file

_DOOR = "_hvdtrain_door"
_OURS = ("fit", "evaluate", "predict", "save", "save_weights", "export", "train_on_batch")


def distribute(model: Any, *, config: TrainConfig | None = None) -> Any:
    """Let a model's own methods work on all ranks. Every rank, after `hvdtrain.init()`.

    From then on `model.fit`, `evaluate` and `predict` are `hvdtrain.fit`, `evaluate` and
    `predict`; and `save`, `save_weights` and `export`, which every rank must call, write once, on
    the chief, a file that is whole or not there. `undistribute` takes all of it away.

    Args:
        model: A `keras.Model`, compiled before or later.
        config: A `TrainConfig`: what Keras has no argument for.

    Returns:
        The same model.

    Raises:
        ConfigError: It is no model, or a setting cannot act here.

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
    if session.world.size > 1:
        keras_seam.set_on_instance(model, "train_on_batch", _refuse_train_on_batch)
    for name in ("save", "save_weights", "export"):
        original = getattr(model, name)
        keras_seam.set_on_instance(model, name, functools.wraps(original)(
            functools.partial(_save, model, original, session)))
    return model


def undistribute(model: Any) -> Any:
    """Take away what `distribute` and a training have put on a model and its optimizers.

    Returns:
        The same model, as Keras has made it; its weights and the optimizer's state stay.
    """
    _close(model)
    unshare_losses(model)
    for name in [name for name in vars(model) if name.startswith("_hvdtrain")]:
        object.__delattr__(model, name)
    for optimizer in keras_seam.found_optimizers(model):
        undo_distribution(optimizer)
    keras_model.forget_train_function(model)
    return model


def _close(model: Any) -> None:
    """Give a model back the methods that `distribute` has replaced."""
    if model.__dict__.pop(_DOOR, None) is not None:
        for name in _OURS:
            model.__dict__.pop(name, None)


def watch_saving() -> Callable[[], None]:
    """Let `keras.saving.save_model` of a distributed model do as `model.save`.

    Returns:
        A function that undoes it.
    """
    places = (keras.saving, keras.models)
    originals = [place.save_model for place in places]

    @functools.wraps(originals[0])
    def save_model(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if _DOOR in vars(model) and not is_alone():
            return model.save(filepath, *args, **kwargs)
        return originals[0](model, filepath, *args, **kwargs)
    for place in places:
        place.save_model = save_model

    def undo() -> None:
        for place, original in zip(places, originals, strict=True):
            place.save_model = original
    return undo


def _refuse_train_on_batch(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise ConfigError(
        "train_on_batch would train each rank alone, on the whole batch. Use fit, or a loop of "
        "your own with hvdtrain.shard and hvdtrain.DistributedOptimizer (docs/from-keras.md).")


def _save(model: Any, save: Callable[..., Any], session: Session, filepath: Any, *args: Any,
          **kwargs: Any) -> None:
    """Write a file of a model, whole, on the chief. All ranks; they return when it is there.

    What only the chief does (a callback that writes files) it does not wait with for the others.
    """
    if is_alone():
        save(filepath, *args, **kwargs)
        return
    path = Path(filepath) if isinstance(filepath, (str, Path)) else None
    whole = (path is not None and "://" not in str(filepath) and not path.is_dir()
             and "max_shard_size" not in kwargs)

    def work() -> None:
        if not whole or path is None:
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

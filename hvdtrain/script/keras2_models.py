"""Models, layers, callbacks and files as Keras 2 had them."""

from __future__ import annotations

import functools
import inspect
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import ConfigError
from hvdtrain.log import get_logger
from hvdtrain.script.keras2_optimizers import Computed

Put = Callable[[Any, str, Any], None]
_LOADING = ("workers", "use_multiprocessing", "max_queue_size")
_STEPS = ("steps_per_epoch", "validation_steps", "steps")
_OF_COMPILE = ("experimental_run_tf_function", "sample_weight_mode", "run_tf_function")
_OF_KERAS_3 = (".weights.h5", ".weights.json", ".keras")
_ADD_WEIGHT = {
    keras.layers.Layer: ("name", "shape", "dtype", "initializer", "regularizer", "trainable",
                         "constraint"),
    keras.metrics.Metric: ("name", "shape", "aggregation", "initializer", "dtype"),
}
"""The positions of the arguments of `add_weight` in Keras 2."""


def install(put: Put) -> None:
    """Patch the classes `Model`, `Layer`, `Metric`, some callbacks, and the functions of files."""
    model: Any = keras.Model
    for name in ("fit", "evaluate", "predict"):
        put(model, name, _with_data(getattr(model, name)))
    trainer = next(kind for kind in model.__mro__ if "compile" in vars(kind))
    put(trainer, "compile", _compile(trainer.compile))  # Keras asks whether it is this one
    put(model, "save_weights", _without(model.save_weights, "save_format", "options"))
    put(model, "load_weights", _without(model.load_weights, "options"))
    for name in ("fit", "evaluate", "predict"):
        put(model, f"{name}_generator", _generator(name))
    put(model, "predict_classes", _predict_classes)
    put(model, "predict_proba", lambda self, x, batch_size=None, verbose=0, **others: self.predict(
        x, batch_size=batch_size, verbose=verbose, **others))
    put(model, "metrics_names", property(_metrics_names))
    put(model, "reset_states", _reset_states)
    put(keras.layers.RNN, "reset_states", lambda self, states=None: self.reset_state())
    put(keras.metrics.Metric, "reset_states", lambda self: self.reset_state())
    for kind, names in _ADD_WEIGHT.items():
        put(kind, "add_weight", _add_weight(kind.add_weight, names))
    for name in ("input", "output"):
        if not hasattr(keras.layers.Layer, f"{name}_shape"):
            put(keras.layers.Layer, f"{name}_shape", Computed(functools.partial(_shape, name)))
    put(keras.layers.Layer, "__init__", _layer_init(keras.layers.Layer.__init__))
    _install_callbacks(put)
    _install_files(put)
    _install_reductions(put)


def _install_callbacks(put: Put) -> None:
    checkpoint, board = keras.callbacks.ModelCheckpoint, keras.callbacks.TensorBoard
    put(checkpoint, "__init__", _checkpoint_init(checkpoint.__init__))
    put(checkpoint, "on_epoch_end", _every_period(checkpoint.on_epoch_end))
    put(board, "__init__", _without(board.__init__, "batch_size", "write_grads", "embeddings_data",
                                    "embeddings_layer_names"))
    monitor = next((kind for kind in checkpoint.__mro__ if "_set_monitor_op" in vars(kind)), None)
    if monitor is not None:  # since Keras 3.8
        put(monitor, "_set_monitor_op", _monitor_op(monitor._set_monitor_op))


def _install_files(put: Put) -> None:
    from keras.src.saving import saving_api
    put(saving_api, "save_weights", _save_weights(saving_api.save_weights))
    put(saving_api, "load_weights", _load_weights(saving_api.load_weights))
    put(tf.train, "latest_checkpoint", _latest_checkpoint(tf.train.latest_checkpoint))
    from keras.src.legacy.saving import legacy_h5_format
    put(legacy_h5_format, "load_model_from_hdf5",
        _load_model(legacy_h5_format.load_model_from_hdf5))


def _install_reductions(put: Put) -> None:
    from keras.src.losses import loss
    before = loss.standardize_reduction
    put(loss, "standardize_reduction", functools.wraps(before)(
        lambda reduction: before("sum_over_batch_size" if reduction == "auto" else reduction)))


def _without(before: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """A function that takes arguments of Keras 2 which have no effect."""
    @functools.wraps(before)
    def function(*args: Any, **kwargs: Any) -> Any:
        return before(*args, **{k: v for k, v in kwargs.items() if k not in names})
    return function


def _with_data(before: Callable[..., Any]) -> Callable[..., Any]:
    """`fit`, `evaluate`, `predict` with the arguments of Keras 2 about data."""
    @functools.wraps(before)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        loading = {name: kwargs.pop(name) for name in _LOADING if name in kwargs}
        as_keras2 = kwargs.pop(_BY_GENERATOR, False) or bool(loading)
        bound = inspect.signature(before).bind_partial(self, *args, **kwargs)
        given = bound.arguments
        for name in _STEPS:
            if isinstance(given.get(name), (float, np.floating)):
                given[name] = math.ceil(given[name])  # Keras 2 began another step below the number
        for key, counts in (("x", ("steps_per_epoch", "steps")),
                            ("validation_data", ("validation_steps",))):
            data = given.get(key)
            if not isinstance(data, keras.utils.PyDataset):
                continue
            for name, value in loading.items():
                setattr(data, name, value)
            count = next((name for name in counts if given.get(name) is not None), None)
            if as_keras2 and count is not None and (
                    data.num_batches not in (None, given[count])):
                shuffled = key == "x" and before.__name__ == "fit" and given.get("shuffle", True)
                given[key] = FirstBatches(data, given.pop(count), shuffled=bool(shuffled))
        return before(*bound.args, **bound.kwargs)
    return method


_BY_GENERATOR = "_hvdtrain_by_generator"
"""The argument by which `fit_generator` tells `fit` that the script is of Keras 2."""


class FirstBatches(keras.utils.PyDataset):  # type: ignore[misc]
    """So many batches of another data set in each epoch, from its first one; again after its last.

    Keras 3 goes on in the next epoch where the last one has ended, and cuts short the epoch in
    which the data end. Keras 2 began each epoch anew.
    """

    def __init__(self, dataset: Any, steps: int, *, shuffled: bool) -> None:
        super().__init__(workers=dataset.workers, max_queue_size=dataset.max_queue_size,
                         use_multiprocessing=dataset.use_multiprocessing)
        self._dataset, self._steps, self._shuffled = dataset, steps, shuffled
        self._order = list(range(dataset.num_batches))
        self._draw()

    def _draw(self) -> None:
        if self._shuffled:
            random.shuffle(self._order)

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, number: int) -> Any:
        return self._dataset[self._order[number % len(self._order)]]

    def on_epoch_begin(self) -> None:
        """Tell the data set."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tell the data set, and draw the order of the next epoch."""
        self._dataset.on_epoch_end()
        self._draw()


def _compile(before: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(before)
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        if "experimental_steps_per_execution" in kwargs:
            kwargs["steps_per_execution"] = kwargs.pop("experimental_steps_per_execution")
        for name in ("target_tensors", "distribute"):
            if kwargs.pop(name, None) is not None:
                raise ConfigError(f"compile({name}=...) was of TensorFlow 1. Leave it out: fit "
                                  "takes the targets, and each rank has one device.")
        before(self, *args, **{k: v for k, v in kwargs.items() if k not in _OF_COMPILE})
    return compile


def _generator(name: str) -> Callable[..., Any]:
    def method(self: Any, generator: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "fit" and not isinstance(generator, keras.utils.PyDataset):
            kwargs["shuffle"] = False  # it concerned a Sequence only, and Keras 3 warns
        order = _GENERATOR[name]
        if len(args) > len(order):
            raise ConfigError(f"{name}_generator takes {len(order) + 1} arguments by position. "
                              f"Received: {len(args) + 1}. Give the others by name.")
        if name != "fit":
            kwargs.setdefault("verbose", 0)
        return getattr(self, name)(generator, **dict(zip(order, args, strict=False)),
                                   **{_BY_GENERATOR: True}, **kwargs)
    method.__name__ = f"{name}_generator"
    return method


_GENERATOR = {
    "fit": ("steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data",
            "validation_steps"),
    "evaluate": ("steps",),
    "predict": ("steps",),
}
"""The arguments by position of `fit_generator` and so on, after the generator."""


def _predict_classes(self: Any, x: Any, batch_size: int | None = None, verbose: Any = 0,
                     **others: Any) -> np.ndarray:
    """The class of each sample: the largest output, or whether the only one is above 0.5."""
    found = np.asarray(self.predict(x, batch_size=batch_size, verbose=verbose, **others))
    return found.argmax(axis=-1) if found.shape[-1] > 1 else (found > 0.5).astype("int32")


def _metrics_names(self: Any) -> list[str]:
    """The names of what `evaluate` returns, in its order. Nothing is exchanged between ranks."""
    names: dict[str, Any] = {}
    for metric in self.metrics:
        result = metric.result() if getattr(metric, "built", True) else {}
        names |= result if isinstance(result, dict) else {metric.name: None}
    ordered = self._flatten_metrics_in_order({name: name for name in names})
    return ordered if isinstance(ordered, list) else [ordered]


def _reset_states(self: Any) -> None:
    """Set the states of all stateful layers to zero."""
    for layer in self._flatten_layers(include_self=False):
        if getattr(layer, "stateful", False) and hasattr(layer, "reset_state"):
            layer.reset_state()


def _add_weight(before: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """`add_weight` with its name as first argument by position."""
    @functools.wraps(before)
    def add_weight(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            kwargs |= dict(zip(names, args, strict=False))
            args = ()
        return before(self, *args, **kwargs)
    return add_weight


def _shape(name: str, layer: Any) -> Any:
    """`layer.output_shape` and `input_shape`: one shape, or a list of them."""
    found = getattr(layer, name)
    return [each.shape for each in found] if isinstance(found, (list, tuple)) else found.shape


def _layer_init(before: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(before)
    def __init__(self: Any, **kwargs: Any) -> None:  # Keras reads this signature: no `*args`
        if isinstance(self, keras.layers.BatchNormalization):
            for name in ("fused", "virtual_batch_size", "adjustment"):
                kwargs.pop(name, None)
        before(self, **kwargs)
    return __init__


def _checkpoint_init(before: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(before)
    def __init__(self: Any, filepath: Any, *args: Any, period: int = 1,
                 load_weights_on_restart: bool = False, options: Any = None,
                 **kwargs: Any) -> None:
        if load_weights_on_restart:
            raise ConfigError("ModelCheckpoint(load_weights_on_restart=True) is not in Keras 3. "
                              "Write model.load_weights(path) before fit, if the file exists.")
        bound = inspect.signature(before).bind(self, filepath, *args, **kwargs)
        path = os.fspath(filepath)
        if bound.arguments.get("save_weights_only") and not path.endswith(".weights.h5"):
            before(self, f"{path}.weights.h5", *args, **kwargs)  # what Keras 3 accepts
            self.filepath = path
        elif path.endswith((".h5", ".hdf5")) and not path.endswith(".weights.h5"):
            # The first only since Keras 3.8.
            before(self, f"{path}.keras", *args, **kwargs)
            self.filepath = path
        else:
            before(self, filepath, *args, **kwargs)
        self.period, self.epochs_since_last_save = period, 0
    return __init__


def _every_period(before: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(before)
    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        self.epochs_since_last_save = getattr(self, "epochs_since_last_save", 0) + 1
        if self.save_freq != "epoch" or self.epochs_since_last_save >= getattr(self, "period", 1):
            self.epochs_since_last_save = 0
            before(self, epoch, logs)
    return on_epoch_end


def _monitor_op(before: Callable[..., None]) -> Callable[..., None]:
    """A figure that Keras 3 does not know is minimized, except accuracies."""
    @functools.wraps(before)
    def _set_monitor_op(self: Any) -> None:
        try:
            before(self)
        except ValueError:
            up = "acc" in self.monitor or self.monitor.startswith(("fmeasure", "auc", "val_auc"))
            self.monitor_op = keras.ops.greater if up else keras.ops.less
            self.min_delta *= 1 if up else -1
    return _set_monitor_op


def _save_weights(before: Callable[..., None]) -> Callable[..., None]:
    """Weights in a file of any other name than Keras 3 takes: in Keras' older HDF5 format."""
    @functools.wraps(before)
    def save_weights(model: Any, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        if kwargs.get("max_shard_size") is not None or str(filepath).endswith(_OF_KERAS_3):
            before(model, filepath, overwrite, **kwargs)
            return
        if not overwrite and Path(filepath).exists():
            raise ConfigError(f"{filepath} is there already. Give another name, or overwrite=True.")
        import h5py
        from keras.src.legacy.saving import legacy_h5_format
        with h5py.File(filepath, "w") as file:
            legacy_h5_format.save_weights_to_hdf5_group(file, model)
    return save_weights


def _load_weights(before: Callable[..., None]) -> Callable[..., None]:
    """Weights from an HDF5 file of any name."""
    @functools.wraps(before)
    def load_weights(model: Any, filepath: Any, skip_mismatch: bool = False, *,
                     by_name: bool = False, **kwargs: Any) -> None:
        path = str(filepath)
        if path.endswith((*_OF_KERAS_3, ".h5", ".hdf5")) or not Path(path).is_file():
            if by_name:  # Keras 3 takes False as given
                kwargs["by_name"] = True
            before(model, filepath, skip_mismatch, **kwargs)
            return
        import h5py
        from keras.src.legacy.saving import legacy_h5_format as legacy
        with h5py.File(path, "r") as file:
            group = file if "layer_names" in file.attrs else file["model_weights"]
            read = (legacy.load_weights_from_hdf5_group_by_name if by_name
                    else legacy.load_weights_from_hdf5_group)
            read(group, model, **{"skip_mismatch": True} if skip_mismatch else {})
    return load_weights


def _latest_checkpoint(before: Callable[..., str | None]) -> Callable[..., str | None]:
    """The newest checkpoint of a folder, or the newest file that `save_weights` has made there."""
    @functools.wraps(before)
    def latest_checkpoint(checkpoint_dir: Any, latest_filename: str | None = None) -> str | None:
        found = before(checkpoint_dir, latest_filename)
        folder = Path(checkpoint_dir)
        if found is not None or latest_filename is not None or not folder.is_dir():
            return found
        import h5py
        files = [path for path in folder.iterdir() if path.is_file() and h5py.is_hdf5(path)]
        return str(max(files, key=lambda path: (path.stat().st_mtime_ns, path.name))
                   ) if files else None
    return latest_checkpoint


def _load_model(before: Callable[..., Any]) -> Callable[..., Any]:
    """A whole model from an HDF5 file, with the optimizer's state: it can be trained further.

    Keras 3 builds the optimizer for no variable at all, and forgets its state.
    """
    @functools.wraps(before)
    def load_model_from_hdf5(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        model = before(filepath, *args, **kwargs)
        optimizer = getattr(model, "optimizer", None)
        leaf = getattr(optimizer, "inner_optimizer", optimizer)
        if leaf is not None and leaf.built and not leaf._trainable_variables:
            leaf.built = False
            leaf.build(model.trainable_variables)
            _restore(optimizer, filepath)
        return model
    return load_model_from_hdf5


def _restore(optimizer: Any, filepath: Any) -> None:
    import h5py
    from keras.src.legacy.saving import legacy_h5_format
    with filepath if isinstance(filepath, h5py.File) else h5py.File(filepath, "r") as file:
        values = legacy_h5_format.load_optimizer_weights_from_hdf5_group(file)
        if [np.shape(value) for value in values] != [v.shape for v in optimizer.variables]:
            get_logger().warning("%s holds the state of another optimizer than the model's: its "
                                 "state begins anew.", getattr(filepath, "filename", filepath))
            return
        optimizer.set_weights(values)

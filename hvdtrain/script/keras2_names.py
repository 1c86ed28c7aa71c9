"""Names and modules that Keras 3 has removed: `K.set_value`, `keras.engine`, `legacy.Adam`."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.errors import ConfigError
from hvdtrain.script.keras2 import MODULES

Put = Callable[[Any, str, Any], None]
_TOPS = ("keras", "keras._tf_keras.keras", "tensorflow.keras")
"""Keras' packages: each has module objects of its own."""
_FILLED = ("backend", "losses", "metrics", "layers", "preprocessing", "preprocessing.image",
           "preprocessing.sequence", "preprocessing.text")
"""Modules of which `keras` and `tf.keras` have different names."""


def install(put: Put) -> None:
    """Add what is missing, in `keras` and in `tf.keras`."""
    for name in (*_FILLED, "utils", "optimizers", "optimizers.legacy", "optimizers.schedules",
                 "callbacks", "mixed_precision"):
        for top in _TOPS:
            _module(f"{top}.{name}")
    for name in _FILLED:
        _fill(put, name)
    for top in _TOPS:
        _add_names(put, top)
        for name in sorted(MODULES):
            _add_module(put, top, name)
    _add_sessions(put)
    private: Any = sys.modules.get("tensorflow.python.keras.engine.training")
    if private is not None:  # TensorFlow imports it itself
        put(private.Model, "fit", _refuse_private)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _fill(put: Put, name: str) -> None:
    """Give each of Keras' packages the public names that another one has."""
    modules = [_module(f"{top}.{name}") for top in _TOPS]
    everything = {key: value for module in modules if module is not None
                  for key, value in vars(module).items() if not key.startswith("_")}
    for top, module in zip(_TOPS, modules, strict=True):
        if module is None:
            module = types.ModuleType(f"{top}.{name}")
            _register(put, top, name, module)
        for key, value in everything.items():
            if key not in vars(module):
                put(module, key, value)


def _add_names(put: Put, top: str) -> None:
    layers, utils = _module(f"{top}.layers"), _module(f"{top}.utils")
    names: dict[Any, dict[str, Any]] = {
        layers: {"CuDNNLSTM": keras.layers.LSTM, "CuDNNGRU": keras.layers.GRU},
        utils: {"multi_gpu_model": lambda model, *_, **__: model},
        _module(f"{top}.losses"): {"cosine_proximity": keras.losses.cosine_similarity},
        _module(f"{top}.backend"): {
            "get_session": _no_session, "set_session": lambda session: None,
            "learning_phase": _no_phase, "set_learning_phase": _no_phase,
            "function": _no_function},
    }
    for module, values in names.items():
        for key, value in values.items():
            if key not in vars(module):
                put(module, key, value)
    put(_module(f"{top}.backend"), "set_value", set_value)
    legacy = _module(f"{top}.optimizers.legacy")
    for key, value in vars(keras.optimizers).items():
        if isinstance(value, type) and issubclass(value, keras.optimizers.Optimizer):
            put(legacy, key, value)


def _add_module(put: Put, top: str, name: str) -> None:
    """Let a module that Keras 3 does not have be the one that has its names."""
    if _module(f"{top}.{name}") is not None:
        return
    if name == "mixed_precision.experimental":
        module: Any = types.ModuleType(f"{top}.{name}")
        vars(module).update(vars(keras.mixed_precision) | {
            "set_policy": keras.mixed_precision.set_global_policy,
            "global_policy": keras.mixed_precision.dtype_policy})
    else:
        module = _module(f"{top}.{_NOW.get(name, name.partition('.')[0])}".rstrip("."))
    _register(put, top, name, module)
    if name == "layers.experimental":
        _register(put, top, f"{name}.preprocessing", module)
    elif name == "engine":
        for part in ("base_layer", "input_layer", "network", "sequential", "topology", "training"):
            _register(put, top, f"{name}.{part}", module)


_NOW = {"objectives": "losses", "engine": "", "experimental": "optimizers.schedules"}
"""The module with the names of a removed one, where it is not the package that held it."""


def _register(put: Put, top: str, name: str, module: Any) -> None:
    parent, _, last = f"{top}.{name}".rpartition(".")
    put(_Modules(sys.modules), f"{top}.{name}", module)
    owner = sys.modules[parent]
    if last not in vars(owner):
        put(owner, last, module)


class _Modules:
    """`sys.modules` as an object whose attributes are its entries."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self.__dict__ = entries


def set_value(x: Any, value: Any) -> None:
    """`K.set_value`: set a variable, such as `model.optimizer.lr`.

    Args:
        x: A variable of Keras or TensorFlow.
        value: A number or an array of its shape.

    Raises:
        ConfigError: It is not a variable.
    """
    if not hasattr(x, "assign"):
        raise ConfigError(
            f"K.set_value takes a variable. Received: {x!r} of type {type(x).__name__}. If it is "
            "the learning rate of an optimizer that was made with a schedule: make it with a "
            "number, Adam(learning_rate=0.001). A number is set as an attribute: "
            "optimizer.momentum = 0.9, before compile.")
    x.assign(np.asarray(value, dtype=tf.as_dtype(x.dtype).as_numpy_dtype))


def _no_session(*_: Any, **__: Any) -> Any:
    raise ConfigError("K.get_session: TensorFlow 2 has no sessions. A variable's value is "
                      "K.get_value(variable); a layer's output is that of keras.Model(inputs, "
                      "outputs).predict(x).")


def _no_phase(*_: Any, **__: Any) -> Any:
    raise ConfigError("Keras 3 has no learning phase. Write model(x, training=True) or "
                      "training=False; fit, evaluate and predict give it themselves.")


def _no_function(*_: Any, **__: Any) -> Any:
    raise ConfigError("Keras 3 has no K.function(inputs, outputs). Write keras.Model(inputs, "
                      "outputs), and call its predict.")


def _refuse_private(*_: Any, **__: Any) -> Any:
    raise ConfigError(
        "The model is of tensorflow.python.keras, TensorFlow's private copy of Keras 2: each rank "
        "would train alone. Import from tensorflow.keras in place of tensorflow.python.keras.")


def _add_sessions(put: Put) -> None:
    """The device pinning of Horovod scripts for TensorFlow 1: it has no effect."""
    v1: Any = tf.compat.v1

    class Session(v1.Session):  # type: ignore[misc]
        """A session of TensorFlow 1; one that was made to choose a device chooses none."""

        def __new__(cls, target: str = "", graph: Any = None, config: Any = None) -> Any:
            # In a process that has its devices, this session would take them once more.
            if graph is None and config is not None and config.HasField("gpu_options"):
                return _DeviceChoice()
            return super().__new__(cls)

    for module in {id(m): m for m in (v1, sys.modules.get("tensorflow.compat.v1")) if m}.values():
        put(module, "Session", Session)
        for name in ("disable_eager_execution", "disable_v2_behavior"):
            put(module, name, lambda: None)
    for name, value in {
            "Session": Session, "ConfigProto": v1.ConfigProto, "GPUOptions": v1.GPUOptions,
            "set_random_seed": tf.random.set_seed,
            "enable_eager_execution": lambda *_, **__: None}.items():
        if name not in vars(tf):
            put(tf, name, value)


class _DeviceChoice:
    """A session that was made to choose a device; each rank has its own already."""

    def __enter__(self) -> _DeviceChoice:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        """Nothing was opened."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"Session.{name}: TensorFlow 2 has no graph that a session runs. Keras 3 "
                          "runs models by fit, evaluate, predict or a call.")

"""Idioms of Keras 2 in a user's script: served on Keras 3, or refused with the line to write.

`install` patches Keras for this process: names and modules (`keras2_names`), optimizers
(`keras2_optimizers`), models, callbacks and files (`keras2_models`). What Keras 3 still serves is
left alone. `remark` says, without running anything, what is done with a line of a script.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

_installed: list[Callable[[], None]] = []

_OPTIMIZERS = ("SGD", "Adam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl")
_GENERATORS = ("fit_generator", "evaluate_generator", "predict_generator")
_LOADING = ("workers", "use_multiprocessing", "max_queue_size")
_OF_DATASET = "`{}` is that of the `Sequence`; other data are read as Keras 3 does"
_CALLS = {
    **{(optimizer, "lr"): "`lr` is the optimizer's `learning_rate`" for optimizer in _OPTIMIZERS},
    **{(optimizer, "decay"): "`decay`: the rate is learning_rate / (1 + decay * iterations)"
       for optimizer in _OPTIMIZERS},
    **{(method, word): _OF_DATASET.format(word)
       for method in ("fit", "evaluate", "predict", *_GENERATORS) for word in _LOADING},
    ("compile", "experimental_run_tf_function"): "`experimental_run_tf_function` has no effect",
    ("compile", "sample_weight_mode"): "`sample_weight_mode` has no effect: the weights' shape "
                                       "says it",
    ("ModelCheckpoint", "period"): "`period`: saved every so many epochs",
    ("TensorBoard", "batch_size"): "`batch_size` has no effect",
    ("TensorBoard", "write_grads"): "`write_grads` has no effect",
    ("BatchNormalization", "fused"): "`fused` has no effect",
}
"""What is done with an argument, by the name of the function or class and that of the argument."""
_METHODS = {
    "fit_generator": "`fit`",
    "evaluate_generator": "`evaluate`",
    "predict_generator": "`predict`",
    "predict_classes": "the classes of `predict`",
    "predict_proba": "`predict`",
    "multi_gpu_model": "the model as it is: each rank has its own GPU",
    "set_session": "no effect: each rank sees its own device only",
    "get_scaled_loss": "refused: write `scale_loss`",
    "get_unscaled_gradients": "refused: `apply_gradients` divides by the loss scale itself",
    "set_learning_phase": "refused: write `model(x, training=...)`",
    "learning_phase": "refused: write `model(x, training=...)`",
    "CuDNNLSTM": "`LSTM`, which uses CuDNN where it can",
    "CuDNNGRU": "`GRU`, which uses CuDNN where it can",
    "disable_eager_execution": "no effect: Keras 3 compiles with `tf.function`",
    "disable_v2_behavior": "no effect: Keras 3 compiles with `tf.function`",
    "reset_states": "`reset_state`",
}
"""What is called in its place, by the name of a method or function."""
_SEED = "seeds no weights of Keras 3: write `keras.utils.set_random_seed`"
_ATTRIBUTES = {
    ("optimizer", "lr"): "`lr` is the optimizer's `learning_rate`",
    ("opt", "lr"): "`lr` is the optimizer's `learning_rate`",
    ("optimizers", "legacy"): "the optimizers of Keras 3; RMSprop and Adagrad add epsilon under "
                              "the root",
    ("keras", "experimental"): "`keras.optimizers.schedules`",
    ("layers", "experimental"): "`keras.layers`",
    ("mixed_precision", "experimental"): "`keras.mixed_precision`",
    ("random", "set_seed"): _SEED,
    ("tf", "set_random_seed"): _SEED,
    ("v1", "set_random_seed"): _SEED,
    ("tf", "ConfigProto"): "`tf.compat.v1.ConfigProto`",
    ("tf", "Session"): "`tf.compat.v1.Session`; to choose a device it has no effect",
}
"""What an attribute is, by the last name before it and its own."""
_PRIVATE = "tensorflow.python.keras"


def install() -> Callable[[], None]:
    """Serve the idioms of Keras 2 in this process.

    It wraps the methods that Keras' classes have now: call it after what else replaces them.

    Returns:
        A function that reverts it; the same one if it is installed already.
    """
    if not _installed:
        from hvdtrain.script import keras2_models, keras2_names, keras2_optimizers
        from hvdtrain.script.inside import replace_attribute
        with ExitStack() as stack:
            def put(owner: Any, name: str, value: Any) -> None:
                stack.callback(replace_attribute(owner, name, value))

            for part in (keras2_optimizers, keras2_models, keras2_names):
                part.install(put)
            _installed.append(stack.pop_all().close)
    return _undo


def _undo() -> None:
    while _installed:
        _installed.pop()()


def remark(node: ast.AST) -> str | None:
    """What is done with an idiom of Keras 2.

    Args:
        node: One node of the syntax tree of a script.

    Returns:
        A short clause, or None where the node is none of these idioms.
    """
    return "; ".join(dict.fromkeys(_remarks(node))) or None


def _remarks(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.Attribute):
        owner = _last_name(node.value).lower()
        for (name, attribute), text in _ATTRIBUTES.items():
            if attribute == node.attr and (owner == name or owner.endswith(f"_{name}")):
                yield text
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield from _of_module(alias.name)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from _of_module(node.module)
        for alias in node.names:
            yield from _of_module(f"{node.module}.{alias.name}")


def _of_call(call: ast.Call) -> Iterator[str]:
    name = _last_name(call.func)
    given = {word.arg: word.value for word in call.keywords if word.arg}
    if name in _METHODS and (name != "reset_states" or isinstance(call.func, ast.Attribute)):
        yield f"{name}: {_METHODS[name]}"
    for word in given:
        if (name, word) in _CALLS:
            yield _CALLS[name, word]
    for word in ("steps_per_epoch", "validation_steps", "steps"):
        if word in given and _is_quotient(given[word]):
            yield f"`{word}` is rounded up"
    first = next(iter(call.args), given.get("filepath"))
    if name in ("save_weights", "ModelCheckpoint") and isinstance(first, ast.Constant):
        path = str(first.value)
        weights = name == "save_weights" or _is_true(given.get("save_weights_only"))
        if weights and not path.endswith((".weights.h5", ".weights.json")):
            yield "an HDF5 file with the weights, in the format of Keras 2"
        elif not weights and not path.endswith((".keras", ".h5", ".hdf5")):
            yield "refused: write a path with .keras, or model.export(path) for a SavedModel"


def _of_module(name: str) -> Iterator[str]:
    if name == _PRIVATE or name.startswith(f"{_PRIVATE}."):
        yield "refused: TensorFlow's private copy of Keras 2. Write tensorflow.keras"
        return
    parts = name.split(".")
    if parts[0] == "tensorflow":
        parts = parts[1:]
    if parts[:1] != ["keras"]:
        return
    for place, text in MODULES.items():
        if ".".join(parts[1:]) == place or ".".join(parts[1:]).startswith(f"{place}."):
            yield f"{'.'.join(['keras', place])}: {text}"
            return


MODULES = {
    **{f"layers.{part}": "`keras.layers`" for part in (
        "core", "convolutional", "pooling", "normalization", "embeddings", "recurrent", "merge",
        "advanced_activations", "wrappers", "noise", "experimental")},
    **{f"utils.{part}": "`keras.utils`" for part in (
        "np_utils", "generic_utils", "vis_utils", "data_utils", "layer_utils", "training_utils",
        "multi_gpu_utils", "io_utils")},
    "callbacks.callbacks": "`keras.callbacks`",
    "callbacks.experimental": "`keras.callbacks`",
    "objectives": "`keras.losses`",
    "backend.tensorflow_backend": "`keras.backend`",
    "engine": "`keras`",
    "optimizers.legacy": _ATTRIBUTES["optimizers", "legacy"],
    "optimizers.experimental": "`keras.optimizers`",
    "experimental": _ATTRIBUTES["keras", "experimental"],
    "mixed_precision.experimental": "`keras.mixed_precision`",
}
"""What stands for a module that Keras 3 does not have, by its name within `keras`."""


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_quotient(node: ast.expr) -> bool:
    """Whether a value is a division by `/`, or a float."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Div) or (
            not isinstance(node.op, ast.FloorDiv)
            and (_is_quotient(node.left) or _is_quotient(node.right)))
    return isinstance(node, ast.Constant) and isinstance(node.value, float)


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True

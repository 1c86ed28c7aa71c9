"""The private parts of Keras' models, losses and layers; those of optimizers: `keras_seam`."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.data.source import tensors_of
from hvdtrain.errors import ConfigError, OptimizerError
from hvdtrain.optim.keras_seam import (
    Hidden,
    check_keras,
    hooked,
    leaf_optimizers,
    set_on_instance,
    variable_key,
)

MOMENTS = "_moments"
"""The method of `BatchNormalization` that computes mean and variance of a batch."""
_TRAINED = "_hvdtrain_trained"
_AFTER_BUILD = "_hvdtrain_after_build"


@contextmanager
def trainable_as_compiled(model: Any) -> Iterator[None]:
    """Within it, variables are trainable as they were when the model was first trained."""
    # Keras keeps the traced step, whatever is frozen later, until the next `compile`.
    compiled = getattr(model, "_loss_tracker", None)
    if compiled is None:  # a `compile` of the model's own, which leaves no trace
        yield
        return
    parts = [*((layer, "_trainable") for layer in model._flatten_layers()),
             *((variable, "trainable") for variable in model.variables)]
    now = [(part, name, getattr(part, name)) for part, name in parts]
    known = model.__dict__.get(_TRAINED)
    if known is None or known.value[0] is not compiled:
        known = Hidden((compiled, now))
        set_on_instance(model, _TRAINED, known)
    changed = [(then, after) for then, after in zip(known.value[1], now, strict=False)
               if then[0] is after[0] and then[2] != after[2]]
    with ExitStack() as undo:
        for then, after in changed:
            undo.callback(setattr, *after)
            setattr(*then)
        yield


@contextmanager
def compiled_settings_kept(model: Any) -> Iterator[None]:
    """Restore `jit_compile` and `steps_per_execution` as the user compiled them at the end."""
    with ExitStack() as undo:
        for name in ("jit_compile", "steps_per_execution"):
            if (value := getattr(model, name, None)) is not None:
                undo.callback(setattr, model, name, value)
        yield


def learned_weights(model: Any) -> list[Any]:
    """The weights that gradients update, or would if they were not frozen."""
    return [v for layer in model._flatten_layers() for v in layer._trainable_variables]


def weights_key(model: Any) -> tuple[str | None, ...]:
    """What changes if a model gets other weights, as by `quantize` or a new layer."""
    return tuple(map(variable_key, model.weights))


def metrics_are_built(model: Any) -> bool:
    """Whether the compiled metrics have their variables."""
    parts = [model._compile_metrics, model._compile_loss]
    return all(part is None or part.built for part in parts)


def build_metrics(model: Any, batch: Any) -> None:
    """Create compiled metrics' variables from samples as `train_step` gets them (arrays)."""
    batch = tensors_of(batch)
    size = fixed_batch(model)
    if size is not None:
        batch = tf.nest.map_structure(
            lambda t: None if t is None else tf.repeat(t[:1], size, axis=0), batch)
    model._symbolic_build(data_batch=batch)


def has_own_step(model: Any) -> bool:
    """Whether a model overrides the training or test step."""
    return any(getattr(type(model), name) is not getattr(keras.Model, name)
               for name in ("train_step", "test_step"))


def fixed_batch(model: Any) -> int | None:
    """The batch size of a model that takes one only, as stateful ones do; else None."""
    # A Sequential that was built by its first batch has its size, and takes others all the same.
    if isinstance(model, keras.Sequential) and not any(
            getattr(layer, "stateful", False) for layer in model._flatten_layers()):
        return None
    return next((int(tensor.shape[0]) for tensor in _inputs(model)
                 if len(tensor.shape) and tensor.shape[0] is not None), None)


def only_input_shape(model: Any) -> tuple[int | None, ...] | None:
    """The shape of a model's only input, with the batch axis, where it is known."""
    inputs = _inputs(model)
    return tuple(inputs[0].shape) if len(inputs) == 1 else None


def _inputs(model: Any) -> list[Any]:
    return list(getattr(model, "inputs", None) or []) if model.built else []


def trace_train_step(model: Any, batch: Any) -> None:
    """Create a model's variables by tracing its `train_step` with samples, without running it."""
    def spec(value: Any) -> Any:
        found = tf.type_spec_from_value(value)
        return (tf.TensorSpec([None, *found.shape[1:]], found.dtype)
                if isinstance(found, tf.TensorSpec) else found)
    specs = tf.nest.map_structure(spec, tensors_of(batch))
    tf.function(model.train_step).get_concrete_function(specs)
    model.built = True  # or Keras warns that its files may hold no weights


def leaf_metrics(model: Any) -> list[Any]:
    """All metrics of a model without duplicates, with those inside `CompileMetrics`."""
    found: dict[int, Any] = {}
    for metric in model.metrics:
        for leaf in getattr(metric, "metrics", None) or [metric]:
            found.setdefault(id(leaf), leaf)
    return list(found.values())


@contextmanager
def losses_by_samples(model: Any) -> Iterator[None]:
    """Average output losses over samples; Keras does so only if batch sizes are known before."""
    compiled, samples = getattr(model, "_compile_loss", None), None

    def call(original: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        nonlocal samples
        first = keras.tree.flatten(y_pred)[0]
        samples = tf.shape(first)[0] if len(first.shape) else None
        return original(y_true, y_pred, sample_weight)
    with ExitStack() as undo:
        if compiled is not None:
            undo.enter_context(hooked(compiled, call=call))
            _once_built(compiled, lambda: undo.enter_context(
                _updates_weighted(compiled.metrics, lambda _: samples)))
        yield


@contextmanager
def _updates_weighted(metrics: Iterable[Any],
                      weight_of: Callable[[Any], Any]) -> Iterator[None]:
    def update_state(original: Any, values: Any, sample_weight: Any = None) -> Any:
        return original(values, weight_of(values) if sample_weight is None else sample_weight)
    with ExitStack() as undo:
        for metric in metrics:
            undo.enter_context(hooked(metric, update_state=update_state))
        yield


def means_weighted(model: Any, weight: Any | None) -> AbstractContextManager[None]:
    """Within it, a mean updated with one number for a batch weights it (None: does not)."""
    # A custom `train_step` updates a `keras.metrics.Mean` with the loss of its batch; where batches
    # differ in size between ranks, that gives the loss of one process only if weighted by samples.
    means = [] if weight is None else [
        metric for metric in model.metrics if isinstance(metric, keras.metrics.Mean)
        and not isinstance(metric, keras.metrics.MeanMetricWrapper)
        and "update_state" not in vars(metric)]  # else it is weighted by samples already
    return _updates_weighted(means, lambda values: (
        None if len(tf.convert_to_tensor(values).shape) else weight))


def _once_built(compiled: Any, work: Callable[[], Any]) -> None:
    """Call `work` now, or once a `CompileLoss` that is not built yet is built."""
    if compiled.built:
        work()
        return
    waiting = compiled.__dict__.get(_AFTER_BUILD)
    if waiting is not None:
        waiting.value.append(work)
        return
    set_on_instance(compiled, _AFTER_BUILD, Hidden([work]))

    def built(original: Any, y_true: Any, y_pred: Any) -> None:
        original(y_true, y_pred)
        undo.close()
        for each in compiled.__dict__.pop(_AFTER_BUILD).value:
            each()
    undo = ExitStack()
    undo.enter_context(hooked(compiled, build=built))


def replace_losses(compiled: Any, make: Callable[[int, Any], Any]) -> None:
    """Replace each loss of a `CompileLoss` by `make(index, loss)`, now or once it is built."""
    def replace() -> None:  # files do not change: they hold what was given to `compile`
        compiled._flat_losses = [entry._replace(loss=make(number, entry.loss))
                                 for number, entry in enumerate(compiled._flat_losses)]
    _once_built(compiled, replace)


def pythonify_logs(logs: Any) -> dict[str, Any]:
    """Logs as plain numbers, sorted by name, as Keras passes them to callbacks."""
    found: dict[str, Any] = {}
    for name, value in sorted((logs or {}).items()):
        if isinstance(value, dict):
            found |= pythonify_logs(value)
            continue
        found[name] = value
        with suppress(TypeError, ValueError):
            found[name] = float(value)
    return found


def save_to_memory(model: Any, file: io.BytesIO) -> None:
    """Write the `.keras` file of a model into memory."""
    from keras.src.saving import saving_lib
    saving_lib.save_model(model, file)


def states_of_samples(model: Any) -> list[Any]:
    """What stateful layers keep of the samples of the last batch: each rank has its own."""
    return [v for layer in model._flatten_layers() if getattr(layer, "stateful", False)
            for v in keras.tree.flatten(getattr(layer, "states", None) or [])
            if hasattr(v, "assign")]


def check_batch_normalization() -> None:
    """Refuse a Keras whose batch normalization does not compute its moments in one method."""
    check_keras()
    cls = keras.layers.BatchNormalization
    method = getattr(cls, MOMENTS, None)
    found = list(inspect.signature(method).parameters)[1:] if method else None
    called = MOMENTS in inspect.unwrap(cls.call).__code__.co_names
    if found != ["inputs", "mask"] or not called:
        raise OptimizerError(
            f"Keras {keras.__version__}: BatchNormalization.call was expected to use "
            f"{MOMENTS}(inputs, mask), found {'nothing' if found is None else found}. This Keras "
            "is not known to hvdtrain; leave sync_batch_norm out, or install another.")


def batch_normalizations(model: Any) -> list[Any]:
    """The batch normalizations of a model and its submodels, except those that override moments."""
    cls = keras.layers.BatchNormalization
    found = [layer for layer in model._flatten_layers() if isinstance(layer, cls)]
    for layer in found:
        if getattr(type(layer), MOMENTS) is not getattr(cls, MOMENTS):
            raise OptimizerError(
                f"The layer `{layer.name}` ({type(layer).__name__}) computes its moments in its "
                f"own way ({MOMENTS}), so it cannot be synchronized over ranks. Use a "
                "keras.layers.BatchNormalization, or leave sync_batch_norm out.")
    return found


@contextmanager
def split_step(model: Any) -> Iterator[None]:
    """Within it, both halves of training steps are compiled by XLA. All ranks."""
    # Before the train function is made.
    # The collectives have no XLA kernel, so a step cannot be compiled as a whole, but its halves
    # can: the forward and backward pass up to the gradients, and the update from the reduced
    # gradients.
    if type(model).train_step is not keras.Model.train_step:
        raise ConfigError(
            f"xla=True compiles the train_step of Keras, but {type(model).__name__} has one of its "
            "own. Leave xla out, and decorate the parts of your train_step that hold no "
            "optimizer.apply with @tf.function(jit_compile=True).")
    with ExitStack() as undo:
        undo.callback(setattr, model, "train_function", None)  # traced again
        undo.enter_context(hooked(model, train_step=partial(_split_train_step, model)))
        for leaf in leaf_optimizers(model.optimizer):
            undo.enter_context(hooked(leaf, _backend_update_step=_compiled_update))
        yield


def _compiled_update(update: Any, grads: Any, variables: Any, learning_rate: Any) -> None:
    # A function of its own for each trace: it captures tensors of the graph that is traced.
    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
    def compiled(grads: Any, learning_rate: Any) -> None:
        update(grads, variables, learning_rate)
    compiled(list(grads), tf.convert_to_tensor(learning_rate))


def _split_train_step(model: Any, _: Any, data: Any) -> Any:
    optimizer, trained = model.optimizer, model.trainable_weights
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
    def compiled(x: Any, y: Any, sample_weight: Any) -> Any:
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight,
                                       training=True)
            scaled = optimizer.scale_loss(loss)
        return loss, y_pred, tape.gradient(scaled, trained)

    loss, y_pred, gradients = compiled(x, y, sample_weight)
    samples = tf.shape(next(i for i in tf.nest.flatten(x) if i is not None))[0]
    model._loss_tracker.update_state(loss, sample_weight=samples)
    optimizer.apply_gradients(zip(gradients, trained, strict=True))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

"""The private parts of Keras' models, losses and layers that hvdtrain leans on.

Those of optimizers are in `optim.keras_seam`; nothing else of hvdtrain uses private Keras.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import OptimizerError
from hvdtrain.optim.keras_seam import Hidden, check_keras, restore_method, set_on_instance

MOMENTS = "_moments"
"""The method of `BatchNormalization` that computes mean and variance of a batch."""
_TRAINED = "_hvdtrain_trained"
_AFTER_BUILD = "_hvdtrain_after_build"


@contextmanager
def trainable_as_compiled(model: Any) -> Iterator[None]:
    """While it is entered, what is trained is what was when the model was first trained.

    That is since `compile`: Keras keeps the step that it has traced, whatever is made trainable
    or frozen later, until the model is compiled again.
    """
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
    try:
        for (part, name, value), _ in changed:
            setattr(part, name, value)
        yield
    finally:
        for _, (part, name, value) in changed:
            setattr(part, name, value)


@contextmanager
def compiled_settings_kept(model: Any) -> Iterator[None]:
    """At the end `jit_compile` and `steps_per_execution` are as the user compiled them."""
    kept = [(name, getattr(model, name, None)) for name in ("jit_compile", "steps_per_execution")]
    try:
        yield
    finally:
        for name, value in kept:
            if value is not None:
                setattr(model, name, value)


def forget_train_function(model: Any) -> None:
    """Let Keras trace the training step anew."""
    model.train_function = None


def metrics_are_built(model: Any) -> bool:
    """Whether the compiled metrics have their states."""
    parts = [model._compile_metrics, model._compile_loss]
    return all(part is None or part.built for part in parts)


def build_metrics(model: Any, batch: Any) -> None:
    """Create the states of compiled metrics, which Keras leaves to the first step.

    Args:
        model: A compiled model.
        batch: Some samples, as `train_step` gets them: arrays `x`, `(x, y)` or
            `(x, y, sample_weight)`.
    """
    batch = tensors_of(batch)
    size = fixed_batch(model)
    if size is not None:
        batch = tf.nest.map_structure(
            lambda t: None if t is None else tf.repeat(t[:1], size, axis=0), batch)
    model._symbolic_build(data_batch=batch)


def tensors_of(batch: Any) -> Any:
    """Arrays as tensors; ragged and sparse tensors, and None, stay as they are."""
    def tensor(value: Any) -> Any:
        kept = value is None or isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
        return value if kept else tf.convert_to_tensor(value)
    return tf.nest.map_structure(tensor, batch)


def has_call(model: Any) -> bool:
    """Whether a model can be called."""
    return type(model).call is not keras.Layer.call and type(model).call is not keras.Model.call


def has_own_step(model: Any) -> bool:
    """Whether a model brings a training or test step of its own."""
    return any(getattr(type(model), name) is not getattr(keras.Model, name)
               for name in ("train_step", "test_step"))


def fixed_batch(model: Any) -> int | None:
    """The size of the batches of a model that takes one only, as stateful ones do; else None."""
    inputs = getattr(model, "inputs", None) if model.built else None
    return next((int(tensor.shape[0]) for tensor in inputs or []
                 if len(tensor.shape) and tensor.shape[0] is not None), None)


def only_input_shape(model: Any) -> tuple[int | None, ...] | None:
    """The shape of the input of a model that is known to have one, with the batch axis."""
    inputs = getattr(model, "inputs", None) if model.built else None
    return tuple(inputs[0].shape) if inputs and len(inputs) == 1 else None


def trace_train_step(model: Any, batch: Any) -> None:
    """Let a model's `train_step` create its variables; it is traced, and not run.

    Args:
        model: A compiled model.
        batch: Some samples, as `build_metrics` takes them.
    """
    def spec(value: Any) -> Any:
        found = tf.type_spec_from_value(value)
        return (tf.TensorSpec([None, *found.shape[1:]], found.dtype)
                if isinstance(found, tf.TensorSpec) else found)
    specs = tf.nest.map_structure(spec, tensors_of(batch))
    tf.function(model.train_step).get_concrete_function(specs)
    model.built = True  # or Keras warns that its files may hold no weights


def call_in_training(model: Any, x: Any) -> Any:
    """The forward pass of a training step."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def leaf_metrics(model: Any) -> list[Any]:
    """The metrics of a model, those given to `compile` one by one, without duplicates."""
    found: dict[int, Any] = {}
    for metric in model.metrics:
        for leaf in getattr(metric, "metrics", None) or [metric]:
            found.setdefault(id(leaf), leaf)
    return list(found.values())


def names_of_figures(model: Any) -> set[str]:
    """The names of the figures that the model's metrics give."""
    found: set[str] = set()
    for metric in model.metrics:
        result = metric.result()
        found |= set(result) if isinstance(result, dict) else {metric.name}
    return found


def mask_of(tensor: Any) -> Any | None:
    """The mask that layers or losses have put on a tensor."""
    from keras.src import backend
    return backend.get_keras_mask(tensor)


def sum_of_weights(sample_weight: Any | None, mask: Any | None, dtype: Any) -> Any:
    """The denominator of the reduction `mean_with_sample_weight`."""
    from keras.src.losses.loss import apply_mask
    weight = None if sample_weight is None else tf.cast(sample_weight, dtype)
    return tf.reduce_sum(apply_mask(weight, mask, dtype, "mean_with_sample_weight"))


def weight_losses_by_samples(compiled: Any) -> Callable[[], None]:
    """Weight what a `CompileLoss` records of each output by the samples of the batch.

    Returns:
        A function that undoes it.
    """
    call, originals = compiled.call, dict[int, tuple[Any, Any]]()
    samples: Any = None

    def weight(metrics: Iterable[Any]) -> None:
        for metric in metrics:
            originals[id(metric)] = metric, metric.update_state
            set_on_instance(metric, "update_state", weighted(metric.update_state))

    def weighted(update: Callable[..., Any]) -> Callable[..., Any]:
        def update_state(values: Any, sample_weight: Any = None) -> Any:
            return update(values, samples if sample_weight is None else sample_weight)
        return update_state

    def counting(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        nonlocal samples
        first = keras.tree.flatten(y_pred)[0]
        samples = tf.shape(first)[0] if len(first.shape) else None
        return call(y_true, y_pred, sample_weight)

    def undo() -> None:
        restore_method(compiled, "call", call)
        for metric, update in originals.values():
            restore_method(metric, "update_state", update)
    set_on_instance(compiled, "call", counting)
    _once_built(compiled, lambda: weight(compiled.metrics))
    return undo


@contextmanager
def means_weighted(model: Any, weight: Any | None) -> Iterator[None]:
    """While it is entered, a mean that is told one number for a batch weights it.

    A `train_step` of the model's own tells a `keras.metrics.Mean` the loss of its batch; with
    batches of different sizes on the ranks that is the loss of one process only if each counts by
    its samples.

    Args:
        model: The model.
        weight: Float32 scalar tensor, the weight of the batch; None for none.
    """
    means = [] if weight is None else [
        metric for metric in model.metrics if isinstance(metric, keras.metrics.Mean)
        and not isinstance(metric, keras.metrics.MeanMetricWrapper)
        and "update_state" not in vars(metric)]  # else it is weighted by samples already
    originals = [(metric, metric.update_state) for metric in means]

    def weighted(update: Callable[..., Any]) -> Callable[..., Any]:
        def update_state(values: Any, sample_weight: Any = None) -> Any:
            if sample_weight is None and not len(tf.convert_to_tensor(values).shape):
                sample_weight = weight
            return update(values, sample_weight)
        return update_state
    for metric, update in originals:
        set_on_instance(metric, "update_state", weighted(update))
    try:
        yield
    finally:
        for metric, update in originals:
            restore_method(metric, "update_state", update)


def _once_built(compiled: Any, work: Callable[[], Any]) -> None:
    """Do it now, or when a `CompileLoss` that is not built yet has been built."""
    if compiled.built:
        work()
        return
    waiting = compiled.__dict__.get(_AFTER_BUILD)
    if waiting is not None:
        waiting.value.append(work)
        return
    build = compiled.build
    set_on_instance(compiled, _AFTER_BUILD, Hidden([work]))

    def built(y_true: Any, y_pred: Any) -> None:
        build(y_true, y_pred)
        restore_method(compiled, "build", build)
        for each in compiled.__dict__.pop(_AFTER_BUILD).value:
            each()
    set_on_instance(compiled, "build", built)


def replace_losses(compiled: Any, make: Callable[[int, Any], Any]) -> None:
    """Replace each loss of a `CompileLoss` by `make(its number, it)`, now or once it is built.

    What is saved with a model is what was given to `compile`, so that files do not change.
    """
    def replace() -> None:
        compiled._flat_losses = [entry._replace(loss=make(number, entry.loss))
                                 for number, entry in enumerate(compiled._flat_losses)]
    _once_built(compiled, replace)


def pythonify_logs(logs: Any) -> dict[str, Any]:
    """Figures as plain numbers, sorted by name, as Keras gives them to callbacks."""
    from keras.src.utils import python_utils
    return dict(python_utils.pythonify_logs(logs))


def is_of_keras(obj: Any) -> bool:
    """Whether the class of an object is Keras' own."""
    return type(obj).__module__.split(".")[0] == "keras"


def save_to_memory(model: Any, file: io.BytesIO) -> None:
    """Write the `.keras` file of a model into memory."""
    from keras.src.saving import saving_lib
    saving_lib.save_model(model, file)


def synchronized_statistics(model: Any) -> list[Any]:
    """The statistics of batch normalizations that take their moments from all ranks."""
    return [v for layer in model._flatten_layers() if MOMENTS in vars(layer)
            for v in layer.non_trainable_variables]


def states_of_samples(model: Any) -> list[Any]:
    """What stateful layers keep of the samples of the last batch: each rank has its own."""
    return [v for layer in model._flatten_layers() if getattr(layer, "stateful", False)
            for v in keras.tree.flatten(getattr(layer, "states", None) or [])
            if hasattr(v, "assign")]


def check_batch_normalization() -> None:
    """Refuse a Keras whose batch normalization does not take its moments from one method.

    Raises:
        OptimizerError: Naming what was expected.
    """
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
    """The batch normalizations of a model, in its order; those of models within it too.

    Raises:
        OptimizerError: One has a method of its own for the moments.
    """
    cls = keras.layers.BatchNormalization
    found = [layer for layer in model._flatten_layers() if isinstance(layer, cls)]
    for layer in found:
        if getattr(type(layer), MOMENTS) is not getattr(cls, MOMENTS):
            raise OptimizerError(
                f"The layer `{layer.name}` ({type(layer).__name__}) computes its moments in its "
                f"own way ({MOMENTS}), so it cannot be synchronized over ranks. Use a "
                "keras.layers.BatchNormalization, or leave sync_batch_norm out.")
    return found

"""`fit`, `evaluate` and `predict` on all ranks, with Keras' own arguments and meaning."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config import DEFAULT_BATCH, TrainConfig
from hvdtrain.data.keras_adapters import (
    ArrayAdapter,
    RankAdapter,
    adapter_of,
    is_arrays,
    unpacked,
    validation_split_of,
)
from hvdtrain.data.plans import Part
from hvdtrain.data.source import Source
from hvdtrain.data.stream import StreamSource
from hvdtrain.data.weights import weighted
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.optim import keras_model, state
from hvdtrain.session import Session, session_for
from hvdtrain.settings import refuse_differences
from hvdtrain.train import evaluate as evaluation
from hvdtrain.train.chief import needs_all
from hvdtrain.train.elastic import Origin, origin_of
from hvdtrain.train.feed import Feed, SourceFeed
from hvdtrain.train.fit import AllreduceRun
from hvdtrain.train.own_loop import drawn_seed

_FORMER = {
    "validation": "validation_data=(x_val, y_val)",
    "batch_per_rank": "batch_size=..., and config=hvdtrain.TrainConfig(batch=\"per_rank\")",
    "data": "x=..., y=...",
    "session": "hvdtrain.init() before",
}
"""Arguments that people try, and Keras' own."""


def fit(model: Any, x: Any = None, y: Any = None,  # noqa: D417 - those of Keras
        batch_size: int | None = None,
        epochs: int | None = None, verbose: str | int = "auto", callbacks: Any = None,
        validation_split: float = 0.0, validation_data: Any = None, shuffle: Any = True,
        class_weight: Mapping[int, float] | None = None, sample_weight: Any = None,
        initial_epoch: int = 0, steps_per_epoch: int | None = None,
        validation_steps: int | None = None, validation_batch_size: int | None = None,
        validation_freq: int = 1, *, config: TrainConfig | None = None,
        stop_asked: Callable[[], bool] | None = None, dry_run: bool = False, **unknown: Any) -> Any:
    """Train a compiled model on all ranks, as `keras.Model.fit` does on one. All ranks.

    All ranks give the same data, and each takes its part; the weights are those of the chief's
    model. Optimizers are made distributed. docs/from-keras.md describes each argument.

    Args:
        model: A compiled `keras.Model`.
        x: As in Keras: arrays, a `tf.data.Dataset` of batches, a `PyDataset`, a generator; or
            samples that hvdtrain reads: a `Source`, a `StreamSource`, what `by_file` returns.
        batch_size: Integer, samples per step: over all ranks, or on each with
            `config.batch="per_rank"`.
        config: A `TrainConfig`, for what Keras has no argument for. `epochs` and the batch may be
            given there instead, but not twice.
        stop_asked: Callable that returns whether this process was asked to stop.
        dry_run: Boolean; print the plan and return.
        **unknown: Refused, with the name of Keras' argument.

    The other arguments are those of Keras.

    Returns:
        Keras' `History`; its figures are those of all ranks.

    Raises:
        OptimizerError: The model has no optimizer, or one that cannot be distributed as set.
        ConfigError: Settings differ between ranks, or one has no effect here.
        DataError: The data cannot be divided, differ between ranks, or cannot be read.
        TrainingError: The loss is not finite, or ranks hold different weights.
        CheckpointError: A file could not be written or read.
    """
    door = _Door.open("fit", x, config, unknown)
    if epochs == 0:  # Keras trains nothing either
        return keras.callbacks.History()
    config = _with_epochs(door.config, epochs)
    origin = origin_of(door.session, config)
    config = origin.settings(config)
    door = dataclasses.replace(door, config=config, origin=origin)
    if validation_split and validation_data is None:
        _refuse_beside(x, validation_split=validation_split)
        (x, y, sample_weight), validation_data = validation_split_of(
            (x, y, sample_weight), validation_split)
    state.seed_dropout(model, config.seed)
    train = door.feed(model, x, y, sample_weight, batch_size=batch_size, steps=steps_per_epoch,
                      class_weight=class_weight, shuffle=shuffle if config.shuffle else False,
                      name="training")
    validation = None
    if validation_data is not None:
        validation = door.feed(model, *unpacked(validation_data), name="validation",
                               steps=validation_steps,
                               batch_size=validation_batch_size or batch_size)
    run = AllreduceRun(
        model=model, session=door.session, config=config, name=model.name, data=train,
        validation=validation, callbacks=_callbacks_of(callbacks), verbose=verbose,
        initial_epoch=initial_epoch, origin=origin, stop_asked=stop_asked or (lambda: False),
        validation_arguments={"validation_freq": validation_freq} | (
            {"validation_steps": validation_steps} if validation_steps else {}))
    return run.fit(dry_run=dry_run).callback


def evaluate(model: Any, x: Any = None, y: Any = None,  # noqa: D417 - those of Keras
             batch_size: int | None = None, verbose: str | int = "auto", sample_weight: Any = None,
             steps: int | None = None, callbacks: Any = None, return_dict: bool = False, *,
             config: TrainConfig | None = None, **unknown: Any) -> Any:
    """Evaluate a compiled model on all ranks, as `keras.Model.evaluate` does. All ranks.

    Args:
        model: A compiled `keras.Model`, the same on all ranks.
        x: As for `fit`; the same on all ranks.
        batch_size: Integer, as for `fit`.
        config: A `TrainConfig`; only its settings of the batch have an effect here.
        **unknown: Refused, with the name of Keras' argument.

    The other arguments are those of Keras. Callbacks are called on every rank; `on_test_end` gets
    the figures of all ranks.

    Returns:
        What Keras returns: the loss and the metrics over all samples; equal on all ranks.

    Raises:
        DataError: The data cannot be used.
        TrainingError: A metric cannot be merged over ranks, or the ranks hold different models.
    """
    door = _Door.open("evaluate", x, config, unknown)
    feed = door.feed(model, x, y, sample_weight, batch_size=batch_size, steps=steps,
                     name="evaluation")
    door.compare(feed)
    return evaluation.evaluate(model, feed, door.session, door.arguments(
        verbose, steps, callbacks=callbacks, return_dict=return_dict))


def predict(model: Any, x: Any, batch_size: int | None = None,  # noqa: D417 - those of Keras
            verbose: str | int = "auto", steps: int | None = None, callbacks: Any = None, *,
            config: TrainConfig | None = None, **unknown: Any) -> Any:
    """Predict on all ranks, as `keras.Model.predict` does on one. All ranks.

    Args:
        model: A `keras.Model`, the same on all ranks.
        x: As for `fit`; the same on all ranks.
        batch_size: Integer, as for `fit`.
        config: A `TrainConfig`; only its settings of the batch have an effect here.
        **unknown: Refused, with the name of Keras' argument.

    The other arguments are those of Keras. Callbacks are called on every rank, with this rank's
    predictions.

    Returns:
        What Keras returns, on every rank: arrays in the order of the data. For `by_file`, and
        for a stream that is made for each rank, the ranks' shares follow each other.

    Raises:
        DataError: The data cannot be used.
        TrainingError: The ranks hold different models.
    """
    door = _Door.open("predict", x, config, unknown)
    feed = door.feed(model, x, batch_size=batch_size, steps=steps, name="prediction")
    door.compare(feed)
    return evaluation.predict(model, feed, door.session,
                              door.arguments(verbose, steps, callbacks=callbacks))


def launched(config: TrainConfig | None) -> TrainConfig:
    """The settings of a script, with those of `hvdtrain launch --set`."""
    config = config or TrainConfig()
    # Another engine is refused, whatever settings the launcher adds.
    return config.as_launched(os.environ) if config.engine == "allreduce" else config


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Door:
    config: TrainConfig
    session: Session
    origin: Origin = Origin()

    @classmethod
    def open(cls, name: str, x: Any, config: TrainConfig | None,
             unknown: Mapping[str, Any]) -> _Door:
        """Begin a call. All ranks: they must call the same, with data of the same kind."""
        if unknown:
            fields = {field.name for field in dataclasses.fields(TrainConfig)}
            hints = [f"{key}: write " + _FORMER.get(
                key, f"config=hvdtrain.TrainConfig({key}={value!r})")
                for key, value in unknown.items() if key in fields or key in _FORMER]
            raise ConfigError(
                f"{name} has no argument {', '.join(map(repr, unknown))}. It takes those of Keras' "
                f"{name}, and config=hvdtrain.TrainConfig(...). {'; '.join(hints)}".rstrip())
        config = launched(config)
        session = session_for(config)
        with needs_all(f"calls {name}"):
            everyone = session.collective.gather_objects((name, _kind_of(x)))
        odd = next((r for r, theirs in enumerate(everyone) if theirs != everyone[0]), None)
        if odd is not None:
            raise ConfigError(
                f"All ranks must call the same: rank 0 {_call_of(everyone[0])}, rank {odd} "
                f"{_call_of(everyone[odd])}. Do not put the call behind a condition on the rank.")
        return cls(config=config, session=session)

    def arguments(self, verbose: str | int, steps: int | None, **others: Any) -> dict[str, Any]:
        """Keras' other arguments; only the chief prints."""
        others["verbose"] = verbose if self.session.world.is_chief else 0
        return others | ({"steps": steps} if steps else {})

    def feed(self, model: Any, x: Any, y: Any = None, sample_weight: Any = None, *, name: str,
             batch_size: int | None = None, class_weight: Any = None, shuffle: Any = False,
             steps: int | None = None) -> Feed:
        config, world = self.config, self.session.world
        _refuse_targets_in_inputs(model, x, y)
        batch, per_rank = self._batch(batch_size, twice=name == "validation")
        training = name == "training"
        batch_ranks = self.origin.batch_ranks if training else None
        if training:
            self.origin.check_batch(config, per_rank=per_rank)
        if isinstance(x, (Source, StreamSource)):
            _refuse_beside(x, y=y, sample_weight=sample_weight, steps=steps)
            batch = batch or DEFAULT_BATCH
            return SourceFeed(
                x if class_weight is None else weighted(x, class_weight), self.session,
                dataclasses.replace(config, shuffle=bool(shuffle),
                                    batch_per_rank=batch if per_rank else None,
                                    batch_global=None if per_rank else batch), batch_ranks)
        with warnings.catch_warnings():
            if not world.is_chief:  # Keras warns, and once is enough
                warnings.simplefilter("ignore")
            adapter = adapter_of(
                x, y, sample_weight, batch_size=batch,
                batch_ranks=(batch_ranks or world.size) if per_rank else 1,
                part=Part(rank=world.rank, size=world.size,
                          remainder=config.remainder_as("join") if training else "join"),
                class_weight=class_weight, shuffle=shuffle, steps=steps,
                seed=drawn_seed() if config.seed is None else config.seed,
                before_decoding=config.divide == "samples", name=name)
        if training and batch != batch_size and not isinstance(adapter, ArrayAdapter):
            raise ConfigError(
                f"batch_per_rank and batch_global cannot change the batches that {_kind_of(x)} "
                "makes. Leave them out: config.batch says what those batches mean.")
        if adapter.num_batches == 0:
            raise DataError(f"The {name} data are empty; at least one sample is needed.")
        _refuse_indivisible(adapter, model, world.size)
        return adapter

    def compare(self, feed: Feed) -> None:
        """Refuse data, batches or steps that differ between the ranks. All ranks."""
        collective = self.session.collective
        refuse_differences(collective.gather_objects(feed.compare(collective)))

    def _batch(self, batch_size: int | None, *, twice: bool) -> tuple[int | None, bool]:
        """The batch, and whether it is per rank; `twice`: call and config may both give it."""
        config = self.config
        given = {name: value for name, value in (
            ("batch_size", batch_size), ("batch_per_rank", config.batch_per_rank),
            ("batch_global", config.batch_global)) if value is not None}
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1. Received: {batch_size}")
        if len(given) > 1 and not twice:
            said = ", ".join(f"{name}={value}" for name, value in given.items())
            raise ConfigError(f"The batch is said in two ways: {said}. Give batch_size to the "
                              "call, or batch_per_rank or batch_global in the config.")
        per_rank = "batch_per_rank" in given or (
            "batch_global" not in given and config.batch == "per_rank")
        return next(iter(given.values()), None), per_rank


def _refuse_beside(x: Any, **given: Any) -> None:
    """Refuse arguments that Keras takes with arrays but not with samples that hvdtrain reads."""
    names = [name for name, value in given.items() if value is not None]
    if names and isinstance(x, (Source, StreamSource)):
        raise ConfigError(
            f"{', '.join(names)} cannot be given beside {type(x).__name__}, which has whole "
            "epochs of samples with their targets and weights. Leave it out"
            + (": give validation_data=..." if "validation_split" in names else "."))


def _refuse_targets_in_inputs(model: Any, x: Any, y: Any) -> None:
    """Refuse data of another form than Keras takes; its own error speaks of shapes only."""
    shape = keras_model.only_input_shape(model)
    if shape is None or y is not None:
        return
    if isinstance(x, tuple) and len(x) in (2, 3) and is_arrays(x):
        raise DataError(
            f"A tuple of {len(x)} arrays was given as x: in Keras that is {len(x)} inputs, and the "
            "model has one. Write fit(model, x, y) or fit(model, x, y, sample_weight=...).")
    if isinstance(x, tf.data.Dataset):
        spec = x.element_spec[0] if isinstance(x.element_spec, tuple) else x.element_spec
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank == len(shape) - 1:
            raise DataError(
                f"The data set has elements of shape {tuple(spec.shape)}, which are single samples "
                f"of the model's input {tuple(shape)}. Keras takes batches: write "
                "dataset.batch(batch_size), or hvdtrain.StreamSource(dataset).")


def _refuse_indivisible(adapter: RankAdapter, model: Any, size: int) -> None:
    """Refuse batches that cannot be divided, or whose parts the model does not accept."""
    plan = adapter.plan()
    batch = plan.global_batch
    if batch is None or size == 1:
        return
    per_rank = "hvdtrain.TrainConfig(batch=\"per_rank\")"
    if batch < size and adapter.name == "training":
        raise DataError(
            f"The batch of {batch} samples is divided over {size} ranks; every rank needs at "
            f"least one. Give batch_size={size} or more, start at most {batch} ranks, or let "
            f"batch_size be that of each rank: {per_rank}.")
    fixed = keras_model.fixed_batch(model)
    left = 0 if plan.samples is None else plan.samples % batch
    if fixed is not None and fixed * size != batch:
        raise DataError(
            f"The model takes batches of {fixed} samples only, and the batch of {batch} is "
            f"divided over {size} ranks. Let batch_size be that of each rank ({per_rank}), or "
            "make the model without a fixed batch.")
    if fixed is not None and left:
        raise DataError(
            f"The model takes batches of {fixed} samples only, and of {plan.samples} samples "
            f"the last one has {left} over all ranks. Leave them out, or make the model "
            "without a fixed batch.")


def _callbacks_of(given: Any) -> list[Any]:
    callbacks = keras.tree.flatten(given) if given else []
    odd = next((c for c in callbacks if not isinstance(c, keras.callbacks.Callback)), None)
    if odd is not None:
        raise ConfigError(f"callbacks must be keras.callbacks.Callback objects. Received: {odd!r} "
                          f"of type {type(odd).__name__}")
    return callbacks


def _kind_of(x: Any) -> str:
    """The kind of data, in words that are equal on all ranks."""
    if isinstance(x, tf.data.Dataset):
        return "a tf.data.Dataset"
    return "arrays" if is_arrays(x) else f"a {type(x).__name__}"


def _call_of(told: Any) -> str:
    if isinstance(told, tuple) and len(told) == 2 and all(isinstance(t, str) for t in told):
        return f"calls {told[0]} with {told[1]}" if told[1] else told[0]
    return "does something else, such as saving the model"


def _with_epochs(config: TrainConfig, epochs: int | None) -> TrainConfig:
    if epochs is None:
        return config
    if config.epochs not in (TrainConfig.epochs, epochs):
        raise ConfigError(f"epochs={epochs} was given to fit, and epochs={config.epochs} in its "
                          "config. Leave one of the two out.")
    return dataclasses.replace(config, epochs=int(epochs))

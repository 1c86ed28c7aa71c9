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
from hvdtrain.data.array_adapter import ArrayAdapter
from hvdtrain.data.given import adapter_of
from hvdtrain.data.keras_adapters import is_arrays, unpacked, validation_split_of
from hvdtrain.data.part import Part
from hvdtrain.data.source import Source
from hvdtrain.data.stream import StreamSource
from hvdtrain.data.weights import weighted
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.optim import keras_model, state
from hvdtrain.session import Session, session_for
from hvdtrain.settings import refuse_differences
from hvdtrain.train import evaluate as evaluation
from hvdtrain.train.chief import needs_all
from hvdtrain.train.feed import Feed, KerasFeed, SourceFeed
from hvdtrain.train.fit import Run
from hvdtrain.train.seeds import drawn_seed

_FORMER = {
    "validation": "validation_data=(x_val, y_val)",
    "batch_per_rank": "batch_size=..., and config=hvdtrain.TrainConfig(batch=\"per_rank\")",
    "data": "x=..., y=...",
    "session": "hvdtrain.init() before",
}
"""Arguments that people try, and what Keras calls them."""


def fit(model: Any, x: Any = None, y: Any = None,  # noqa: D417 - those of Keras
        batch_size: int | None = None,
        epochs: int | None = None, verbose: str | int = "auto", callbacks: Any = None,
        validation_split: float = 0.0, validation_data: Any = None, shuffle: Any = True,
        class_weight: Mapping[int, float] | None = None, sample_weight: Any = None,
        initial_epoch: int = 0, steps_per_epoch: int | None = None,
        validation_steps: int | None = None, validation_batch_size: int | None = None,
        validation_freq: int = 1, *, config: TrainConfig | None = None,
        stop_asked: Callable[[], bool] | None = None, dry_run: bool = False, **unknown: Any) -> Any:
    """Train a compiled model on all ranks, as `keras.Model.fit` does on one. Every rank.

    All ranks give the same data, of which each takes its part; the weights are those of the
    chief's model. Optimizers are made distributed. docs/from-keras.md has each argument.

    Args:
        model: A compiled `keras.Model`.
        x: As in Keras: arrays, a `tf.data.Dataset` of batches, a `PyDataset`, a generator; or
            samples that hvdtrain reads: a `Source`, a `StreamSource`, what `by_file` returns.
        batch_size: Integer, samples per step: over all ranks, or on each with
            `config.batch="per_rank"`.
        config: A `TrainConfig`: what Keras has no argument for. `epochs` and the batch may be
            given there as well, but not twice.
        stop_asked: Callable that tells whether this process was told to stop.
        dry_run: Boolean; print the plan and return.
        **unknown: Refused, with the name of Keras' argument.

    The other arguments are those of Keras.

    Returns:
        Keras' `History`; its figures are those of all ranks.

    Raises:
        OptimizerError: The model has no optimizer, or one that cannot be distributed as set.
        ConfigError: Ranks were given different settings, or one that cannot act here.
        DataError: The data cannot be divided, differ between ranks, or cannot be read.
        TrainingError: The loss is not finite, or ranks hold different weights.
        CheckpointError: A file could not be written or read.
    """
    _refuse_unknown("fit", unknown)
    door = _Door.open("fit", x, launched(config))
    if epochs == 0:  # Keras trains nothing either
        return keras.callbacks.History()
    config = _with_epochs(door.config, epochs)
    door = dataclasses.replace(door, config=config)
    if validation_split and validation_data is None:
        if isinstance(x, (Source, StreamSource)):
            _refuse_beside(x, validation_split=validation_split)
        (x, y, sample_weight), validation_data = validation_split_of(
            (x, y, sample_weight), validation_split)
    state.seed_dropout(model, config.seed)
    train = door.feed(x, y, sample_weight, batch_size=batch_size, class_weight=class_weight,
                      shuffle=shuffle if config.shuffle else False, steps=steps_per_epoch,
                      name="training", model=model)
    validation = None
    if validation_data is not None:
        val_x, val_y, val_weight = unpacked(validation_data)
        validation = door.feed(val_x, val_y, val_weight, steps=validation_steps, model=model,
                               batch_size=validation_batch_size or batch_size, name="validation")
    run = Run(model=model, session=door.session, config=config, name=model.name,
              callbacks=_callbacks_of(callbacks), verbose=verbose,
              initial_epoch=initial_epoch, stop_asked=stop_asked or (lambda: False),
              validation={"validation_freq": validation_freq} | (
                  {"validation_steps": validation_steps} if validation_steps else {}))
    return run.fit(train, validation, dry_run=dry_run).callback


def evaluate(model: Any, x: Any = None, y: Any = None,  # noqa: D417 - those of Keras
             batch_size: int | None = None, verbose: str | int = "auto", sample_weight: Any = None,
             steps: int | None = None, callbacks: Any = None, return_dict: bool = False, *,
             config: TrainConfig | None = None, **unknown: Any) -> Any:
    """Evaluate a compiled model on all ranks, as `keras.Model.evaluate` does. Every rank.

    Args:
        model: A compiled `keras.Model`, the same on all ranks.
        x: As for `fit`; the same on all ranks.
        batch_size: Integer, as for `fit`.
        config: A `TrainConfig`, of which what the batch means acts here.
        **unknown: Refused, with the name of Keras' argument.

    The other arguments are those of Keras. Callbacks are called on every rank; `on_test_end` has
    the figures of all.

    Returns:
        What Keras returns: the loss and the metrics over all samples; equal on all ranks.

    Raises:
        DataError: The data cannot be used.
        TrainingError: A metric cannot be merged over ranks, or the ranks hold different models.
    """
    _refuse_unknown("evaluate", unknown)
    door = _Door.open("evaluate", x, launched(config))
    feed = door.feed(x, y, sample_weight, batch_size=batch_size, steps=steps, name="evaluation",
                     model=model)
    arguments = {"verbose": door.verbose(verbose), "callbacks": callbacks,
                 "return_dict": return_dict} | ({"steps": steps} if steps else {})
    door.compare(feed)
    return evaluation.evaluate(model, feed, door.session, arguments)


def predict(model: Any, x: Any, batch_size: int | None = None,  # noqa: D417 - those of Keras
            verbose: str | int = "auto", steps: int | None = None, callbacks: Any = None, *,
            config: TrainConfig | None = None, **unknown: Any) -> Any:
    """Predict on all ranks, as `keras.Model.predict` does on one. Every rank.

    Args:
        model: A `keras.Model`, the same on all ranks.
        x: As for `fit`; the same on all ranks.
        batch_size: Integer, as for `fit`.
        config: A `TrainConfig`, of which what the batch means acts here.
        **unknown: Refused, with the name of Keras' argument.

    The other arguments are those of Keras. Callbacks are called on every rank, with this rank's
    predictions.

    Returns:
        What Keras returns, on every rank: arrays in the order of the data. Of `by_file`, and of
        a stream that is made for each rank, the shares of the ranks follow each other.

    Raises:
        DataError: The data cannot be used.
        TrainingError: The ranks hold different models.
    """
    _refuse_unknown("predict", unknown)
    door = _Door.open("predict", x, launched(config))
    arguments = {"verbose": door.verbose(verbose), "callbacks": callbacks}
    if isinstance(x, (Source, StreamSource)):
        _refuse_beside(x, steps=steps)
        batch = door.source_config(batch_size).rank_batch(door.session.world.size)
        return evaluation.predict_source(model, x, batch, door.session, arguments)
    feed = door.feed(x, batch_size=batch_size, steps=steps, name="prediction", model=model)
    door.compare(feed)
    return evaluation.predict(model, feed, door.session,
                              arguments | ({"steps": steps} if steps else {}))


def launched(config: TrainConfig | None) -> TrainConfig:
    """The settings of a script, with those that `hvdtrain launch --set` gives it.

    Raises:
        ConfigError: Both say something, and not the same.
    """
    config = config or TrainConfig()
    # Another engine is refused as such, whatever the launcher says.
    return config.as_launched(os.environ) if config.engine == "allreduce" else config


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Door:
    """One call of `fit`, `evaluate` or `predict`."""

    name: str
    config: TrainConfig
    session: Session

    @classmethod
    def open(cls, name: str, x: Any, config: TrainConfig) -> _Door:
        """Begin a call. All ranks: they must call the same, with data of the same kind.

        Raises:
            ConfigError: On every rank: they do not.
        """
        session = session_for(config)
        with needs_all(f"calls {name}"):
            everyone = session.collective.gather_objects((name, _kind_of(x)))
        odd = next((r for r, theirs in enumerate(everyone) if theirs != everyone[0]), None)
        if odd is not None:
            raise ConfigError(
                f"All ranks must call the same: rank 0 {_call_of(everyone[0])}, rank {odd} "
                f"{_call_of(everyone[odd])}. Do not put the call behind a condition on the rank.")
        return cls(name=name, config=config, session=session)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.session.world.size

    def verbose(self, asked: str | int) -> str | int:
        """`verbose` of Keras: the chief's screen only."""
        return asked if self.session.world.is_chief else 0

    def feed(self, x: Any, y: Any = None, sample_weight: Any = None, *, name: str, model: Any,
             batch_size: int | None = None, class_weight: Any = None, shuffle: Any = False,
             steps: int | None = None) -> Feed:
        """The data of one call, divided over the ranks."""
        _refuse_targets_in_inputs(model, x, y)
        if isinstance(x, (Source, StreamSource)):
            _refuse_beside(x, y=y, sample_weight=sample_weight, steps=steps)
            if class_weight is not None:
                x = weighted(x, class_weight)
            return SourceFeed(x, self.session,
                              self.source_config(batch_size, shuffle=bool(shuffle)))
        batch, per_rank = self._batch(batch_size, twice=name == "validation")
        config, training = self.config, name == "training"
        with warnings.catch_warnings():
            if not self.session.world.is_chief:  # Keras warns, and once is enough
                warnings.simplefilter("ignore")
            adapter = adapter_of(
                x, y, sample_weight, per_rank=per_rank, batch_size=batch,
                part=Part(rank=self.session.world.rank, size=self.size,
                          remainder=config.remainder_as("join") if training else "join"),
                class_weight=class_weight, shuffle=shuffle, steps=steps,
                seed=drawn_seed() if config.seed is None else config.seed,
                before_decoding=config.divide == "samples")
        if training and batch != batch_size and not isinstance(adapter, ArrayAdapter):
            raise ConfigError(
                f"batch_per_rank and batch_global cannot change the batches that {_kind_of(x)} "
                "makes. Leave them out: config.batch says what those batches mean.")
        if adapter.num_batches == 0:
            raise DataError(f"The {name} data are empty; at least one sample is needed.")
        feed = KerasFeed(adapter, self.session, name, steps)
        feed.check(model)
        return feed

    def compare(self, feed: Feed) -> None:
        """Refuse data, batches or steps that differ between the ranks. All ranks.

        Raises:
            ConfigError: Naming what differs.
            DataError: The data themselves differ.
        """
        everyone = self.session.collective.gather_objects(feed.compare())
        refuse_differences(everyone, [f"rank {rank}" for rank in range(len(everyone))])

    def source_config(self, batch_size: int | None, *, shuffle: bool = False) -> TrainConfig:
        """The settings with the batch of a call, for samples that hvdtrain reads."""
        batch, per_rank = self._batch(batch_size)
        batch = batch or DEFAULT_BATCH
        return dataclasses.replace(
            self.config, shuffle=shuffle, batch_per_rank=batch if per_rank else None,
            batch_global=None if per_rank else batch)

    def _batch(self, batch_size: int | None, *, twice: bool = False) -> tuple[int | None, bool]:
        """The batch, and whether it is that of each rank.

        Args:
            batch_size: That of the call.
            twice: Boolean, the config may say it as well: for other data.

        Raises:
            ConfigError: It is said in two ways.
        """
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
    """Refuse arguments that samples which hvdtrain reads do not take beside them."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ConfigError(
            f"{', '.join(names)} cannot be given beside {type(x).__name__}, which has whole "
            "epochs of samples with their targets and weights. Leave it out"
            + (": give validation_data=..." if "validation_split" in names else "."))


def _refuse_targets_in_inputs(model: Any, x: Any, y: Any) -> None:
    """Refuse data of another form than Keras takes, which it would tell in words of shapes.

    Raises:
        DataError: Saying what to write instead.
    """
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


def _callbacks_of(given: Any) -> list[Any]:
    callbacks = keras.tree.flatten(given) if given else []
    odd = next((c for c in callbacks if not isinstance(c, keras.callbacks.Callback)), None)
    if odd is not None:
        raise ConfigError(f"callbacks must be keras.callbacks.Callback objects. Received: {odd!r} "
                          f"of type {type(odd).__name__}")
    return callbacks


def _kind_of(x: Any) -> str:
    """What was given, in words that are equal on all ranks."""
    if isinstance(x, tf.data.Dataset):
        return "a tf.data.Dataset"
    return "arrays" if is_arrays(x) else f"a {type(x).__name__}"


def _call_of(told: Any) -> str:
    """What another rank has told where this one calls `fit` or the like, in words."""
    if isinstance(told, tuple) and len(told) == 2 and all(isinstance(t, str) for t in told):
        return f"calls {told[0]} with {told[1]}"
    return "does something else, such as saving the model"


def _with_epochs(config: TrainConfig, epochs: int | None) -> TrainConfig:
    if epochs is None:
        return config
    if config.epochs not in (TrainConfig.epochs, epochs):
        raise ConfigError(f"epochs={epochs} was given to fit, and epochs={config.epochs} in its "
                          "config. Leave one of the two out.")
    return dataclasses.replace(config, epochs=int(epochs))


def _refuse_unknown(name: str, unknown: Mapping[str, Any]) -> None:
    """Refuse arguments that Keras has not, with the one to write instead."""
    if not unknown:
        return
    hints = [f"{key}: write {_FORMER[key]}" for key in unknown if key in _FORMER]
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    hints += [f"{key}: write config=hvdtrain.TrainConfig({key}={value!r})"
              for key, value in unknown.items() if key in fields and key not in _FORMER]
    raise ConfigError(
        f"{name} has no argument {', '.join(map(repr, unknown))}. It takes those of Keras' "
        f"{name}, and config=hvdtrain.TrainConfig(...). {'; '.join(hints)}".rstrip())

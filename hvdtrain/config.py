"""Settings: frozen dataclasses are the only home of defaults; TOML and options fill them.

No TensorFlow here: the driver reads and checks settings before it starts a single rank.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from hvdtrain.errors import ConfigError

LrScaling = Literal["linear", "sqrt", "none"]
Remainder = Literal["pad", "drop"]
Sparse = Literal["gather", "dense"]
CollectiveName = Literal["auto", "horovod-gloo", "horovod-mpi", "mpi4py", "single"]
ConfigT = TypeVar("ConfigT")

_LONGEST_HANG_S = 1_000_000


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. Equal on all ranks (compared at the start)."""

    batch_per_rank: int = 32
    """Samples per step on each rank; the global batch is this times the number of ranks."""
    epochs: int = 1
    """Passes over the training data, counted from the beginning of the first run."""
    seed: int = 0
    """Seeds weights, shuffling and dropout."""
    shuffle: bool = True
    """Reshuffle all samples globally before each epoch, from (seed, epoch)."""
    remainder: Remainder = "pad"
    """What to do when the last batch does not divide by the ranks: repeat up to N-1 samples
    (`pad`) or leave up to N-1 out (`drop`). The last batch is smaller, on all ranks alike."""
    lr_scaling: LrScaling = "linear"
    """Multiply the learning rate by N (`linear`), the square root of N (`sqrt`) or 1 (`none`)
    for N ranks."""
    warmup_epochs: float = 0.0
    """Rise from the unscaled to the scaled learning rate over so many epochs, step by step."""
    collective: CollectiveName = "auto"
    """What reduces gradients."""
    bucket_mb: float = 32.0
    """Size of a group of fused gradients, in MiB."""
    sparse: Sparse = "gather"
    """How gradients of embeddings travel: the rows used, or the whole table."""
    output: Path | None = None
    """Folder for checkpoints, final model, metrics.jsonl and TensorBoard log; None writes
    nothing. `hvdtrain fit` defaults to `runs/<job>`."""
    checkpoint_every_epochs: int = 1
    """0 writes no checkpoints."""
    keep_checkpoints: int = 3
    """So many of the newest checkpoints are kept."""
    resume: bool = False
    """Go on from the newest checkpoint in `output` that can be read."""
    overwrite: bool = False
    """Delete the checkpoints of a former run in `output` instead of refusing to start."""
    tensorboard: bool = True
    """Write a TensorBoard log on the chief, where the package is installed."""
    check_weights: bool = True
    """Compare a checksum of all weights over ranks after the first step and each epoch."""
    stop_on_nan: bool = True
    """Stop when a loss is not finite, naming step and rank."""
    hang_timeout_s: float = 300.0
    """End the run where no rank has gone on, or one has not answered, for so many seconds, and
    name it. 0: never."""

    def __post_init__(self) -> None:
        if isinstance(self.output, str):
            object.__setattr__(self, "output", Path(self.output))
        check_types(self)
        for name in ("batch_per_rank", "epochs", "keep_checkpoints"):
            _at_least(self, name, 1)
        for name in ("checkpoint_every_epochs", "warmup_epochs", "seed"):
            _at_least(self, name, 0)
        check_hang_timeout(self.hang_timeout_s)
        if self.bucket_mb <= 0:
            raise ConfigError(f"bucket_mb must be positive. Received: bucket_mb={self.bucket_mb}")
        if self.resume and self.overwrite:
            raise ConfigError("resume and overwrite exclude each other; give one of them.")
        if self.resume and self.output is None:
            raise ConfigError("resume needs the output folder of the run to go on with: give "
                              "output (on the command line: --output DIR).")


def check_hang_timeout(hang_timeout_s: float) -> None:
    """Refuse a limit that is no time.

    Raises:
        ConfigError: It is neither 0 nor in the range.
    """
    if hang_timeout_s != 0 and not 1 <= hang_timeout_s <= _LONGEST_HANG_S:
        raise ConfigError(f"hang_timeout_s must be 0 (no limit) or from 1 to {_LONGEST_HANG_S:,} "
                          f"seconds. Received: hang_timeout_s={hang_timeout_s}")


def _at_least(config: Any, name: str, least: int) -> None:
    value = getattr(config, name)
    if not value >= least:
        raise ConfigError(f"{name} must be at least {least}. Received: {name}={value}")


def check_types(config: Any) -> None:
    """Compare each field of a config dataclass with its annotation.

    Raises:
        ConfigError: Naming the field, what was found and what was expected.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if not _fits(value, hint):
            raise ConfigError(
                f"{field.name} must be {describe_type(hint)}. Received: "
                f"{field.name}={value!r} of type {type(value).__name__}")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def describe_type(hint: Any) -> str:
    """A type annotation in words, e.g. `one of 'pad', 'drop'` or `int or None`."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(v) for v in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(part) for part in typing.get_args(hint))
    if hint is type(None):
        return "None"
    name: str = hint.__name__
    return {"int": "a whole number", "float": "a number", "bool": "true or false",
            "str": "a string", "Path": "a path"}.get(name, name)


def from_mapping(cls: type[ConfigT], values: Mapping[str, Any], *, where: str) -> ConfigT:
    """Make a config dataclass from a mapping, refusing keys that it does not know.

    Args:
        cls: The dataclass.
        values: Mapping from field names to values; strings become paths where one is expected.
        where: String for messages, e.g. `"job.toml, [train]"`.

    Raises:
        ConfigError: A key is unknown (the valid ones are listed) or a value does not fit.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"{where}: unknown key{'s' if len(unknown) > 1 else ''} "
            f"{', '.join(map(repr, unknown))}. Valid keys: {', '.join(sorted(known))}.")
    converted = {
        key: Path(value) if isinstance(value, str) and _fits(Path(), hints[key]) else value
        for key, value in values.items()
    }
    try:
        return cls(**converted)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def replace(config: ConfigT, **changes: Any) -> ConfigT:
    """A copy with the given fields changed; None means "as it was"."""
    given = {key: value for key, value in changes.items() if value is not None}
    return dataclasses.replace(config, **given)  # type: ignore[type-var]

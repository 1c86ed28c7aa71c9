"""Settings: frozen dataclasses are the only home of defaults; TOML and options fill them.

No TensorFlow here: the driver reads and checks settings before it starts a single rank.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from hvdtrain.engine_config import EngineName, PsConfig, TfConfig
from hvdtrain.errors import ConfigError
from hvdtrain.settings import at_least, check_types, from_mapping

LR_SCALINGS = ("linear", "sqrt", "none")
Remainder = Literal["auto", "join", "pad", "drop"]
BatchMeaning = Literal["global", "per_rank"]
Divide = Literal["samples", "batches"]
DEFAULT_BATCH = 32
"""Samples per batch where nothing is given, as in Keras."""
Sparse = Literal["auto", "gather", "dense"]
Compression = Literal["none", "fp16", "bf16", "topk", "lowrank"]
SENT_IN_PART = ("topk", "lowrank")
"""Compressions that keep something back for later steps."""
SUMMED_APART = ("bf16", *SENT_IN_PART)
"""Compressions whose sums are no allreduce: they are made in float32, and divided once."""
COLLECTIVE_VARIABLE = "HVDTRAIN_COLLECTIVE"
"""What `launch --collective` says to `init` of a script."""
CollectiveName = Literal["auto", "horovod-gloo", "horovod-mpi", "mpi4py", "single"]

_LONGEST_HANG_S = 1_000_000
_LARGEST_PREDIVIDE = 1_000_000
_OF_ALLREDUCE: dict[str, tuple[tuple[object, ...], str]] = {
    "remainder": (("auto", "pad", "drop"), "Use remainder='pad' or 'drop'."),
    "batch_global": ((None,), "Give batch_per_rank."),
    "divide": (("samples",), "Leave it out."),
    "collective": (("auto",), "Leave it out: TensorFlow itself moves the gradients."),
    "zero": ((False,), "Leave it out."),
    "sync_batch_norm": ((False,), "Leave it out; tf.distribute has its own: "
                                  "keras.layers.BatchNormalization(synchronized=True)."),
    "compression": (("none",), "Leave it out; engine 'ps' has --ps-wire-dtype bfloat16."),
    "predivide": ((1.0,), "Leave it out."),
    "xla": ((False,), "Leave it out."),
    "timeline": ((None,), "Leave it out: it is Horovod's."),
}
"""Settings that only engine `allreduce` has: the values that change nothing, and what to do."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. Equal on all ranks (compared at the start)."""

    batch: BatchMeaning = "global"
    """What the `batch_size` of Keras' `fit`, `evaluate` and `predict` means, and the batches of
    a data set that is given to them: samples over all ranks (`global`), which each take a part,
    so that the result is that of the script on one process; or samples on each (`per_rank`)."""
    batch_per_rank: int | None = None
    """Samples per step on each rank; the global batch is this times the number of ranks.
    Default: 32, unless `batch_global` is given."""
    batch_global: int | None = None
    """Samples per step over all ranks, in place of `batch_per_rank`; need not divide by them."""
    epochs: int = 1
    """Passes over the training data, counted from the beginning of the first run."""
    seed: int | None = None
    """Seeds weights, shuffling and dropout. Default: 0 in a job; in a script what it has seeded
    itself."""
    shuffle: bool = True
    """Reshuffle all samples globally before each epoch, from (seed, epoch)."""
    remainder: Remainder = "auto"
    """What to do when a batch does not divide by the ranks: divide it as it is and weight each
    rank by its samples (`join`), as one process would train; or repeat up to N-1 samples (`pad`)
    or leave up to N-1 out (`drop`), so that all ranks have as many. `auto`: `join`, and `pad`
    for a model of a fixed batch and for other engines."""
    divide: Divide = "samples"
    """When a `tf.data` pipeline is divided over the ranks: before its samples are decoded, where
    its steps allow it (`samples`); or after its batches are made, by every rank (`batches`), so
    that random augmentation is that of one process."""
    lr_scaling: str = "linear"
    """Multiply the learning rate by N (`linear`), the square root of N (`sqrt`) or 1 (`none`)
    for N ranks, or by what a function of yours gives for N (`module:function`)."""
    warmup_epochs: float = 0.0
    """Rise from the unscaled to the scaled learning rate over so many epochs, step by step."""
    collective: CollectiveName = "auto"
    """What reduces gradients."""
    bucket_mb: float = 32.0
    """Size of a group of fused gradients, in MiB."""
    zero: bool = False
    """Divide the state of the optimizer over the ranks (ZeRO-1)."""
    sync_batch_norm: bool = False
    """Let batch normalizations use the mean and variance of the samples of all ranks."""
    sparse: Sparse = "auto"
    """How gradients of embeddings travel: the rows used (`gather`), the whole table (`dense`),
    or what suits sizes and link (`auto`)."""
    compression: Compression = "none"
    """How gradients travel: as they are, as float16, as bfloat16 with sums in float32, or in
    part: the largest elements (`topk`), or two thin matrices (`lowrank`)."""
    topk_ratio: float = 0.04
    """The share of a gradient's elements that `topk` sends, within 4 % of the bytes of all."""
    approximation_rank: int = 16
    """The highest rank that `lowrank` sends of a gradient, within 4 % of the bytes of all."""
    predivide: float = 1.0
    """Divide gradients by this before they are summed, and by N over it afterwards."""
    output: Path | None = None
    """Folder for checkpoints, final model, metrics.jsonl and TensorBoard log; None writes
    nothing. `hvdtrain fit` defaults to `runs/<job>`."""
    checkpoint_every_epochs: int = 1
    """0 writes none at the ends of epochs."""
    checkpoint_every_steps: int = 0
    """Write one after every so many steps as well; 0 for none."""
    checkpoint_every_s: float = 0.0
    """Write one within an epoch as well, when so many seconds have gone by since the last."""
    checkpoint_background: bool = True
    """Copy the model in memory and let a thread write the file, while training goes on."""
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
    xla: bool = False
    """Compile the gradients and the update of each step with XLA, the collectives between."""
    timeline: Path | None = None
    """Write Horovod's timeline of all collectives to this file, on the chief, for
    `chrome://tracing` or Perfetto."""
    hang_timeout_s: float = 300.0
    """End the run where no rank has gone on, or one has not answered, for so many seconds, and
    name it. 0: never."""
    engine: EngineName = "allreduce"
    """How an update happens: `allreduce`, parameter servers (`ps`), or a strategy of
    tf.distribute (`tf`)."""
    ps: PsConfig = field(default_factory=PsConfig)
    """Settings of engine `ps`."""
    tf: TfConfig = field(default_factory=TfConfig)
    """Settings of engine `tf`."""

    def __post_init__(self) -> None:
        for name in ("output", "timeline"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, Path(getattr(self, name)))
        check_types(self)
        for name in ("batch_per_rank", "batch_global", "epochs", "keep_checkpoints"):
            at_least(self, name, 1)
        if self.batch_per_rank is not None and self.batch_global is not None:
            raise ConfigError(
                "batch_per_rank and batch_global say the same in two ways; give one of them. "
                f"Received: batch_per_rank={self.batch_per_rank}, "
                f"batch_global={self.batch_global}")
        for name in ("checkpoint_every_epochs", "checkpoint_every_steps", "checkpoint_every_s",
                     "warmup_epochs", "seed"):
            at_least(self, name, 0)
        check_hang_timeout(self.hang_timeout_s)
        if self.bucket_mb <= 0:
            raise ConfigError(f"bucket_mb must be positive. Received: bucket_mb={self.bucket_mb}")
        check_reduction(self)
        if self.lr_scaling not in LR_SCALINGS and ":" not in self.lr_scaling:
            raise ConfigError(f"lr_scaling must be one of {', '.join(map(repr, LR_SCALINGS))}, or "
                              f"'module:function'. Received: lr_scaling={self.lr_scaling!r}")
        self._check_engine()
        if self.resume and self.overwrite:
            raise ConfigError("resume and overwrite exclude each other; give one of them.")

    def rank_batch(self, size: int) -> int:
        """Samples per step on a rank of `size`; where they differ, of the one that has most."""
        if self.batch_global is not None:
            return -(-self.batch_global // size)
        return self.batch_per_rank or DEFAULT_BATCH

    def remainder_as(self, best: Literal["join", "pad"]) -> Literal["join", "pad", "drop"]:
        """What to do with a remainder, where `best` is what `auto` means."""
        return best if self.remainder == "auto" else self.remainder

    def _check_engine(self) -> None:
        if self.xla and self.sync_batch_norm:
            raise ConfigError("xla compiles the forward pass, and sync_batch_norm needs a "
                              "collective within it. Leave one of the two out.")
        if self.engine != "allreduce":
            for name, (harmless, instead) in _OF_ALLREDUCE.items():
                if getattr(self, name) not in harmless:
                    raise ConfigError(
                        f"{name}={getattr(self, name)!r} belongs to engine 'allreduce'. Received: "
                        f"engine={self.engine!r}. {instead}")
        if self.engine == "ps" and (self.checkpoint_every_steps or self.checkpoint_every_s):
            raise ConfigError("Engine 'ps' writes checkpoints at the ends of epochs only. "
                              f"Received: checkpoint_every_steps={self.checkpoint_every_steps}, "
                              f"checkpoint_every_s={self.checkpoint_every_s:g}. Leave them out.")


def config_to_json(config: TrainConfig) -> str:
    """Settings as text, for another process."""
    return json.dumps(dataclasses.asdict(config), default=str)


def config_from_json(text: str) -> TrainConfig:
    """What `config_to_json` wrote."""
    values = json.loads(text)
    engines = {"ps": PsConfig(**values.pop("ps")), "tf": TfConfig(**values.pop("tf"))}
    return from_mapping(TrainConfig, {**values, **engines}, where="settings")


def check_hang_timeout(hang_timeout_s: float) -> None:
    """Refuse a limit that is no time.

    Raises:
        ConfigError: It is neither 0 nor in the range.
    """
    if hang_timeout_s != 0 and not 1 <= hang_timeout_s <= _LONGEST_HANG_S:
        raise ConfigError(f"hang_timeout_s must be 0 (no limit) or from 1 to {_LONGEST_HANG_S:,} "
                          f"seconds. Received: hang_timeout_s={hang_timeout_s}")


class _Reduction(Protocol):
    """What settings of a run and of one optimizer have in common."""

    @property
    def compression(self) -> Compression: ...
    @property
    def topk_ratio(self) -> float: ...
    @property
    def approximation_rank(self) -> int: ...
    @property
    def predivide(self) -> float: ...


def check_reduction(settings: _Reduction) -> None:
    """Refuse settings of the reduction of gradients that do not fit.

    Raises:
        ConfigError: A number is out of range, or two settings exclude each other.
    """
    ratio, predivide = settings.topk_ratio, settings.predivide
    if not 0 < ratio <= 1:
        raise ConfigError(f"topk_ratio must be above 0 and at most 1. Received: {ratio}")
    at_least(settings, "approximation_rank", 1)
    if not 0 < predivide <= _LARGEST_PREDIVIDE:
        raise ConfigError(f"predivide must be above 0 and at most {_LARGEST_PREDIVIDE:,}. "
                          f"Received: predivide={predivide}")
    if predivide != 1 and settings.compression in SUMMED_APART:
        raise ConfigError(
            f"predivide={predivide:g} has no meaning with compression={settings.compression!r}, "
            "which sums in float32 and divides once. Leave predivide out, or use compression "
            "'none' or 'fp16'.")

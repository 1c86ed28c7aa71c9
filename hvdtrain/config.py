"""Settings: frozen dataclasses are the only home of defaults; TOML and options fill them.

No TensorFlow here: the driver reads and checks settings before it starts a single rank.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hvdtrain.collective_names import COLLECTIVE_VARIABLE, CollectiveName
from hvdtrain.engine_config import EngineName, PsConfig, TfConfig
from hvdtrain.errors import ConfigError
from hvdtrain.settings import (
    check,
    fields_of,
    from_mapping,
    join,
    refuse_unknown,
    replace,
    setting,
    settings_in,
    table,
)

LR_SCALINGS = ("linear", "sqrt", "none")
Remainder = Literal["auto", "join", "pad", "drop"]
BatchMeaning = Literal["global", "per_rank"]
Divide = Literal["samples", "batches"]
DEFAULT_BATCH = 32
"""Samples per batch where nothing is given, as in Keras."""
Keep = Literal["global_batch", "batch_per_rank"]
Sparse = Literal["auto", "gather", "dense"]
Merge = Literal["sum", "none"]
Compression = Literal["none", "fp16", "bf16", "lowrank"]
SUMMED_APART = ("bf16", "lowrank")
"""Compressions whose sums are no allreduce: they are made in float32, and divided once."""
SETTINGS_VARIABLE = "HVDTRAIN_SETTINGS"
"""Set by `launch --set` for a script: JSON, values by the names of settings."""

_TRAINING, _BATCHES, _RATE = "Training", "Batches and data", "Learning rate"
_GRADIENTS, _FILES, _CHECKS = "Gradients", "Files", "Checks"
_ELASTIC = "Elastic training"
_PS, _TF = "Engine ps", "Engine tf"
GROUPS = (_TRAINING, _BATCHES, _RATE, _GRADIENTS, _FILES, _ELASTIC, _CHECKS, _PS, _TF)
"""The order in which settings are shown."""
_ALLREDUCE = ("allreduce",)

_training, _batches, _rate, _files, _checks = (
    partial(setting, group=group) for group in (_TRAINING, _BATCHES, _RATE, _FILES, _CHECKS))
_gradients = partial(setting, group=_GRADIENTS, engines=_ALLREDUCE)
_elastic = partial(setting, group=_ELASTIC, engines=_ALLREDUCE, instead="Leave it out: engine 'ps' "
                   "starts its roles again by itself, and engine 'tf' has no elastic training.")


@dataclass(frozen=True, kw_only=True)
class ReductionConfig:
    """Settings of gradients for both a run and a single optimizer."""

    sparse: Sparse = _gradients(
        "auto", "How gradients of embeddings travel. `gather` sends the rows that were used, "
        "`dense` the whole table, and `auto` decides by sizes and link.",
        see="optimizer.md#sparse-gradients")
    merge: Merge = _gradients(
        "sum", "What becomes of rows of embeddings that occur twice in a batch. `sum` adds them "
        "up, so that the result is that of the dense gradient. `none` leaves them apart as plain "
        "Keras does, which gives another result in adaptive optimizers and in clipping; the rows "
        "then always travel as they are.", see="optimizer.md#sparse-gradients")
    compression: Compression = _gradients(
        "none", "How gradients travel: whole, in half the bytes, or in part. `none` sends them as "
        "they are. `fp16` sums in float16, of gradients that were divided first; `bf16` sends "
        "bfloat16 and sums in float32; `lowrank` sends two thin matrices whose product a gradient "
        "nearly is, and adds what it has not sent to the next gradient.",
        instead="Leave it out; engine 'ps' has --ps-wire-dtype bfloat16.",
        see="optimizer.md#compression")
    approximation_rank: int = _gradients(
        16, "The highest rank that `lowrank` sends of a gradient. Less where that would be more "
        "than 4 % of the bytes of all.", least=1)
    predivide: float = _gradients(
        1.0, "Divide gradients by this before they are summed over N ranks, and by N over it "
        "afterwards.", above=0, most=1_000_000)

    def __post_init__(self) -> None:
        if str(self.compression) == "topk":
            raise ConfigError("compression='topk' was removed. Use compression='lowrank', which "
                              "sends as few bytes, and nearer gradients.")
        check(self)
        if self.merge == "none" and self.sparse == "dense":
            raise ConfigError("merge='none' keeps repeated rows apart, which a dense table cannot: "
                              "use sparse='gather' with it, or merge='sum'.")
        if self.predivide != 1 and self.compression in SUMMED_APART:
            raise ConfigError(
                f"predivide={self.predivide:g} has no meaning with compression="
                f"{self.compression!r}, which sums in float32 and divides once. Leave predivide "
                "out, or use compression 'none' or 'fp16'.")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ReductionConfig):
    """How to train. Equal on all ranks (compared at the start)."""

    epochs: int = _training(
        1, "Passes over the training data, counted from the beginning of the first run.", least=1)
    engine: EngineName = _training(
        "allreduce", "How an update happens: `allreduce`, parameter servers (`ps`), or a strategy "
        "of tf.distribute (`tf`).", see="engines.md")
    collective: CollectiveName = _training(
        "auto", "What reduces gradients. `auto` chooses by hosts, GPUs and starter.",
        engines=_ALLREDUCE, instead="Leave it out: TensorFlow itself moves the gradients.",
        see="starters.md#collectives")
    seed: int | None = _training(
        None, "Seeds weights, shuffling and dropout.", least=0, unset="0; in a script what it has "
        "seeded itself")
    xla: bool = _training(
        False, "Compile the gradients and the update of each step with XLA, the collectives "
        "between.", engines=_ALLREDUCE, see="optimizer.md")
    batch_per_rank: int | None = _batches(
        None, "Samples per step on each rank. The global batch is this times the number of ranks.",
        least=1, unset=f"{DEFAULT_BATCH}, unless `batch_global` is given", excludes="batch_global")
    batch_global: int | None = _batches(
        None, "Samples per step over all ranks, in place of `batch_per_rank`. The ranks need not "
        "divide it.", least=1, excludes="batch_per_rank", engines=_ALLREDUCE, instead="Give "
        "batch_per_rank.")
    batch: BatchMeaning = _batches(
        "global", "What the `batch_size` of Keras' `fit`, `evaluate` and `predict` means, and the "
        "batches of a data set that is given to them. `global`: samples over all ranks, each of "
        "which takes a part, so that the result is that of the script on one process; `per_rank`: "
        "samples on each.", script_only="it says what batch_size of model.fit means; a job gives "
        "batch_per_rank or batch_global.")
    shuffle: bool = _batches(
        True, "Reshuffle all samples before each epoch. The order follows from the seed and the "
        "number of the epoch; with `shard = \"file\"` each rank shuffles its own.")
    remainder: Remainder = _batches(
        "auto", "What to do when a batch does not divide by the ranks. `join` divides it as it is "
        "and weights each rank by its samples, as one process would train; `pad` repeats up to N-1 "
        "samples and `drop` leaves up to N-1 out, so that all ranks have as many. `auto` is "
        "`join`, and `pad` for a model of a fixed batch and for other engines.", engines=_ALLREDUCE,
        everywhere=("pad", "drop"), instead="Use remainder='pad' or 'drop'.")
    divide: Divide = _batches(
        "samples", "When a `tf.data` pipeline is divided over the ranks. `samples`: before its "
        "samples are decoded, where its steps allow it; `batches`: after its batches are made, by "
        "every rank, so that random augmentation is that of one process.", engines=_ALLREDUCE)
    lr_scaling: str = _rate(
        "linear", "Factor on the learning rate for N ranks: linear, sqrt, none, module:function. "
        "That is N (`linear`), the square root of N (`sqrt`), 1 (`none`), or what a function of "
        "yours gives for N (`module:function`).")
    warmup_epochs: float = _rate(
        0.0, "Rise from the unscaled to the scaled learning rate over so many epochs, step by "
        "step.", least=0)
    bucket_mb: float | None = _gradients(
        None, "Size of a group of gradients that travel together, in MiB.", above=0,
        unset="an eighth of all gradients, but from 1 to 32; within one host 32")
    zero: bool = _gradients(
        False, "Divide the state of the optimizer over the ranks (ZeRO-1).", see="zero.md")
    sync_batch_norm: bool = _gradients(
        False, "Let batch normalizations use the mean and variance of the samples of all ranks.",
        see="sync-batch-norm.md", instead="Leave it out; tf.distribute has its own: "
        "keras.layers.BatchNormalization(synchronized=True).")
    output: Path | None = _files(
        None, "Folder for checkpoints, final model, metrics.jsonl and TensorBoard log.",
        option="--output,-o", unset="`runs/<job>`; in a script nothing is written")
    checkpoint_every_epochs: int = _files(
        1, "Write a checkpoint after every so many epochs, and after the last. `0`: never.",
        least=0)
    checkpoint_every_steps: int = _files(
        0, "Write one more after every so many steps, also within an epoch. `0`: none.", least=0,
        engines=("allreduce", "tf"), instead="Leave it out: engine 'ps' writes checkpoints at the "
        "ends of epochs only.")
    checkpoint_every_s: float = _files(
        0.0, "Write one more within an epoch when so many seconds have gone by since the last. "
        "`0`: none.", least=0, option="--checkpoint-every-seconds", engines=("allreduce", "tf"),
        instead="Leave it out: engine 'ps' writes checkpoints at the ends of epochs only.")
    checkpoint_background: bool = _files(
        True, "Copy the model in memory and write the file while training goes on.")
    keep_checkpoints: int = _files(3, "So many of the newest checkpoints are kept.", least=1)
    resume: bool = _files(
        False, "Go on from the newest checkpoint in `output` that can be read.", option="--resume",
        excludes="overwrite")
    overwrite: bool = _files(
        False, "Delete what a former run left in `output`, instead of refusing to start.",
        option="--overwrite", excludes="resume")
    tensorboard: bool = _files(
        True, "Write a TensorBoard log, where the package `tensorboard` is installed.")
    timeline: Path | None = _files(
        None, "Write Horovod's timeline of all collectives to this file, on the chief. For "
        "`chrome://tracing` or Perfetto.", metavar="FILE", engines=_ALLREDUCE, instead="Leave it "
        "out: it is Horovod's.", see="optimizer.md")
    keep: Keep = _elastic(
        "global_batch", "What stays the same when ranks come or go. `global_batch`: the batch of "
        "all ranks and the factor of the learning rate are those of the first ranks, so that the "
        "result is that of an undisturbed run; `batch_per_rank`: each rank keeps its batch, and "
        "the rate follows `lr_scaling`.")
    commit_every_steps: int = _elastic(
        0, "Commit to the memory of each host after every so many steps. `0`: by time.", least=0)
    commit_every_s: float = _elastic(
        5.0, "Commit to the memory of each host when so many seconds have gone by since the last "
        "commit, and 50 times as many as it took. `0`: only before ranks come or go.", least=0,
        option="--commit-every-seconds")
    check_weights: bool = _checks(
        True, "Compare a checksum of all weights over the ranks after the first step and each "
        "epoch.")
    stop_on_nan: bool = _checks(True, "Stop when a loss is not finite, and name step and rank.")
    hang_timeout_s: float = _checks(
        300.0, "End the run where no rank has gone on, or one has not answered, for so many "
        "seconds, and name it. `0`: never.", least=1, most=1_000_000, off=0, metavar="SECONDS",
        see="failures.md#the-watchdog")
    ps: PsConfig = table(PsConfig, "Settings of engine `ps`.", group=_PS, engines=("ps",),
                         instead="Use engine 'ps', or leave it out.")
    tf: TfConfig = table(TfConfig, "Settings of engine `tf`.", group=_TF, engines=("tf",),
                         instead="Use engine 'tf', or leave it out.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_scaling not in LR_SCALINGS and ":" not in self.lr_scaling:
            raise ConfigError(f"lr_scaling must be one of {', '.join(map(repr, LR_SCALINGS))}, or "
                              f"'module:function'. Received: lr_scaling={self.lr_scaling!r}")
        if self.xla and self.sync_batch_norm:
            raise ConfigError("xla compiles the forward pass, and sync_batch_norm needs a "
                              "collective within it. Leave one of the two out.")
        if self.keep == "batch_per_rank" and self.batch_global is not None:
            raise ConfigError(
                "keep='batch_per_rank' keeps the batch of each rank, and batch_global fixes that "
                f"of all. Received: batch_global={self.batch_global}. Give batch_per_rank, or "
                "leave keep out.")
        for name, field in fields_of(TrainConfig).items():
            value = getattr(self, name)
            if name not in ("ps", "tf") and value not in (field.default, *field.everywhere):
                field.check_engine(value, self.engine)

    def rank_batch(self, size: int) -> int:
        """Samples per step on a rank of `size`; where ranks differ, the maximum."""
        if self.batch_global is not None:
            return -(-self.batch_global // size)
        return self.batch_per_rank or DEFAULT_BATCH

    def remainder_as(self, best: Literal["join", "pad"]) -> Literal["join", "pad", "drop"]:
        """The remainder setting, where `auto` means `best`."""
        return best if self.remainder == "auto" else self.remainder

    def with_options(self, changes: Mapping[str, Any]) -> TrainConfig:
        """A copy with settings given for this run, by name; refuses what would be ignored."""
        changed = replace(self, **changes)
        for name, value in changes.items():
            if "." in name:
                settings_in(TrainConfig)[name].check_engine(value, changed.engine)
        return changed

    def as_launched(self, environ: Mapping[str, str]) -> TrainConfig:
        """A script's settings merged with the launcher's; ConfigError where both differ."""
        text = environ.get(SETTINGS_VARIABLE, "{}")
        try:
            given = dict(json.loads(text))
        except (ValueError, TypeError):
            raise ConfigError(f"{SETTINGS_VARIABLE} holds no settings in JSON. Received: {text!r}. "
                              "Use hvdtrain launch --set NAME=VALUE, which writes it.") from None
        refuse_unknown(given, settings_in(TrainConfig), where=SETTINGS_VARIABLE)
        if environ.get(COLLECTIVE_VARIABLE, "auto") != "auto":
            given["collective"] = environ[COLLECTIVE_VARIABLE]
        return join(self, given, mine="the script", theirs="The options of the launcher")


def config_to_json(config: TrainConfig) -> str:
    """Settings as text, for another process."""
    return json.dumps(dataclasses.asdict(config), default=str)


def config_from_json(text: str) -> TrainConfig:
    """What `config_to_json` wrote."""
    values = json.loads(text)
    engines = {"ps": PsConfig(**values.pop("ps")), "tf": TfConfig(**values.pop("tf"))}
    return from_mapping(TrainConfig, {**values, **engines}, where="settings")

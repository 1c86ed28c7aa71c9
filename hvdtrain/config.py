"""Settings: frozen dataclasses are the only home of defaults; TOML and options fill them.

No TensorFlow here: the driver reads and checks settings before it starts a single rank.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hvdtrain.engine_config import EngineName, PsConfig, TfConfig
from hvdtrain.errors import ConfigError
from hvdtrain.settings import at_least, check_types, from_mapping

LrScaling = Literal["linear", "sqrt", "none"]
Remainder = Literal["pad", "drop"]
Sparse = Literal["gather", "dense"]
CollectiveName = Literal["auto", "horovod-gloo", "horovod-mpi", "mpi4py", "single"]

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
    engine: EngineName = "allreduce"
    """How an update happens: `allreduce`, parameter servers (`ps`), or a strategy of
    tf.distribute (`tf`)."""
    ps: PsConfig = field(default_factory=PsConfig)
    """Settings of engine `ps`."""
    tf: TfConfig = field(default_factory=TfConfig)
    """Settings of engine `tf`."""

    def __post_init__(self) -> None:
        if isinstance(self.output, str):
            object.__setattr__(self, "output", Path(self.output))
        check_types(self)
        for name in ("batch_per_rank", "epochs", "keep_checkpoints"):
            at_least(self, name, 1)
        for name in ("checkpoint_every_epochs", "warmup_epochs", "seed"):
            at_least(self, name, 0)
        check_hang_timeout(self.hang_timeout_s)
        if self.bucket_mb <= 0:
            raise ConfigError(f"bucket_mb must be positive. Received: bucket_mb={self.bucket_mb}")
        if self.resume and self.overwrite:
            raise ConfigError("resume and overwrite exclude each other; give one of them.")
        if self.resume and self.output is None:
            raise ConfigError("resume needs the output folder of the run to go on with: give "
                              "output (on the command line: --output DIR).")


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

"""The evaluator: evaluates each checkpoint when it appears, beside the training (side-car).

It is in no connection with the other roles: it looks into the output folder, which must be on a
file system that the chief's host and its own share.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.config import TrainConfig
from hvdtrain.data.pipeline import evaluation_dataset
from hvdtrain.data.source import splits_of
from hvdtrain.data.stream import one_sample
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.job import Job
from hvdtrain.log import get_logger
from hvdtrain.train.checkpoint import CheckpointStore
from hvdtrain.train.checkpoint_file import read_state
from hvdtrain.train.prepare import build_model

FILE = "evaluation.jsonl"
_POLL_S = 0.5


def evaluate_checkpoints(job: Job, config: TrainConfig, ended: threading.Event,
                         former: set[tuple[str, int]]) -> None:
    """Evaluate until the training has ended and no checkpoint is left.

    Writes one line of JSON per checkpoint to `evaluation.jsonl` in the output folder: `epoch`,
    `step`, and the metrics of the validation data.

    Args:
        job: Model and validation data.
        config: Settings.
        ended: Set when the training has ended.
        former: Name and time of change of the checkpoints that are not of this run.

    Raises:
        ConfigError: There is nothing to evaluate, or nowhere to look.
    """
    if config.output is None or not config.checkpoint_every_epochs:
        raise ConfigError("The evaluator reads checkpoints. Give --output and "
                          "--checkpoint-every-epochs 1 or more, or leave --evaluator out.")
    keras.utils.set_random_seed(config.seed or 0)
    splits = splits_of(job.data())
    if splits.validation is None:
        raise ConfigError("The evaluator has no validation data: the job's data() gives none. "
                          "Return DataSplits(train=..., validation=...), or leave --evaluator out.")
    model = job.model()
    build_model(model, lambda: one_sample(splits.train))
    dataset = evaluation_dataset(splits.validation, np.arange(len(splits.validation)),
                                 config.rank_batch(1))
    store = CheckpointStore(config.output / "checkpoints", keep=config.keep_checkpoints)
    file = config.output / FILE
    seen = _known(file)
    while True:
        is_last = ended.is_set()
        for path in store.paths():
            if path.name not in seen and (path.name, _changed(path)) not in former:
                seen.add(path.name)
                _evaluate(model, dataset, path, file)
        if is_last:
            return
        ended.wait(_POLL_S)


def _changed(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _known(file: Path) -> set[str]:
    if not file.is_file():
        return set()
    return {json.loads(line)["checkpoint"] for line in file.read_text().splitlines() if line}


def _evaluate(model: Any, dataset: Any, path: Path, file: Path) -> None:
    try:
        state = read_state(path)
        model.load_weights(path)
    except (CheckpointError, OSError) as error:
        # The chief keeps only the newest ones, and may have been faster.
        get_logger().warning("%s was not evaluated: %s", path.name, error)
        return
    figures = {name: float(value) for name, value in model.evaluate(
        dataset, verbose=0, return_dict=True).items()}
    line = {"checkpoint": path.name, "epoch": state.epoch, "step": state.step, **figures}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    get_logger().info("epoch %d: %s", state.epoch, shown)

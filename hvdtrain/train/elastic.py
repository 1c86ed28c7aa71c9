"""Elastic training, on the ranks: where a training begins in this world, and what stays the same.

After a change of ranks the launcher ends all of them and starts new ones, a *world*. These begin
the program anew and go on from the newest commit; `writers.Commits` writes them. A commit belongs
to the n-th training of a script: trainings before it that have no checkpoints are done again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.collectives.base import Array
from hvdtrain.commit_names import CHANGE, COMMITS_VARIABLE, FIRST_VARIABLE, WORLD_VARIABLE
from hvdtrain.config import TrainConfig
from hvdtrain.errors import CheckpointError, ConfigError, WorldError
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_model, keras_seam, state
from hvdtrain.optim.zero import exchanges
from hvdtrain.train.checkpoint import CheckpointStore, RunState
from hvdtrain.train.chief import on_chief
from hvdtrain.train.commits import CommitStore
from hvdtrain.world import World

_ADVICE = "Use keep=\"batch_per_rank\", which keeps that of each rank."


@dataclass(kw_only=True)
class Elastic:
    """This rank of an elastic job, in the `Session`; `writes` the commits of its host or not."""

    store: CommitStore
    world: int
    writes: bool
    one_host: bool
    first_ranks: int  # those of the first world
    resumes: bool = field(init=False)  # this world follows another
    trainings: int = 0  # that were begun by this process
    steps: int = 0  # of all worlds

    def __post_init__(self) -> None:
        self.resumes = self.world > 1 or self.store.newest() is not None

    @classmethod
    def of(cls, environ: Mapping[str, str], world: World) -> Elastic | None:
        """What the launcher asks for, if it does; WorldError where it cannot be understood."""
        folder, number = environ.get(COMMITS_VARIABLE), environ.get(WORLD_VARIABLE, "")
        if folder is None:
            return None
        if not Path(folder).is_dir() or not number.isdecimal() or int(number) < 1:
            raise WorldError(
                f"{COMMITS_VARIABLE} must be a folder of this host, and {WORLD_VARIABLE} a number "
                f"from 1. Received: {folder!r} and {number!r}. The launcher sets both; do not set "
                "them yourself.")
        first = environ.get(FIRST_VARIABLE, "")
        return cls(store=CommitStore(Path(folder)), world=int(number),
                   writes=world.local_rank == 0, one_host=world.local_size == world.size,
                   first_ranks=int(first) if first.isdecimal() else world.size)

    @property
    def change_asked(self) -> bool:
        """Whether the launcher asks this host's ranks to commit and end."""
        return (self.store.folder / CHANGE).exists()


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a training begins in this world; equal on all ranks. Empty if it is not elastic."""

    elastic: Elastic | None = None
    resumes: bool = False
    commits: bool = False  # not while a training is done again
    commit: int | None = None  # to go on from
    ranks: int | None = None  # of the world that wrote it, or a checkpoint
    batch_ranks: int | None = None  # the global batch, and the rate, are those of as many ranks

    def settings(self, config: TrainConfig) -> TrainConfig:
        """The settings of this world."""
        return dataclasses.replace(config, resume=True, overwrite=False) if self.resumes else config

    def check_batch(self, config: TrainConfig, *, per_rank: bool) -> None:
        """Refuse to keep the batch of each rank where a script gives that of all."""
        if self.elastic is not None and config.keep == "batch_per_rank" and not per_rank:
            raise ConfigError(
                "keep=\"batch_per_rank\" keeps the batch of each rank, but batch_size is that of "
                "all ranks. Give hvdtrain.TrainConfig(batch=\"per_rank\", ...), or leave keep out.")

    def check_model(self, config: TrainConfig, model: Any) -> None:
        """Refuse to begin what other ranks could not go on with."""
        if self.elastic is None or config.keep != "global_batch":
            return
        if keras_model.fixed_batch(model) is not None:
            raise ConfigError("The model takes batches of one size only, so that other ranks "
                              f"cannot keep the global batch when ranks come or go. {_ADVICE}")
        if config.remainder in ("pad", "drop"):
            raise ConfigError(f"remainder={config.remainder!r} needs a batch that divides by the "
                              "ranks, and a global batch that is kept need not divide by others. "
                              f"Leave remainder out. Or: {_ADVICE}")

    def describe(self, config: TrainConfig, size: int) -> str:
        """A line of the plan; empty if the training is not elastic."""
        if self.elastic is None:
            return ""
        was = "" if self.ranks in (None, size) else f", was {self.ranks}"
        stays = (f"global batch and learning rate are those of {self.batch_ranks or size}"
                 if config.keep == "global_batch" else "each rank keeps its batch")
        return f"world {self.elastic.world}: {size} rank{'s' * (size > 1)}{was}; {stays}"


def origin_of(session: Any, config: TrainConfig) -> Origin:
    """Where the next training begins; counts the trainings of a script. All ranks."""
    elastic: Elastic | None = session.elastic
    if elastic is None:
        return Origin()
    elastic.trainings += 1
    found, elastic.steps = on_chief(session.collective, lambda: _found(elastic, config))
    return Origin(elastic=elastic, **found)


def _found(elastic: Elastic, config: TrainConfig) -> tuple[dict[str, Any], int]:
    """The fields of `Origin`, and the steps done until now. The chief only."""
    steps, about = elastic.store.newest(), {"training": 0}
    if steps is not None:
        try:
            about = elastic.store.about(steps)
        except CheckpointError as error:
            _warn_of_commit(error)
    ahead = about["training"] - elastic.trainings
    if ahead > 0:
        get_logger().warning(
            "The commit is of training %d of this script. Training %d was ended before it: it is "
            "taken from its output folder, or done again where it has none.",
            about["training"], elastic.trainings)
    resumes = elastic.resumes or config.resume
    former: Any = about["state"] if ahead == 0 else _newest_checkpoint(config) if resumes else None
    batch_ranks = (former.batch_ranks or former.ranks) if former is not None else (
        elastic.first_ranks if elastic.world > 1 else None)
    return {"resumes": resumes, "commits": ahead <= 0, "commit": steps if ahead == 0 else None,
            "ranks": former and former.ranks,
            "batch_ranks": batch_ranks if config.keep == "global_batch" else None,
            }, max(steps or 0, elastic.steps)


def _newest_checkpoint(config: TrainConfig) -> RunState | None:
    if config.output is None:
        return None
    return CheckpointStore(config.output / "checkpoints", keep=1).newest_state()


def _warn_of_commit(error: CheckpointError) -> None:
    get_logger().warning("%s The newest checkpoint is used instead, if there is one; else the "
                         "training begins anew.", error)


def values_of(model: Any) -> Iterator[tuple[str, Array]]:
    """What a commit has of a model and its optimizers; divided state within `consolidated`."""
    # Each value is only valid until the next one is asked for.
    for variable in state.state_without_seeds(model):
        yield keras_seam.variable_path(variable), _memory_of(variable)
    for number, exchange in enumerate(exchanges(keras_seam.optimizers_of(model))):
        for place, value in enumerate(exchange.values()):
            yield f"divided optimizer {number}, variable {place}", np.asarray(value, order="C")


def _memory_of(variable: Any) -> Array:
    """The value of a variable, where possible without a copy."""
    try:
        found = np.asarray(memoryview(variable.value.read_value()))
    except (ValueError, TypeError, AttributeError):  # bfloat16, a GPU, a variable of TensorFlow
        found = np.asarray(variable.numpy())
    return np.asarray(found, order="C")


def load_commit(store: CommitStore, steps: int, model: Any) -> RunState | None:
    """Load a commit into a built, compiled model; None, with a warning, if that cannot be done.

    The chief only; the others get its variables and parts by `broadcast_variables` and
    `share_loaded`.
    """
    variables = state.state_without_seeds(model)
    divided = exchanges(keras_seam.optimizers_of(model))
    try:
        about, arrays = store.about(steps), store.arrays(steps)
        _check_fit(variables, sum(each.count for each in divided), arrays)
    except CheckpointError as error:
        _warn_of_commit(error)
        return None
    values = [array for _, array in arrays]
    for variable, value in zip(variables, values, strict=False):
        variable.assign(np.array(value))  # a copy: TensorFlow may keep the memory it is given
    left = iter(values[len(variables):])
    for each in divided:
        each.loaded = [np.array(next(left)) for _ in range(each.count)]
        each.take(each.loaded)
    found: RunState = about["state"]
    return found


def _check_fit(variables: list[Any], divided: int, arrays: list[tuple[str, Array]]) -> None:
    """CheckpointError unless there is an array for each variable."""
    wanted = len(variables) + divided
    if wanted != len(arrays):
        raise CheckpointError(f"The commit has {len(arrays)} arrays, and model and optimizer of "
                              f"this job {wanted} variables: the job was changed.")
    for variable, (name, array) in zip(variables, arrays, strict=False):
        form, dtype = state.described(variable)
        if (form, dtype) != (array.shape, array.dtype.name):
            raise CheckpointError(
                f"The commit has {name} with shape {array.shape} and type {array.dtype.name}, and "
                f"this job {keras_seam.variable_path(variable)} with {form} and {dtype}: the job "
                "was changed.")

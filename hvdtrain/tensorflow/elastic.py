"""State that is copied from rank 0, committed to memory and restored; and `run`.

In an elastic job (docs/elastic.md) ranks and hosts come and go between *worlds*: all ranks end, and
new ones run the script again from its top. `run` then sets the state to the newest commit, which is
in memory that outlives the ranks. In any other job the ranks stay the same, and where one fails the
job ends with its error.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.commit_names import CHANGE, COMMITS_VARIABLE, ENDING_VARIABLE, WORLD_VARIABLE
from hvdtrain.errors import EXIT_STOPPED, CheckpointError, CollectiveError, ConfigError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.state import seed_variables, state_without_seeds
from hvdtrain.tensorflow import current
from hvdtrain.tensorflow.basics import init, shutdown
from hvdtrain.tensorflow.current import rank
from hvdtrain.tensorflow.functions import (
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    written,
)
from hvdtrain.train.commits import CommitStore

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State",
           "TensorFlowKerasState", "TensorFlowState", "broadcast_object", "broadcast_object_fn",
           "broadcast_variables", "init", "rank", "run", "run_fn", "shutdown"]


_trainings = itertools.count()


class HorovodInternalError(CollectiveError):
    """A collective has failed. A failing rank ends the job, so `run` does not catch it."""


class HostsUpdatedInterrupt(CollectiveError):
    """The hosts of the job have changed."""


class State:
    """What all ranks have alike. A subclass has `save`, `restore` and `sync`.

    Args:
        bcast_object: Function that returns rank 0's value of its argument on all ranks.
        get_rank: Function that returns the rank of this process.
    """

    def __init__(self, bcast_object: Callable[[Any], Any] = broadcast_object,
                 get_rank: Callable[[], int] = rank) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0
        self._training = 0  # the number of this call of `run` in the script
        self._is_newest = True  # no commit is of a later one, which a former world has reached

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions that `on_reset` calls."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset`, and the functions that were registered."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep a copy of the state in memory, for `restore`, and for the next world. All ranks.

        Where hosts are added or leave, the process then ends, to go on from here.
        """
        self.save()
        folder = _folder() if self._is_newest else None
        if folder is not None and os.environ["HOROVOD_LOCAL_RANK"] == "0":
            self._commits += 1
            values, arrays = self.kept()
            CommitStore(folder).write(
                self._commits, written((self._training, values)), arrays)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """End the process if hosts are added to the job or leave it. All ranks.

        What was not committed is lost. In a job that is not elastic it does nothing.
        """
        folder = _folder()
        if folder is not None and any(current.session().collective.gather_objects(
                (folder / CHANGE).exists() or ENDING_VARIABLE in os.environ)):
            raise SystemExit(EXIT_STOPPED)

    def kept(self) -> tuple[Any, list[tuple[str, Any]]]:
        """What was saved: a value that pickle can write, and arrays by name."""
        raise ConfigError(f"{type(self).__name__} cannot be kept from one world of an elastic job "
                          "to the next. Derive it from ObjectState, or give it kept() and take().")

    def take(self, values: Any, arrays: Mapping[str, Any]) -> None:
        """Set the state to what `kept` gave in a former world."""
        raise NotImplementedError

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Set the state to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Set the state of all ranks to that of rank 0, and save it. All ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Make anew what depends on the ranks; by default nothing."""


class ObjectState(State):
    """Python values, as attributes.

    Args:
        bcast_object: As for `State`.
        get_rank: As for `State`.
        **kwargs: The values, by the names of the attributes.
    """

    def __init__(self, bcast_object: Callable[[Any], Any] = broadcast_object,
                 get_rank: Callable[[], int] = rank, **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        """See `State.save`."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """See `State.restore`."""
        self._set_attrs()

    def sync(self) -> None:
        """See `State.sync`."""
        if self._saved_state:
            self.save()
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def kept(self) -> tuple[Any, list[tuple[str, Any]]]:
        """See `State.kept`."""
        return self._saved_state, []

    def take(self, values: Any, arrays: Mapping[str, Any]) -> None:
        """See `State.take`."""
        del arrays
        self._saved_state = {**self._saved_state, **values}
        self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class TensorFlowState(ObjectState):
    """Variables, and Python values as attributes.

    Args:
        variables: Sequence of variables, in the same order on all ranks.
        session: Not used: there are no sessions in TensorFlow 2.
        **kwargs: As for `ObjectState`.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None,
                 **kwargs: Any) -> None:
        del session
        if variables is None:
            raise ConfigError("TensorFlow 2 has no collection of all variables. Write "
                              "TensorFlowState(variables=[...]).")
        self.variables = list(variables)
        super().__init__(**kwargs)
        self._save_variables()

    def _tracked(self) -> list[Any]:
        """The variables that are saved and restored."""
        return self.variables

    def _shared(self) -> list[Any]:
        """Those of them that are copied from rank 0."""
        return self._tracked()

    def _save_variables(self) -> None:
        self._values = [(v, tf.identity(tf.convert_to_tensor(v))) for v in self._tracked()]

    def save(self) -> None:
        """See `State.save`."""
        self._save_variables()
        super().save()

    def kept(self) -> tuple[Any, list[tuple[str, Any]]]:
        """See `State.kept`."""
        return self._saved_state, [(str(number), np.asarray(value, order="C"))
                                   for number, (_, value) in enumerate(self._values)]

    def take(self, values: Any, arrays: Mapping[str, Any]) -> None:
        """See `State.take`."""
        tracked = self._tracked()
        if [tuple(v.shape) for v in tracked] != [array.shape for array in arrays.values()]:
            raise CheckpointError(
                f"The commit has {len(arrays)} variables, this script {len(tracked)} or others. "
                "The script must make the same model in each world.")
        for variable, array in zip(tracked, arrays.values(), strict=True):
            variable.assign(array)
        super().take(values, arrays)

    def restore(self) -> None:
        """See `State.restore`."""
        for variable, value in self._values:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """See `State.sync`."""
        broadcast_variables(self._shared(), root_rank=0)
        self._save_variables()
        super().sync()


class TensorFlowKerasState(TensorFlowState):
    """The variables of a Keras model and its optimizer, and Python values as attributes.

    `sync` copies all but what is each rank's own: local variables and the states of random
    generators.

    Args:
        model: A built Keras model.
        optimizer: Its optimizer, where the model is not compiled with it.
        backend: Not used.
        **kwargs: As for `ObjectState`.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None,
                 **kwargs: Any) -> None:
        del backend
        if not model.built:
            raise ConfigError("The model must be built before its state is kept. Call "
                              "model.build(input_shape), or the model with a batch.")
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        super().__init__(variables=(), **kwargs)

    def _build(self) -> None:
        if self.optimizer is not None and not self.optimizer.built:
            keras_seam.build(self.optimizer, self.model.trainable_variables)

    def _tracked(self) -> list[Any]:
        self._build()
        of_optimizer = [] if self.optimizer is None else self.optimizer.variables
        return list({id(v): v for v in [*self.model.variables, *of_optimizer]}.values())

    def _shared(self) -> list[Any]:
        self._build()
        found = state_without_seeds(self.model)
        known = {id(v) for v in found}
        if self.optimizer is not None and keras_seam.optimizers_of(self.model) != [self.optimizer]:
            found += [v for v in keras_seam.shared_variables(self.optimizer) if id(v) not in known]
        seeds = {id(v) for v in seed_variables(found)}
        return [v for v in found if id(v) not in seeds]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the function that trains: its first argument, a `State`, is first made alike.

    An error of `func` is never swallowed: it ends this rank, and with it the job.
    """
    return run_fn(func, lambda: None)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """As `run`; `reset` is Horovod's, and not called: a new world begins with new processes."""
    del reset

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        current.session()  # refuses before `init`
        _go_on(state)
        state.sync()
        return func(state, *args, **kwargs)
    return wrapper


def _folder() -> Path | None:
    """The folder of commits of an elastic job."""
    found = os.environ.get(COMMITS_VARIABLE)
    return Path(found) if found else None


def _go_on(state: State) -> None:
    """Set rank 0's state to the newest commit, and the number of commits on all. All ranks."""
    folder = _folder()
    if folder is None:
        return
    state._training, number, training, store = next(_trainings), 0, 0, CommitStore(folder)
    if current.rank() == 0 and (newest := store.newest()) is not None:
        number = newest
        training, values = pickle.loads(store.about(newest))  # noqa: S301 - of this script
        if training == state._training:
            state.take(values, dict(store.arrays(newest)))
    state._commits, training = current.session().collective.gather_objects((number, training))[0]
    state._is_newest = training <= state._training
    if os.environ.get(WORLD_VARIABLE, "1") != "1":
        state.on_reset()

"""State that is copied from rank 0, committed to memory and restored; and `run`.

The ranks of a job do not change while it runs: where one fails the job ends, with its error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.errors import CollectiveError, ConfigError
from hvdtrain.optim import keras_seam
from hvdtrain.optim.state import seed_variables, state_without_seeds
from hvdtrain.tensorflow import current
from hvdtrain.tensorflow.basics import init, shutdown
from hvdtrain.tensorflow.current import rank
from hvdtrain.tensorflow.functions import (
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State",
           "TensorFlowKerasState", "TensorFlowState", "broadcast_object", "broadcast_object_fn",
           "broadcast_variables", "init", "rank", "run", "run_fn", "shutdown"]


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

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions that `on_reset` calls."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset`, and the functions that were registered."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep a copy of the state in memory, for `restore`."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: the hosts of a job do not change."""

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
    """As `run`; `reset` is Horovod's, and not called, since the ranks of a job do not change."""
    del reset

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        current.session()  # refuses before `init`
        state.sync()
        return func(state, *args, **kwargs)
    return wrapper

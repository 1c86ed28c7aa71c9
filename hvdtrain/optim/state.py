"""Variables over ranks: broadcast, averaged, and a checksum that finds ranks that differ."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.errors import RanksDifferError
from hvdtrain.optim import keras_model, keras_seam

SEED_STRIDE = 7919
"""Added to dropout seeds once per rank: after a broadcast all ranks would drop the same units."""


def training_state(model: Any) -> list[Any]:
    """Every variable that a training step reads or writes on all ranks: model, optimizer, seeds.

    Returns:
        A list of Keras variables without duplicates, in an order that depends on the model only.
        Without those that each rank has for itself.
    """
    found: dict[int, Any] = {}
    own = {id(v) for v in [*local_variables(model), *keras_model.states_of_samples(model)]}
    for variable in [*model.variables, *keras_seam.variables_of(keras_seam.optimizers_of(model)),
                     keras_seam.global_seed_variable()]:
        if not keras_seam.is_divided(variable) and id(variable) not in own:
            found.setdefault(id(variable), variable)
    return list(found.values())


def local_variables(model: Any) -> list[Any]:
    """Weights, and their state, that each rank has for itself (`ReducerOptions`)."""
    optimizers = keras_seam.optimizers_of(model)
    shared = {id(v) for v in keras_seam.shared_weights(optimizers, model.variables)}
    return [*(v for v in model.variables if id(v) not in shared),
            *(v for leaf in keras_seam.leaf_optimizers(optimizers)
              for v in keras_seam.local_slots(leaf))]


def broadcast(collective: Collective, variables: Sequence[Any], *, root: int = 0) -> int:
    """Copy the values of rank `root` to all ranks. All ranks must call it.

    Args:
        collective: The collective to use.
        variables: Sequence of Keras or TensorFlow variables, in the same order on all ranks.
        root: Integer, the rank whose values are copied.

    Returns:
        The number of bytes sent.

    Raises:
        RanksDifferError: The ranks hold different structures; the first difference is named.
    """
    if collective.size == 1:
        return 0
    _compare_structure(collective, variables)
    arrays = [_value(v) for v in variables]
    flat = np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
                          or [np.empty(0, np.uint8)])
    received = collective.broadcast_array(flat, root=root)
    start = 0
    for variable, array in zip(variables, arrays, strict=True):
        part = received[start:start + array.nbytes].view(array.dtype).reshape(array.shape)
        start += array.nbytes
        if collective.rank != root:
            variable.assign(part)
    return int(flat.nbytes)


def _compare_structure(collective: Collective, variables: Sequence[Any]) -> None:
    mine = [(tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables]
    everyone = collective.gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        where = next((i for i, (a, b) in enumerate(zip(everyone[0], theirs, strict=False))
                      if a != b), min(len(everyone[0]), len(theirs)))
        at = [s[where] if where < len(s) else "nothing" for s in (everyone[0], theirs)]
        raise RanksDifferError(
            f"The ranks built different models: rank 0 has {len(everyone[0])} variables, rank "
            f"{rank} has {len(theirs)}; the first difference is variable {where}: {at[0]} on "
            f"rank 0, {at[1]} on rank {rank}. Build the model from the same settings on all "
            "ranks; nothing in it may depend on the rank.")


def _value(variable: Any) -> np.ndarray[Any, Any]:
    return np.asarray(variable.numpy())


def seed_variables(variables: Iterable[Any]) -> list[Any]:
    """The states of seed generators among `variables`."""
    return [v for v in variables
            if "seed_generator_state" in getattr(v, "path", "") and tuple(v.shape) == (2,)]


def seeds_of(variables: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """The seeds and counters of all seed generators among `variables`, as plain numbers."""
    return tuple((int(a), int(b)) for a, b in map(_value, seed_variables(variables)))


def restore_seeds(variables: Iterable[Any], seeds: Sequence[tuple[int, int]]) -> None:
    """Set the seed generators among `variables`; nothing if their number is another one."""
    found = seed_variables(variables)
    if len(found) == len(seeds):
        for variable, seed in zip(found, seeds, strict=True):
            variable.assign(np.asarray(seed, _value(variable).dtype))


def seed_dropout(model: Any, seed: int | None) -> None:
    """Draw the seeds of a model's generators (dropout) from one seed; None leaves them as they are.

    Keras' global generator too, from which layers without a seed draw. Every rank, before a
    broadcast.
    """
    if seed is None:
        return
    generators = seed_variables([*model.variables, keras_seam.global_seed_variable()])
    for number, variable in enumerate(generators):
        drawn = np.random.default_rng([seed, number]).integers(1 << 31)
        variable.assign(np.asarray([drawn, 0], _value(variable).dtype))


def fold_rank_into_seeds(variables: Iterable[Any], rank: int) -> None:
    """Give each rank its own dropout masks. Call after `broadcast`; rank 0 keeps its seeds."""
    if rank == 0:
        return
    for variable in seed_variables(variables):
        state = _value(variable).copy()
        state[0] += np.asarray(rank * SEED_STRIDE).astype(state.dtype)
        variable.assign(state)


def check_same_model(collective: Collective, model: Any) -> None:
    """Refuse to evaluate models that differ between the ranks. All ranks must call it.

    Raises:
        TrainingError: On every rank, naming the ranks and the first variable in which they do.
    """
    own = {id(v) for v in [*local_variables(model), *keras_model.states_of_samples(model)]}
    check_equal(collective, [v for v in model.weights if id(v) not in own],
                found="The ranks hold different models",
                advice="Each rank evaluates its share of the samples, so the result would be a "
                       "mixture. Load the same file on all ranks, or copy the chief's: "
                       "hvdtrain.broadcast_variables(model.weights)")


def average_accumulators(collective: Collective, optimizer: Any) -> None:
    """Give all ranks the mean of the gradients that wait for the next update. All ranks.

    Of an accumulation that is open. The mean over ranks of the next update stays what it is, and
    a file of the chief holds all of it.
    """
    if collective.size == 1:
        return
    open_ones = keras_seam.open_accumulators(optimizer)
    if open_ones:
        means = collective.reduce([tf.convert_to_tensor(v) for v in open_ones],
                                  name="hvdtrain.accumulators", op="average")
        for variable, mean in zip(open_ones, means, strict=True):
            variable.assign(mean)


def gather_states_of_samples(collective: Collective, model: Any) -> tuple[Any, ...]:
    """What stateful layers keep of the samples of all ranks. All ranks.

    Returns:
        Arrays of shape `(ranks * batch, ...)`, rank after rank.
    """
    mine = [_value(v) for v in keras_model.states_of_samples(model)]
    if not mine:
        return ()
    everyone = collective.gather_objects(mine)
    return tuple(np.concatenate([theirs[i] for theirs in everyone]) for i in range(len(mine)))


def restore_states_of_samples(model: Any, arrays: Sequence[Any], *, rank: int, size: int) -> bool:
    """Go on from what `gather_states_of_samples` gave. Every rank.

    Returns:
        False, and nothing is done, where the batch of all ranks has another size.
    """
    variables = keras_model.states_of_samples(model)
    if [(v.shape[0] * size, *v.shape[1:]) for v in variables] != [a.shape for a in arrays]:
        return False
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array[rank * variable.shape[0]:(rank + 1) * variable.shape[0]])
    return True


def average_statistics(collective: Collective, model: Any) -> int:
    """Give all ranks the mean of what layers have gathered about their data. All ranks.

    That is each float weight that no gradient updates and that differs between the ranks:
    moving means and variances, but not those of layers that each rank has for itself, nor the
    states that a stateful layer keeps of its samples. One that is equal on all ranks stays as it
    is, bit for bit. The mean of the ranks' variances leaves out how far their means lie apart.

    Args:
        collective: The collective to use.
        model: A built model, of the same structure on all ranks.

    Returns:
        How many variables were averaged; equal on all ranks.
    """
    if collective.size == 1:
        return 0
    own = {id(v) for v in [*local_variables(model), *keras_model.states_of_samples(model)]}
    found = [v for v in model.non_trainable_weights if id(v) not in own
             and keras.backend.is_float_dtype(keras.backend.standardize_dtype(v.dtype))]
    everyone = collective.gather_objects(digests(found).values)
    differing = [v for i, v in enumerate(found) if any(
        values[i] != everyone[0][i] for values in everyone)]
    if differing:
        means = collective.reduce(
            [tf.constant(_value(v).astype(np.float64)) for v in differing],
            name="hvdtrain.statistics", op="average")
        for variable, mean in zip(differing, means, strict=True):
            variable.assign(mean.numpy().astype(_value(variable).dtype))
    return len(differing)


_DRIFTED = (
    "Something updates weights on one rank only (a callback, a custom train_step that bypasses "
    "the optimizer, or different library versions on the hosts). Training was stopped; the last "
    "checkpoint is from before.")


@dataclass(frozen=True, kw_only=True)
class Digests:
    """One CRC-32 per variable."""

    names: tuple[str, ...]
    values: tuple[int, ...]


def digests(variables: Sequence[Any]) -> Digests:
    """Checksum each variable, bit for bit."""
    return Digests(
        names=tuple(str(getattr(v, "path", v.name)) for v in variables),
        values=tuple(zlib.crc32(np.ascontiguousarray(_value(v)).reshape(-1).view(np.uint8).data)
                     for v in variables))


def check_equal(collective: Collective, variables: Sequence[Any], *, when: str = "",
                found: str = "The ranks no longer hold the same weights",
                advice: str = "") -> None:
    """Stop where ranks hold different values. All ranks must call it.

    Args:
        collective: The collective to use.
        variables: Sequence of variables that must be bitwise equal on all ranks: weights that
            gradients update, and the optimizer's.
        when: String for the message, e.g. `"after step 1"`.
        found: String, begins the message: what differs.
        advice: String, ends it: what to do.

    Raises:
        RanksDifferError: On every rank, naming the ranks that differ from the majority and the
            first variable in which they do.
    """
    if collective.size == 1:
        return
    mine = digests(variables)
    everyone: list[tuple[int, ...]] = collective.gather_objects(mine.values)
    majority = Counter(everyone).most_common(1)[0][0]
    odd = [rank for rank, values in enumerate(everyone) if values != majority]
    if not odd:
        return
    first = next(i for i, (a, b) in enumerate(zip(majority, everyone[odd[0]], strict=True))
                 if a != b)
    raise RanksDifferError(
        f"{found}{when and ' ' + when}: rank{'s' if len(odd) > 1 else ''} "
        f"{', '.join(map(str, odd))} of "
        f"{collective.size} differ{'' if len(odd) > 1 else 's'} from the others, first in "
        f"`{mine.names[first]}`. {advice or _DRIFTED}")

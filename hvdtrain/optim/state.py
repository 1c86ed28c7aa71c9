"""Variables over ranks: broadcast, averaged, and a checksum that finds ranks that differ."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import current
from hvdtrain.collectives.base import Array, Collective
from hvdtrain.errors import RanksDifferError
from hvdtrain.optim import keras_model, keras_seam

Described = tuple[tuple[int, ...], str]
"""The shape and dtype of an array."""
PIECE_BYTES = 1 << 26
"""Arrays are sent in pieces of this size, or the largest array: the extra memory needed."""
SEED_STRIDE = 7919
"""Added to dropout seeds once per rank: after a broadcast all ranks would drop the same units."""


def training_state(model: Any) -> list[Any]:
    """Every variable that a training step uses on all ranks: model, optimizer, seeds."""
    # Without local variables, in an order that depends on the model only.
    found = {id(v): v for v in [
        *model.variables, *keras_seam.variables_of(keras_seam.optimizers_of(model)),
        keras_seam.global_seed_variable()] if not keras_seam.is_divided(v)}
    return of_all_ranks(model, found.values())


def state_without_seeds(model: Any) -> list[Any]:
    """`training_state` where each rank has dropout masks, and a shuffle, of its own."""
    found = training_state(model)
    seeds = {id(v) for v in seed_variables(found)}
    return [v for v in found if id(v) not in seeds]


def local_variables(model: Any) -> list[Any]:
    """Weights that are local to each rank (`ReducerOptions`), and their optimizer state."""
    # With the statistics of the same layers: they depend on what this rank's weights see.
    optimizers = keras_seam.optimizers_of(model)
    shared = {id(v) for v in keras_seam.shared_weights(optimizers, model.variables)}
    own = {id(v) for v in model.variables if id(v) not in shared}
    own |= {id(v) for layer in (model._flatten_layers() if own else ())
            if any(id(w) in own for w in layer._trainable_variables)
            for v in layer._non_trainable_variables}
    return [*(v for v in model.variables if id(v) in own),
            *(v for leaf in keras_seam.leaf_optimizers(optimizers)
              for v in keras_seam.local_slots(leaf))]


def of_all_ranks(model: Any, variables: Iterable[Any]) -> list[Any]:
    """Those of `variables` that are meant to be equal on all ranks."""
    own = {id(v) for v in [*local_variables(model), *keras_model.states_of_samples(model)]}
    return [v for v in variables if id(v) not in own]


def broadcast_variables(variables: Sequence[Any], *, root: int = 0,
                        collective: Collective | None = None) -> int:
    """Copy the values of rank `root` to all ranks. All ranks must call it.

    Args:
        variables: Sequence of Keras or TensorFlow variables, in the same order on all ranks.
        root: Integer, the rank whose values are copied.
        collective: The collective to use; defaults to that of `hvdtrain.init()`.

    Returns:
        The number of bytes sent.

    Raises:
        RanksDifferError: The ranks hold different structures; the first difference is named.
    """
    collective = collective or current()
    if collective.size == 1:
        return 0
    forms = list(map(described, variables))
    _refuse_other_structures(collective.gather_objects(forms))
    received = send_arrays(collective, forms, lambda i: _value(variables[i]), root=root,
                           keep=collective.rank != root)
    for array, variable in zip(received, variables, strict=False):
        variable.assign(array)
    return sum(map(_bytes_of, forms))


def send_arrays(collective: Collective, forms: Sequence[Described],
                read: Callable[[int], Array], *, root: int, keep: bool) -> Iterator[Array]:
    """Send arrays to other ranks, in pieces. All ranks must exhaust the iterator."""
    # Only `root` calls `read(index)`; other ranks get the arrays in order with `keep`, else
    # nothing.
    sizes = list(map(_bytes_of, forms))
    for group in _groups(sizes):
        total = sum(sizes[i] for i in group)
        flat = np.empty(total if keep else 0, np.uint8)
        if collective.rank == root:
            parts = [np.ascontiguousarray(read(i)).reshape(-1).view(np.uint8) for i in group]
            flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        for begin in range(0, total, PIECE_BYTES):
            end = min(total, begin + PIECE_BYTES)
            piece = flat[begin:end] if flat.size else np.empty(end - begin, np.uint8)
            received = collective.broadcast_array(piece, root=root)
            if keep:
                flat[begin:end] = received
        begin = 0
        for i in group if keep else ():
            shape, dtype = forms[i]
            yield flat[begin:begin + sizes[i]].view(_numpy_dtype(dtype)).reshape(shape)
            begin += sizes[i]


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    groups, total = list[list[int]](), 0
    for number, size in enumerate(sizes):
        if not groups or total + size > PIECE_BYTES:
            groups.append([])
            total = 0
        groups[-1].append(number)
        total += size
    return groups


def described(variable: Any) -> Described:
    """The shape and dtype of a variable."""
    return tuple(variable.shape), keras.backend.standardize_dtype(variable.dtype)


def _bytes_of(form: Described) -> int:
    return prod(form[0]) * _numpy_dtype(form[1]).itemsize


def _numpy_dtype(name: str) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(tf.as_dtype(name).as_numpy_dtype)
    return found


def _refuse_other_structures(everyone: Sequence[Sequence[Described]]) -> None:
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


def _value(variable: Any) -> Array:
    return np.asarray(variable.numpy())


def seed_variables(variables: Iterable[Any]) -> list[Any]:
    """The states of seed generators among `variables`."""
    return [v for v in variables
            if "seed_generator_state" in getattr(v, "path", "") and tuple(v.shape) == (2,)]


def seeds_of(variables: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """The seeds and counters of all seed generators among `variables`, as plain numbers."""
    return tuple((int(a), int(b)) for a, b in map(_value, seed_variables(variables)))


def restore_seeds(variables: Iterable[Any], seeds: Sequence[tuple[int, int]]) -> None:
    """Set the seed generators among `variables`; nothing if their number differs."""
    found = seed_variables(variables)
    if len(found) == len(seeds):
        for variable, seed in zip(found, seeds, strict=True):
            variable.assign(np.asarray(seed, _value(variable).dtype))


def seed_dropout(model: Any, seed: int | None) -> None:
    """Draw a model's and the global seeds from one seed, if any. All ranks, before a broadcast."""
    if seed is None:
        return
    generators = seed_variables([*model.variables, keras_seam.global_seed_variable()])
    for number, variable in enumerate(generators):
        drawn = np.random.default_rng([seed, number]).integers(1 << 31)
        variable.assign(np.asarray([drawn, 0], _value(variable).dtype))


def fold_rank_into_seeds(variables: Iterable[Any], rank: int) -> None:
    """Give each rank its own dropout masks. Call after a broadcast; rank 0 keeps its seeds."""
    for variable in seed_variables(variables):
        state = _value(variable).copy()
        state[0] += np.asarray(rank * SEED_STRIDE).astype(state.dtype)
        variable.assign(state)


def check_same_model(collective: Collective, model: Any) -> None:
    """Refuse to evaluate models that differ between the ranks. All ranks must call it."""
    check_equal(collective, of_all_ranks(model, model.weights),
                found="The ranks hold different models",
                advice="Each rank evaluates its share of the samples, so the result would be a "
                       "mixture. Load the same file on all ranks, or copy the chief's: "
                       "hvdtrain.broadcast_variables(model.weights)")


def average_accumulators(collective: Collective, optimizer: Any) -> None:
    """Set accumulated gradients to their mean over ranks. All ranks."""
    # The mean over ranks of the next update stays the same, and the chief's file holds all of it.
    found: list[Any] = []
    for leaf in keras_seam.leaf_optimizers(optimizer) if collective.size > 1 else ():
        steps = leaf.gradient_accumulation_steps
        if leaf.built and steps and keras_seam.steps_done(leaf) % steps:
            own = {id(v) for v in keras_seam.local_slots(leaf)}
            found += [v for v in keras_seam.accumulators(leaf)
                      if v is not None and id(v) not in own and not keras_seam.is_divided(v)]
    if found:
        means = collective.reduce([tf.convert_to_tensor(v) for v in found],
                                  name="hvdtrain.accumulators", op="average")
        for variable, mean in zip(found, means, strict=True):
            variable.assign(mean)


def gather_states_of_samples(collective: Collective, model: Any) -> tuple[Any, ...]:
    """Sample states of stateful layers: arrays `(ranks * batch, ...)` in rank order. All ranks."""
    mine = [_value(v) for v in keras_model.states_of_samples(model)]
    everyone = collective.gather_objects(mine) if mine else []
    return tuple(map(np.concatenate, zip(*everyone, strict=True)))


def restore_states_of_samples(model: Any, arrays: Sequence[Any], *, rank: int, size: int) -> bool:
    """Set what `gather_states_of_samples` returned; False if the global batch has another size."""
    variables = keras_model.states_of_samples(model)
    if [(v.shape[0] * size, *v.shape[1:]) for v in variables] != [a.shape for a in arrays]:
        return False
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array[rank * variable.shape[0]:(rank + 1) * variable.shape[0]])
    return True


def average_statistics(collective: Collective, model: Any) -> int:
    """Average over ranks what layers have gathered about their data; returns how many. All ranks.

    These are float weights that no gradient updates and that differ between the ranks: moving means
    and variances, but not those of local layers, nor the sample states of stateful layers. Equal
    ones stay the same, bit for bit. The mean of variances ignores the distance between means.
    """
    if collective.size == 1:
        return 0
    found = [v for v in of_all_ranks(model, model.non_trainable_weights)
             if keras.backend.is_float_dtype(keras.backend.standardize_dtype(v.dtype))]
    structures, everyone = zip(*collective.gather_objects(
        (list(map(described, found)), digests(found))), strict=True)
    _refuse_other_structures(structures)
    differing = [v for i, v in enumerate(found) if any(
        values[i] != everyone[0][i] for values in everyone)]
    if differing:
        means = collective.reduce(
            [tf.constant(_value(v).astype(np.float64)) for v in differing],
            name="hvdtrain.statistics", op="average")
        for variable, mean in zip(differing, means, strict=True):
            variable.assign(mean.numpy().astype(_value(variable).dtype))
    return len(differing)


def digests(variables: Sequence[Any]) -> tuple[int, ...]:
    """A checksum of each variable, bit for bit."""
    return tuple(zlib.crc32(np.ascontiguousarray(_value(v)).reshape(-1).view(np.uint8).data)
                 for v in variables)


def check_equal(collective: Collective, variables: Sequence[Any], *, when: str = "",
                found: str = "The ranks no longer hold the same weights",
                advice: str = "Something updates weights on one rank only (a callback, a custom "
                "train_step that bypasses the optimizer, or different library versions on the "
                "hosts). Training was stopped; the last checkpoint is from before.") -> None:
    """RanksDifferError on all ranks where variables are not bitwise equal. All ranks must call it.

    `when` (e.g. `"after step 1"`), `found` (what differs) and `advice` are parts of its message.
    """
    if collective.size == 1:
        return
    everyone: list[tuple[int, ...]] = collective.gather_objects(digests(variables))
    majority = Counter(everyone).most_common(1)[0][0]
    odd = [rank for rank, values in enumerate(everyone) if values != majority]
    if odd:
        first = next(v for v, a, b in zip(variables, majority, everyone[odd[0]], strict=True)
                     if a != b)
        raise RanksDifferError(
            f"{found}{when and ' ' + when}: rank{'s' if len(odd) > 1 else ''} "
            f"{', '.join(map(str, odd))} of "
            f"{collective.size} differ{'' if len(odd) > 1 else 's'} from the others, first in "
            f"`{keras_seam.variable_path(first)}`. {advice}")

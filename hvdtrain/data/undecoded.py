"""`Undecoded`: a pipeline taken apart into what it begins with and what is done to each sample.

Between the two its samples can be divided before they are decoded. What is taken apart: maps,
also in the branches of a zip, and the steps around them that choose samples or order them
without looking at them. Any other step is what the pipeline begins with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvdtrain.data import tf_steps

Function = Callable[[Any], Any]
_FOUND = "_hvdtrain_undecoded"
"""What a step of a pipeline was taken apart into."""


@dataclass(frozen=True)
class Step:
    """What is done to each sample."""

    name: str
    function: Callable[[int], Function] | None
    """From a rank to a function of a sample; None to keep the samples in memory."""
    calls: dict[str, Any]
    """Arguments of `map`."""


@dataclass(frozen=True)
class Undecoded:
    """Samples as a pipeline begins with them, and the steps that make of each its sample."""

    begin: Any
    steps: tuple[Step, ...] = ()
    why: str = ""
    """Why not more steps were taken apart, in words."""

    @property
    def is_kept(self) -> bool:
        """Whether samples are kept in memory: their number and order must not change before."""
        return any(step.function is None for step in self.steps)

    @property
    def names(self) -> str:
        """The steps in words."""
        return ", ".join(step.name for step in self.steps if step.function)

    def decoder(self, rank: int) -> Function:
        """From pairs of a number and a sample of `begin` to those of a sample of the pipeline.

        It can be called within a graph; this not, since functions may be traced anew here.
        """
        functions = [step.function and _second(step.function(rank)) for step in self.steps]

        def decoded(pairs: Any) -> Any:
            for step, function in zip(self.steps, functions, strict=True):
                pairs = pairs.map(function, **step.calls) if function else pairs.cache()
            return pairs
        return decoded

    def share(self, rank: int, size: int) -> Callable[[Any], Any]:
        """The samples rank, rank + size, ... of the pipeline; no others are decoded.

        Returns:
            Function of a number, from which on they are wanted.
        """
        own, decoder = self.undecoded_share(rank, size), self.decoder(rank)

        def decoded(samples: Any) -> Any:
            pairs = tf.data.Dataset.zip((tf.data.Dataset.counter(), samples))
            return decoder(pairs).map(lambda number, sample: sample)
        if self.is_kept:
            own = decoded(own)  # once: each would keep samples of its own
        if self.is_kept or not self.steps:
            return lambda begin: own.skip(begin)
        return lambda begin: decoded(own.skip(begin))

    def undecoded_share(self, rank: int, size: int) -> Any:
        """As many samples as `share` gives, to be counted."""
        return self.begin.shard(size, rank) if size > 1 else self.begin


def _second(function: Function) -> Callable[[Any, Any], Any]:
    @tf_steps.as_it_is
    def mapped(number: Any, element: Any) -> Any:
        return number, function(element)
    return mapped


def samples_of(dataset: Any, *, batched: bool) -> Undecoded:
    """The samples of a pipeline, as far as it is understood.

    Args:
        dataset: A `tf.data.Dataset`.
        batched: Boolean, whether it is one of batches, whose samples are wanted.
    """
    samples = dataset
    while batched and tf_steps.kind(samples) in tf_steps.SAME_ELEMENTS:
        samples = tf_steps.inputs(samples)[0]
    try:
        if not batched:
            return undecoded(dataset)
        if tf_steps.kind(samples) == "Batch" and not tf_steps.drops_remainder(samples):
            return undecoded(tf_steps.inputs(samples)[0])
    except tf_steps.NOT_UNDERSTOOD:
        pass
    return Undecoded(dataset.unbatch() if batched else dataset)


def undecoded(dataset: Any) -> Undecoded:
    """Take a pipeline of samples apart.

    It is done once for each step: a shuffle that is made anew goes on with its orders from one
    training on a pipeline to the next, as that of the pipeline would.

    Raises:
        AttributeError: And others of `tf_steps.NOT_UNDERSTOOD`.
    """
    found: Undecoded | None = vars(dataset).get(_FOUND)
    if found is None:
        found = _taken_apart(dataset)
        object.__setattr__(dataset, _FOUND, found)
    return found


def _taken_apart(dataset: Any) -> Undecoded:
    name = tf_steps.kind(dataset)
    if name == "Map":
        return _mapped(dataset)
    if name == "Zip":
        return _zipped(dataset)
    if name in tf_steps.SAME_ELEMENTS:
        found = undecoded(tf_steps.inputs(dataset)[0])
        return found if found.steps else replace(found, begin=dataset)
    if name == "Cache" or name in tf_steps.OTHER_ELEMENTS:
        return _around(dataset, name)
    if any(tf_steps.kind(node) == "Map" for node in tf_steps.nodes_of(dataset)):
        return Undecoded(dataset, why=f"{tf_steps.shown(dataset)} comes after a map of the samples")
    return Undecoded(dataset)


def _mapped(dataset: Any) -> Undecoded:
    mapped = tf_steps.Mapped(dataset)
    kept = mapped.keeps(python=False)
    if kept:
        return Undecoded(dataset, why=f"{mapped.name} keeps a state ({kept})")
    found = undecoded(tf_steps.inputs(dataset)[0])
    step = Step(mapped.name, mapped.function, mapped.calls)
    return replace(found, steps=(*found.steps, step))


def _around(dataset: Any, name: str) -> Undecoded:
    """A step that chooses samples, orders them or keeps them."""
    found = undecoded(tf_steps.inputs(dataset)[0])
    if not found.steps:
        return Undecoded(dataset, why=found.why)
    if name == "Cache":
        if not tf_steps.is_in_memory(dataset):
            return Undecoded(dataset, why="the samples are cached in a file")
        return replace(found, steps=(*found.steps, Step("cache", None, {})))
    if found.is_kept and name in ("Shuffle", "Repeat"):
        return Undecoded(dataset, why=f"{tf_steps.shown(dataset)} comes after a cache of samples")
    return replace(found, begin=tf_steps.again(dataset, found.begin))


def _zipped(dataset: Any) -> Undecoded:
    inputs = tf_steps.inputs(dataset)
    found = [undecoded(branch) for branch in inputs]
    found = [Undecoded(branch, why="a cache of the samples is zipped") if one.is_kept else one
             for one, branch in zip(found, inputs, strict=True)]
    steps = [step for one in found for step in one.steps]
    if not steps:
        return Undecoded(dataset, why=next((one.why for one in found if one.why), ""))
    begin = tf.data.Dataset.zip(tf_steps.zipped_as(dataset, [one.begin for one in found]))
    calls = next((step.calls for step in steps if step.calls), {})

    def function(rank: int) -> Function:
        chains = [[step.function(rank) for step in one.steps if step.function] for one in found]

        @tf_steps.as_it_is
        def call(element: Any) -> Any:
            parts = tf_steps.branches(dataset, element)
            for number, chain in enumerate(chains):
                for each in chain:
                    parts[number] = each(parts[number])
            return tf_steps.zipped_as(dataset, parts)
        return call
    return Undecoded(begin, (Step(", ".join(step.name for step in steps), function, calls),))

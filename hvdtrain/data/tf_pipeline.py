"""The steps of a `tf.data` pipeline: how to rebuild them, and to take it apart.

Only this module knows how TensorFlow stores a pipeline: it reads private attributes, whose absence
is an `AttributeError`. Nothing here draws from a global random generator.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import structured_function
from tensorflow.python.data.util import nest, structure
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.random_seed import DEFAULT_GRAPH_SEED

from hvdtrain.data.pipeline import as_it_is

Function = Callable[[Any], Any]

NOT_UNDERSTOOD = (AttributeError, KeyError, NotImplementedError, TypeError, ValueError,
                  tf.errors.OpError)
"""What a pipeline of another kind, or another TensorFlow, raises."""
SAME_ELEMENTS = frozenset({"Prefetch", "Options"})
"""Steps that yield the elements of their input, in its order."""
OTHER_ELEMENTS = frozenset({"Take", "Skip", "Shard", "Repeat", "Shuffle", "AssertCardinality"})
"""Steps that choose elements, order or count them, and do not read any."""
BATCHES = frozenset({"Batch", "PaddedBatch"})

_ONLY_READ = frozenset({
    "ReadVariableOp", "VarHandleOp", "ResourceGather", "ResourceGatherNd", "HashTableV2",
    "MutableHashTableV2", "LookupTableFind", "LookupTableFindV2", "LookupTableSizeV2",
    "AnonymousHashTable", "ReadFile", "Assert", "Print", "PrintV2", "StatefulPartitionedCall",
    "If", "While", "Case", "StringFormat"})
"""Operations that TensorFlow calls stateful, but that change nothing."""
_OPAQUE = frozenset({"PyFunc", "EagerPyFunc"})
_READ_ANEW = SAME_ELEMENTS | BATCHES | (OTHER_ELEMENTS - {"Shuffle"}) | {
    "TensorSlice", "Tensor", "Range", "TextLine", "TFRecord", "FixedLengthRecord", "Map",
    "FlatMap", "Interleave", "Filter", "Zip", "Concatenate", "Unbatch", "Window", "TakeWhile"}
"""Steps that keep no state between iterations."""
_FOUND = "_hvdtrain_undecoded"


def kind(dataset: Any) -> str:
    """The type of the last step of a pipeline: "Map", "Batch", "TensorSlice" ..."""
    name = type(dataset).__name__.strip("_")
    return name.removesuffix("V2").removesuffix("Dataset").removeprefix("Parallel")


def inputs(dataset: Any) -> list[Any]:
    """The datasets that the last step takes."""
    return list(dataset._inputs())


def nodes_of(dataset: Any) -> Iterator[Any]:
    """A dataset and all that it is made of."""
    seen: dict[int, Any] = {}
    left = [dataset]
    while left:
        node = left.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            yield node
            left += inputs(node)


def zipped_as(zipped: Any, parts: list[Any]) -> Any:
    """`parts`, one for each dataset of a zip, in the structure of its elements."""
    return nest.pack_sequence_as(zipped._datasets, parts)


def numbered(dataset: Any) -> Any:
    """Pairs of an index and an element."""
    return tf.data.Dataset.zip((tf.data.Dataset.counter(), dataset))


def second(function: Function) -> Callable[[Any, Any], Any]:
    """The function for pairs, of which it changes the second."""
    return as_it_is(lambda first, element: (first, function(element)))


def shown(dataset: Any) -> str:
    """The last step in words, for a printed plan."""
    name = kind(dataset)
    if name == "Map":
        function = getattr(dataset._map_func._func, "__name__", "")
        return f"map({function})" if function.isidentifier() else "map"
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def batch_of(dataset: Any) -> tuple[int, bool]:
    """Of a step that makes batches: their size, and whether a smaller last one is dropped."""
    return int(dataset._batch_size), bool(dataset._drop_remainder)


def is_in_memory(dataset: Any) -> bool:
    """Whether a cache is in memory, not a file, which all ranks would write."""
    return not dataset._filename.numpy()


def batched(pairs: Any, like: Any, samples: int) -> Any:
    """Batches of pairs of an index and a sample, made as the step `like` does."""
    if kind(like) == "PaddedBatch":
        shapes, values = like._padded_shapes, like._padding_values
        return pairs.padded_batch(samples, ([], shapes), (tf.constant(0, tf.int64), values))
    return pairs.batch(samples, **_calls(like))


def again(step: Any, dataset: Any) -> Any:
    """Rebuild the last step of a pipeline over another dataset: those named above, and a cache."""
    # A shuffle draws the same orders as if it had not been iterated yet.
    made: Callable[[], Any] = {
        "Options": lambda: dataset.with_options(step.options()),
        "Prefetch": lambda: dataset.prefetch(int(step._buffer_size)),
        "AssertCardinality": lambda: dataset.apply(
            tf.data.experimental.assert_cardinality(int(step._expected_cardinality))),
        "Take": lambda: dataset.take(int(step._count)),
        "Skip": lambda: dataset.skip(int(step._count)),
        "Shard": lambda: dataset.shard(int(step._num_shards), int(step._index)),
        "Repeat": lambda: dataset.repeat(int(step._count)),
        "Cache": dataset.cache,
        "Shuffle": lambda: _shuffled(step, dataset),
    }[kind(step)]
    return made()


def _shuffled(step: Any, dataset: Any) -> Any:
    seed, seed2 = int(step._seed), int(step._seed2)
    unseeded = seed == seed2 == 0
    with as_seeded(None if unseeded else seed):
        return dataset.shuffle(int(step._buffer_size), seed=None if unseeded else seed2,
                               reshuffle_each_iteration=step._reshuffle_each_iteration)


def _calls(step: Any) -> dict[str, Any]:
    calls = getattr(step, "_num_parallel_calls", None)
    return {} if calls is None else {"num_parallel_calls": int(calls), "deterministic": True}


def keeps_nothing(dataset: Any) -> bool:
    """Whether reading a dataset once more does not change what it yields later."""
    operations = (operation for node in nodes_of(dataset) for function in node._functions()
                  for operation in _stateful(function.function.graph.as_graph_def()))
    return all(kind(node) in _READ_ANEW for node in nodes_of(dataset)) and all(
        seeds is not None or name in _ONLY_READ or ("Dataset" in name and "Generator" not in name)
        for name, seeds in operations)


class Mapped:
    """The function of a map: its side effects, and how to call it on other data."""

    def __init__(self, step: Any) -> None:
        self._traced = step._map_func
        self.name = shown(step)
        self.calls = _calls(step)
        self.stateful = frozenset(_stateful(self._traced.function.graph.as_graph_def()))
        """Its stateful operations, with the seeds of random ones."""

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers whose seeds are fixed when it is traced."""
        return any(seeds is not None for _, seeds in self.stateful)

    def keeps(self, *, python: bool) -> str:
        """An operation (`python`: or a Python function) that may keep a state, or ""."""
        known = _ONLY_READ if python else _ONLY_READ | _OPAQUE
        return min((name for name, seeds in self.stateful
                    if seeds is None and name not in known), default="")

    def function(self, rank: int = 0) -> Function:
        """The function of an element. Other ranks than the first draw other random numbers."""
        traced = self._traced
        if rank and any(seeds not in (None, (0, 0)) for _, seeds in self.stateful):
            seed = traced.function.graph.seed
            known = DEFAULT_GRAPH_SEED if seed is None else seed
            with as_seeded(zlib.crc32(f"{known} of rank {rank}".encode())):
                traced = structured_function.StructuredFunctionWrapper(
                    traced._func, "Dataset.map()", input_structure=traced._input_structure)

        @as_it_is
        def call(element: Any) -> Any:
            flat = structure.to_tensor_list(traced._input_structure, element)
            return structure.from_compatible_tensor_list(
                traced.output_structure, traced.function(*flat))
        return call


def _stateful(graph: Any) -> Iterator[tuple[str, tuple[int, int] | None]]:
    nodes = [*graph.node, *(node for function in graph.library.function
                            for node in function.node_def)]
    own = {function.signature.name for function in graph.library.function}
    for node in nodes:
        definition = op_def_registry.get(node.op)
        if node.op not in own and (definition is None or definition.is_stateful):
            has_seeds = definition is not None and {"seed", "seed2"} <= {
                attr.name for attr in definition.attr}
            yield node.op, ((node.attr["seed"].i, node.attr["seed2"].i) if has_seeds else None)


@contextmanager
def as_seeded(seed: int | None) -> Iterator[None]:
    """Within it, this global seed is set; at the end all global generators are restored."""
    state = context.context()
    kept, drawn = state._seed, getattr(state, "_rng", None)
    where = drawn.getstate() if drawn else None
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    state._seed = seed
    try:
        yield
    finally:
        state._seed = kept
        if drawn:
            drawn.setstate(where)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


class NoSamplesError(Exception):
    """No sample can be read without a change to what the pipeline yields later."""


def some_batches(step: Any, most: int | None = None) -> Any:
    """The pipeline without what orders, chooses or keeps elements, to read some of them."""
    # With `most` samples in a batch; NoSamplesError then where reading them would change what is
    # read later, as with a generator.
    name = kind(step)
    before = (some_batches(part, most) for part in inputs(step))
    if name in SAME_ELEMENTS | OTHER_ELEMENTS | {"Cache", "Concatenate"}:
        return next(before)
    if name == "Map":
        mapped = Mapped(step)
        if most and mapped.keeps(python=False):
            raise NoSamplesError(f"{mapped.name} keeps a state")
        function = mapped.function()
        return numbered(next(before)).map(as_it_is(lambda number, element: function(element)))
    if name == "Zip":
        return tf.data.Dataset.zip(zipped_as(step, list(before)))
    if name in BATCHES:
        size, _ = batch_of(step)
        batches = batched(numbered(next(before)), step, min(size, most or size))
        return batches.map(as_it_is(lambda number, batch: batch))
    if most and not keeps_nothing(step):
        raise NoSamplesError(f"{shown(step)} may not be read twice")
    return step


@dataclass(frozen=True)
class Step:
    """A map of samples, or a cache; `function` (of the rank) is None to keep samples in memory."""

    name: str
    function: Callable[[int], Function] | None
    calls: dict[str, Any]


@dataclass(frozen=True)
class Undecoded:
    """Samples as a pipeline begins with them (`begin`), and the steps that make the final samples.

    Samples can be divided before these steps. Taken apart are maps, also in the branches of a zip,
    and the steps around them that choose or order samples without reading them (`why` not more).
    """

    begin: Any
    steps: tuple[Step, ...] = ()
    why: str = ""

    @property
    def is_kept(self) -> bool:
        """Whether samples are kept in memory: their number and order must not change before."""
        return any(step.function is None for step in self.steps)

    def decoder(self, rank: int) -> Function:
        """From pairs (index, sample of `begin`) to pairs (index, sample of the pipeline)."""
        # It can be called within a graph; `decoder` cannot, since functions may be traced again
        # here.
        functions = [step.function and step.function(rank) for step in self.steps]

        def decoded(pairs: Any) -> Any:
            for step, function in zip(self.steps, functions, strict=True):
                pairs = pairs.map(second(function), **step.calls) if function else pairs.cache()
            return pairs
        return decoded

    def share(self, rank: int, size: int) -> Function:
        """From an index to the samples rank, rank + size, ... after it; decodes only these."""
        own, decoder = self.begin.shard(size, rank), self.decoder(rank)

        def decoded(samples: Any) -> Any:
            return decoder(numbered(samples)).map(lambda number, sample: sample)
        if self.is_kept:
            own = decoded(own)  # once: each would keep samples of its own
        if self.is_kept or not self.steps:
            return lambda begin: own.skip(begin)
        return lambda begin: decoded(own.skip(begin))


def samples_of(dataset: Any, *, batched: bool) -> Undecoded:
    """The samples of a pipeline, or of its batches where it is `batched`; as far as understood."""
    samples = dataset
    while batched and kind(samples) in SAME_ELEMENTS:
        samples = inputs(samples)[0]
    try:
        if not batched:
            return undecoded(dataset)
        if kind(samples) == "Batch" and not batch_of(samples)[1]:
            return undecoded(inputs(samples)[0])
    except NOT_UNDERSTOOD:
        pass
    return Undecoded(dataset.unbatch() if batched else dataset)


def undecoded(dataset: Any) -> Undecoded:
    """Take a pipeline of samples apart."""
    # It is done once for each step: a shuffle that is rebuilt continues its orders from one
    # training on a pipeline to the next, as that of the pipeline would.
    found: Undecoded | None = vars(dataset).get(_FOUND)
    if found is None:
        found = _taken_apart(dataset)
        object.__setattr__(dataset, _FOUND, found)
    return found


def _taken_apart(dataset: Any) -> Undecoded:
    name = kind(dataset)
    if name == "Zip":
        return _zipped(dataset)
    if name not in {"Map", "Cache"} | SAME_ELEMENTS | OTHER_ELEMENTS:
        after_map = any(kind(node) == "Map" for node in nodes_of(dataset))
        return Undecoded(
            dataset, why=f"{shown(dataset)} comes after a map of the samples" if after_map else "")
    if name == "Map":
        mapped = Mapped(dataset)
        kept = mapped.keeps(python=False)
        if kept:
            return Undecoded(dataset, why=f"{mapped.name} keeps a state ({kept})")
    found = undecoded(inputs(dataset)[0])
    if name == "Map":
        step = Step(mapped.name, mapped.function, mapped.calls)
        return replace(found, steps=(*found.steps, step))
    if not found.steps:
        return Undecoded(dataset, why=found.why)
    if name in SAME_ELEMENTS:
        return found
    if name == "Cache":
        if not is_in_memory(dataset):
            return Undecoded(dataset, why="the samples are cached in a file")
        return replace(found, steps=(*found.steps, Step("cache", None, {})))
    if found.is_kept and name in ("Shuffle", "Repeat"):
        return Undecoded(dataset, why=f"{shown(dataset)} comes after a cache of samples")
    return replace(found, begin=again(dataset, found.begin))


def _zipped(dataset: Any) -> Undecoded:
    found = [Undecoded(branch, why="a cache of the samples is zipped")
             if undecoded(branch).is_kept else undecoded(branch) for branch in inputs(dataset)]
    steps = [step for one in found for step in one.steps]
    if not steps:
        return Undecoded(dataset, why=next((one.why for one in found if one.why), ""))
    begin = tf.data.Dataset.zip(zipped_as(dataset, [one.begin for one in found]))
    calls = next((step.calls for step in steps if step.calls), {})

    def function(rank: int) -> Function:
        chains = [[step.function(rank) for step in one.steps if step.function] for one in found]

        @as_it_is
        def call(element: Any) -> Any:
            parts = list(nest.flatten_up_to(dataset._datasets, element))
            for number, chain in enumerate(chains):
                for each in chain:
                    parts[number] = each(parts[number])
            return zipped_as(dataset, parts)
        return call
    return Undecoded(begin, (Step(", ".join(step.name for step in steps), function, calls),))

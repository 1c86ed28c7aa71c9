"""The steps that a `tf.data` pipeline is made of, and how to make them anew over other data.

The one place that knows how TensorFlow keeps a pipeline: it reads private attributes, whose
absence is an `AttributeError`. Nothing here draws from a global random generator.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import structured_function
from tensorflow.python.data.util import nest, structure
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.random_seed import DEFAULT_GRAPH_SEED

Call = TypeVar("Call", bound=Callable[..., Any])

NOT_UNDERSTOOD = (AttributeError, KeyError, NotImplementedError, TypeError, ValueError,
                  tf.errors.OpError)
"""What is raised of a pipeline of another kind, or by another TensorFlow."""
SAME_ELEMENTS = frozenset({"Prefetch", "Options"})
"""Steps after which come the elements before them, in their order."""
OTHER_ELEMENTS = frozenset({"Take", "Skip", "Shard", "Repeat", "Shuffle", "AssertCardinality"})
"""Steps that choose elements, order or count them, and look at none."""

_ONLY_READ = frozenset({
    "ReadVariableOp", "VarHandleOp", "ResourceGather", "ResourceGatherNd", "HashTableV2",
    "MutableHashTableV2", "LookupTableFind", "LookupTableFindV2", "LookupTableSizeV2",
    "AnonymousHashTable", "ReadFile", "Assert", "Print", "PrintV2", "StatefulPartitionedCall",
    "If", "While", "Case", "StringFormat"})
"""Operations that TensorFlow calls stateful, and that change nothing."""
_OPAQUE = frozenset({"PyFunc", "EagerPyFunc"})
_READ_ANEW = frozenset({
    "TensorSlice", "Tensor", "Range", "TextLine", "TFRecord", "FixedLengthRecord", "Map", "Batch",
    "PaddedBatch", "FlatMap", "Interleave", "Filter", "Take", "Skip", "Shard", "Repeat", "Zip",
    "Concatenate", "Prefetch", "Options", "Unbatch", "Window", "TakeWhile", "AssertCardinality"})
""" Steps that keep nothing from one iteration to the next."""


def as_it_is(function: Call) -> Call:
    """Let TensorFlow not rewrite a function for its graph: it is written for one."""
    made: Call = tf.autograph.experimental.do_not_convert(function)
    return made


def kind(dataset: Any) -> str:
    """What the last step of a pipeline is: "Map", "Batch", "TensorSlice" ..."""
    name = type(dataset).__name__.strip("_")
    return name.removesuffix("V2").removesuffix("Dataset").removeprefix("Parallel")


def inputs(dataset: Any) -> list[Any]:
    """The data sets that the last step takes."""
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


def branches(zipped: Any, element: Any) -> list[Any]:
    """What each data set of a zip has given to an element."""
    return list(nest.flatten_up_to(zipped._datasets, element))


def zipped_as(zipped: Any, parts: list[Any]) -> Any:
    """What is given for each data set of a zip, in the structure of its elements."""
    return nest.pack_sequence_as(zipped._datasets, parts)


def shown(dataset: Any) -> str:
    """The last step in words, for a plan that is printed."""
    name = kind(dataset)
    if name == "Map":
        function = getattr(dataset._map_func._func, "__name__", "")
        return f"map({function})" if function.isidentifier() else "map"
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def batch_size(dataset: Any) -> int:
    """Of a step that makes batches."""
    return int(dataset._batch_size)


def drops_remainder(dataset: Any) -> bool:
    """Of a step that makes batches: whether the last one is left out unless it is full."""
    return bool(dataset._drop_remainder)


def is_in_memory(dataset: Any) -> bool:
    """Of a cache: whether it is not a file, which all ranks would write."""
    return not dataset._filename.numpy()


def padding(dataset: Any) -> tuple[Any, Any] | None:
    """Shapes and values of a padded batch; None where its shapes depend on its samples."""
    shapes = dataset._padded_shapes
    if any((shape.numpy() < 0).any() for shape in tf.nest.flatten(shapes)):
        return None
    return shapes, dataset._padding_values


def batched(dataset: Any, like: Any, samples: int) -> Any:
    """Pairs of a number and a sample in batches of so many, as another step makes batches."""
    if kind(like) == "PaddedBatch":
        shapes, values = like._padded_shapes, like._padding_values
        return dataset.padded_batch(samples, ([], shapes), (tf.constant(0, tf.int64), values))
    return dataset.batch(samples, **_calls(like))


def again(step: Any, dataset: Any) -> Any:
    """The last step of a pipeline over another dataset; of those named above, and a cache.

    A shuffle draws the same orders as if it had not been iterated yet.
    """
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
    """The arguments of a step that say how parallel it is; its order is kept."""
    calls = getattr(step, "_num_parallel_calls", None)
    return {} if calls is None else {"num_parallel_calls": int(calls), "deterministic": True}


def keeps_nothing(dataset: Any) -> bool:
    """Whether reading a dataset once more leaves what it gives later as it is."""
    for node in nodes_of(dataset):
        if kind(node) not in _READ_ANEW:
            return False
        for function in node._functions():
            for name, seeds in _stateful(function.function.graph.as_graph_def()):
                if seeds is None and name not in _ONLY_READ and (
                        "Dataset" not in name or "Generator" in name):
                    return False
    return True


class Mapped:
    """The function of a map: what it does beside computing, and how to call it on other data."""

    def __init__(self, step: Any) -> None:
        self._traced = step._map_func
        self.name = shown(step)
        self.calls = _calls(step)
        self.stateful = frozenset(_stateful(self._traced.function.graph.as_graph_def()))
        """Its operations that keep a state, with the seeds of those that draw numbers."""

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers whose seeds are fixed when it is traced."""
        return any(seeds is not None for _, seeds in self.stateful)

    def keeps(self, *, python: bool) -> str:
        """An operation whose result may depend on how often it was called before, or "".

        Args:
            python: Boolean, whether a Python function is one.
        """
        known = _ONLY_READ if python else _ONLY_READ | _OPAQUE
        return min((name for name, seeds in self.stateful
                    if seeds is None and name not in known), default="")

    def function(self, rank: int = 0) -> Callable[[Any], Any]:
        """From an element to an element, by what was traced.

        Args:
            rank: Integer. Where random numbers are drawn, each rank but the first draws others.
        """
        seeded = any(seeds not in (None, (0, 0)) for _, seeds in self.stateful)
        traced = self._traced if rank == 0 or not seeded else self._for_rank(rank)

        @as_it_is
        def call(element: Any) -> Any:
            flat = structure.to_tensor_list(traced._input_structure, element)
            return structure.from_compatible_tensor_list(
                traced.output_structure, traced.function(*flat))
        return call

    def _for_rank(self, rank: int) -> Any:
        """The user's function traced anew, with other seeds in its random operations."""
        seed = self._traced.function.graph.seed
        known = DEFAULT_GRAPH_SEED if seed is None else seed
        with as_seeded(zlib.crc32(f"{known} of rank {rank}".encode())):
            return structured_function.StructuredFunctionWrapper(
                self._traced._func, "Dataset.map()", input_structure=self._traced._input_structure)


def _stateful(graph: Any) -> Iterator[tuple[str, tuple[int, int] | None]]:
    nodes = [*graph.node]
    own = {function.signature.name for function in graph.library.function}
    for function in graph.library.function:
        nodes += function.node_def
    for node in nodes:
        if node.op in own:
            continue
        definition = op_def_registry.get(node.op)
        if definition is None:
            yield node.op, None
        elif definition.is_stateful:
            seeds = ((node.attr["seed"].i, node.attr["seed2"].i)
                     if {"seed", "seed2"} <= {attr.name for attr in definition.attr} else None)
            yield node.op, seeds


@contextmanager
def as_seeded(seed: int | None) -> Iterator[None]:
    """Do something as under this global seed, and leave all global generators as they were."""
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

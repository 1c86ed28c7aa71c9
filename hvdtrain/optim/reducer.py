"""`GradientReducer`: averages one list of gradients over all ranks; and a tape that does so."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.collectives import current
from hvdtrain.collectives.base import Collective
from hvdtrain.log import get_logger
from hvdtrain.optim import keras_seam
from hvdtrain.optim.compression import (
    Bfloat16,
    Compression,
    Float16,
    PowerSgd,
    VariableKey,
    multiplied,
)
from hvdtrain.optim.options import (
    GradientKind,
    ReducerOptions,
    SparseChoice,
    choose_way,
    refuse_differences,
)
from hvdtrain.optim.tracing import CallNames, note_reduced, refuse_xla

COMPRESSIONS = {"none": Compression, "fp16": Float16, "bf16": Bfloat16, "lowrank": PowerSgd}
_TAPE_REDUCERS = "_hvdtrain_tape_reducers"
_INT32_END = 1 << 31
_SMALL_BYTES = 1 << 16


class _Dense(NamedTuple):
    position: int
    gradient: Any
    key: VariableKey


class GradientReducer:
    """Averages gradients over ranks; `name` is unique to the optimizer and equal on all ranks.

    `loss_scale` returns the factor that the gradients carry. `updates_rows`: the optimizer changes
    only the rows of a sparse gradient.
    """

    calls = 0
    """How many reductions this process has run or traced."""
    observer: Any = None
    """Has `gradients_ready` and `reduced`, which are called with gradients; see `train.timing`."""

    def __init__(self, collective: Collective, name: str, options: ReducerOptions,
                 loss_scale: Callable[[], Any] | None = None, *,
                 updates_rows: bool = True) -> None:
        self.collective = collective
        self.compression = COMPRESSIONS[options.compression](collective, options, loss_scale)
        self._whole = Compression(collective, options)
        self._name = name
        self._options = options
        self._updates_rows = updates_rows
        self._names = CallNames(name)
        self._agreed: dict[tuple[GradientKind, ...], dict[int, SparseChoice]] = {}

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any],
                 indices: Sequence[int], *,
                 is_local: Callable[[str, Any], bool] | None = None) -> list[Any]:
        """Average `gradients` (in build order) over all ranks, which must have the same structure.

        `indices` are the build indices of the variables. `is_local(path, variable)` says whose
        gradients stay on their rank. Sparse gradients become dense or stay `IndexedSlices`, None
        stays None. OptimizerError where ranks have different gradients, or XLA compiles the step.
        """
        GradientReducer.calls += 1
        refuse_xla()
        if self.observer is not None:
            self.observer.gradients_ready(gradients)
        is_local = is_local or self._options.is_local
        reduced = self._scaled(
            self._reduced(gradients, variables, indices, is_local=is_local), variables, is_local)
        if self.observer is not None:
            self.observer.reduced(reduced)
        return reduced

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any],
                 indices: Sequence[int], *,
                 is_local: Callable[[str, Any], bool]) -> list[Any]:
        shared = {} if self.collective.size == 1 else {
            p: variable for p, (gradient, variable) in enumerate(
                zip(gradients, variables, strict=True))
            if gradient is not None and not is_local(
                keras_seam.variable_path(variable), variable)}
        out = [g if p in shared else self._merged(g) for p, g in enumerate(gradients)]
        if not shared:
            return out
        choices = self._agree(
            [self._kind_of(gradients[p], variable, indices[p])
             for p, variable in shared.items()], variables)
        signature = zlib.crc32(repr([indices[p] for p in shared]).encode())
        name = self._names.next(f"{signature:08x}")
        feedback = self.compression.feedback
        if feedback is not None:
            feedback.noted = []  # what a step noted that failed
        dense: list[_Dense] = []
        for p, variable in shared.items():
            choice = choices.get(indices[p])
            if choice is not None and choice.way == "gather":
                with _on(self._options.device_sparse):
                    out[p] = self._gather_rows(gradients[p], variable, choice, f"{name}.s{p}")
            else:
                gradient = tf.convert_to_tensor(densify(gradients[p], variable))
                gradient.set_shape(variable.shape)
                dense.append(_Dense(p, gradient, VariableKey(
                    keras_seam.variable_key(variable) or indices[p], indices[p])))
        for number, (way, bucket) in enumerate(self._buckets(dense)):
            with _on(self._options.device_dense):
                means = way.average([one.gradient for one in bucket],
                                    [one.key for one in bucket], name=f"{name}.b{number}")
            for one, mean in zip(bucket, means, strict=True):
                mean.set_shape(one.gradient.shape)
                out[one.position] = mean
        if feedback is not None:
            feedback.settle([g for g in out if g is not None])
        return out

    def _scaled(self, gradients: Sequence[Any], variables: Sequence[Any],
                is_local: Callable[[str, Any], bool]) -> list[Any]:
        """Multiply by `factor`, and divide the gradients of local variables by N if asked."""
        size = self.collective.size if self._options.scale_local else 1
        if size == 1 and self._options.factor == 1:
            return list(gradients)
        return [g if g is None else _times(g, self._options.factor / (
            size if size > 1 and is_local(keras_seam.variable_path(v), v) else 1))
            for g, v in zip(gradients, variables, strict=True)]

    def _kind_of(self, gradient: Any, variable: Any, index: int) -> GradientKind:
        is_sparse, ids = isinstance(gradient, tf.IndexedSlices), None
        if is_sparse:
            ids = gradient.indices.shape.merge_with(gradient.values.shape[:1])[0]
        return GradientKind(
            index=index, name=keras_seam.variable_path(variable),
            form="sparse" if is_sparse else "dense", dtype=gradient.dtype.name,
            shape=tuple(variable.shape), ids=ids,
            group=self._options.group_of(keras_seam.variable_key(variable)))

    def _merged(self, gradient: Any) -> Any:
        merge = isinstance(gradient, tf.IndexedSlices) and self._options.merge == "sum"
        return merge_rows(gradient) if merge else gradient

    def _agree(self, kinds: Sequence[GradientKind],
               variables: Sequence[Any]) -> dict[int, SparseChoice]:
        """How each sparse gradient is sent, by index, as all ranks decided together."""
        # The ranks communicate when this one sees a new pattern while the step is traced. A retrace
        # on one rank alone, because of another batch size, has a known pattern; a new one could
        # only hang.
        pattern = tuple(kinds)
        if pattern not in self._agreed:
            paths = [keras_seam.variable_path(v) for v in variables]
            unknown = self._options.unknown_names(paths)
            if unknown and self.collective.rank == 0:
                get_logger().warning(
                    "local_variables names %s, but none of the %d variables of this optimizer has "
                    "such a name in its path (the first one is `%s`).",
                    ", ".join(map(repr, unknown)), len(paths), paths[0])
            with tf.init_scope():
                reports = self.collective.gather_objects((self._name, self._options.text, pattern))
            refuse_differences(reports)
            self._agreed[pattern] = {
                of_ranks[0].index: self._choose(of_ranks)
                for of_ranks in zip(*(kinds for _, _, kinds in reports), strict=True)
                if of_ranks[0].form == "sparse"}
        return self._agreed[pattern]

    def _choose(self, kinds: Sequence[GradientKind]) -> SparseChoice:
        kind, dtype = kinds[0], tf.as_dtype(kinds[0].dtype)
        choice = choose_way(
            kinds, self._options, updates_rows=self._updates_rows,
            one_host=self.collective.one_host, value_bytes=self.compression.number_bytes(dtype),
            dense_bytes=self._way_of(dtype, kind.shape).dense_bytes(
                [n or 0 for n in kind.shape], dtype))
        if self.collective.rank == 0:
            get_logger().info("Sparse gradient of `%s`, %s: %s (%s).", kind.name, kind,
                              choice.way, choice.reason)
        return choice

    def _way_of(self, dtype: Any, shape: Sequence[int | None]) -> Compression:
        suits = self.compression.suits(dtype, shape)
        return self.compression if suits else self._whole

    def _buckets(self, dense: Sequence[_Dense]) -> list[tuple[Compression, list[_Dense]]]:
        """Group by compression, dtype and size, in the order of the backward pass."""
        if self._options.groups:
            return self._as_grouped(dense)
        # Small gradients have their own buckets: TensorFlow computes those of biases when it has
        # nothing longer to do, often last of all; large ones do not wait for them.
        most = self._options.bucket_for(sum(map(_bytes_of, dense)),
                                        one_host=self.collective.one_host)
        done: list[tuple[Compression, list[_Dense]]] = []
        open_buckets: dict[Any, tuple[list[_Dense], int]] = {}
        for one in reversed(dense):
            way = self._way_of(one.gradient.dtype, one.gradient.shape.as_list())
            own = _bytes_of(one)
            key = (way, one.gradient.dtype, own <= min(_SMALL_BYTES, most // 16))
            bucket, size = open_buckets.get(key, ([], 0))
            bucket.append(one)
            size += own
            if size >= most:
                done.append((way, bucket))
                bucket, size = [], 0
            open_buckets[key] = (bucket, size)
        return done + [(key[0], bucket) for key, (bucket, _) in open_buckets.items() if bucket]

    def _as_grouped(self, dense: Sequence[_Dense]) -> list[tuple[Compression, list[_Dense]]]:
        """The groups of the options; a variable in none of them is one of its own."""
        found: dict[Any, list[_Dense]] = {}
        groups = self._options.groups
        for place, one in enumerate(dense):
            if isinstance(groups, int):
                # As Horovod: equally many gradients each, the first groups one more.
                each, more = divmod(len(dense), groups)
                number = (place // (each + 1) if place < more * (each + 1) else
                          (place - more) // each)
            else:
                number = self._options.group_of(one.key.identity)
            way = self._way_of(one.gradient.dtype, one.gradient.shape.as_list())
            own = place if number < 0 else None
            found.setdefault((number, own, way, one.gradient.dtype), []).append(one)
        return [(way, bucket) for (_, _, way, _), bucket in found.items()]

    def _gather_rows(self, gradient: Any, table: Any, choice: SparseChoice, name: str) -> Any:
        mine = self._merged(gradient)
        values = self.compression.gather_values(mine.values, name=f"{name}.values")
        dtype = mine.indices.dtype
        sent = tf.cast(mine.indices, tf.int32 if table.shape[0] < _INT32_END else dtype)
        rows = self.collective.allgather(sent, name=f"{name}.rows")
        values = multiplied(values, self.compression.factor, values.dtype)
        gathered = tf.IndexedSlices(values, tf.cast(rows, dtype), mine.dense_shape)
        return densify(gathered, table) if choice.form == "dense" else self._merged(gathered)


def _bytes_of(one: _Dense) -> int:
    return int((one.gradient.shape.num_elements() or 0) * one.gradient.dtype.size)


def _on(device: str) -> AbstractContextManager[Any]:
    return tf.device(device) if device else nullcontext()


def _times(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, factor), gradient.indices,
                                gradient.dense_shape)
    return multiplied(gradient, factor, gradient.dtype)


def merge_rows(gradient: Any) -> Any:
    """Sum the rows of `IndexedSlices` that occur more than once."""
    # Adaptive optimizers and clipping of Keras 3 treat each occurrence as a gradient of its own,
    # which differs from the dense gradient (by up to 2e-1 after four steps of RMSprop).
    rows, position = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, position, tf.shape(rows)[0])
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def densify(gradient: Any, variable: Any) -> Any:
    """The dense gradient of a variable."""
    return gradient if not isinstance(gradient, tf.IndexedSlices) else (
        tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0]))


class DistributedGradientTape:
    """A `tf.GradientTape` whose gradients are averaged over all ranks.

    For loops with an optimizer that is not distributed; with one that is, gradients would be
    averaged twice. The optimizer reduces once per applied update, also with accumulation and loss
    scaling; the tape at each call of `gradient`. Everything else (`watch`, `stop_recording`, ...)
    is that of the tape.

    Args:
        tape: A `tf.GradientTape`, recorded already or not; defaults to a new one.
        collective: The collective to use; defaults to that of `hvdtrain.init()`.
        options: A `ReducerOptions`; defaults to `ReducerOptions()`.

    Example:
        >>> with hvdtrain.DistributedGradientTape() as tape:
        ...     loss = ...
        >>> optimizer.apply(tape.gradient(loss, model.trainable_variables),
        ...                 model.trainable_variables)
    """

    def __init__(self, tape: Any = None, *, collective: Collective | None = None,
                 options: ReducerOptions | None = None) -> None:
        self._tape = tf.GradientTape() if tape is None else tape
        self._options = options or ReducerOptions()
        # A tape is new in each step, but names and residuals stay: they live as long as the
        # collective (whose subsets are copies of it). A function in the options may be another
        # object in each step; each call says anyway what is local.
        collective, options = collective or current(), self._options
        if callable(options.local_variables):
            options = dataclasses.replace(options, local_variables=())
        known: dict[Any, GradientReducer] = vars(collective).setdefault(_TAPE_REDUCERS, {})
        key = (id(collective), options)
        if key not in known:
            number = sum(of == id(collective) for of, _ in known)
            known[key] = GradientReducer(collective, f"hvdtrain.tape{number}", options)
        self._reducer = known[key]

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As `tf.GradientTape.gradient`, averaged. All ranks, with sources in the same order."""
        gradients = tf.nest.flatten(self._tape.gradient(target, sources, *args, **kwargs))
        variables = tf.nest.flatten(sources)
        reduced = self._reducer(gradients, variables, range(len(variables)),
                                is_local=self._options.is_local)
        note_reduced(reduced)
        return tf.nest.pack_sequence_as(sources, reduced)

"""How gradients are reduced: the options, and decisions before the first step. Pure functions.

If one rank does not take part in a collective, the others wait forever. So the ranks exchange a
report once for each set of gradients, while the step is traced. It also decides how each sparse
gradient is sent, and never changes: a batch may have another size on another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, prod
from typing import Any, Literal

from hvdtrain.collectives.base import Collective
from hvdtrain.collectives.plain import carried
from hvdtrain.config import SUMMED_APART, ReductionConfig, TrainConfig
from hvdtrain.errors import ConfigError, OptimizerError
from hvdtrain.log import get_logger
from hvdtrain.settings import fields_of, join, setting

GradientOp = Literal["average", "sum", "adasum"]
INDEX_BYTES = 4
FEWER = 1.1
"""The factor that a gather must save: packing rows takes time, and it is two collectives."""
FEWER_ON_ONE_HOST = 2.5
"""As `FEWER`, where bytes do not cross a network (measured by benchmarks/embedding.py)."""
SAVED_ON_ONE_HOST_BYTES = 1 << 20
"""A gather must also save so many bytes there, for its second collective."""
SMALL_TABLE_BYTES = 1 << 16
"""Up to this size an allreduce takes as long as an empty one: sent whole if rows are unknown."""
_BUCKETS, _LEAST_BUCKET_BYTES, _MOST_BUCKET_BYTES = 8, 1 << 20, 32 << 20


@dataclass(frozen=True, kw_only=True)
class ReducerOptions(ReductionConfig):
    """How gradients are reduced; equal on all ranks. See `TrainConfig` for the fields of a run."""

    bucket_bytes: int | None = setting(
        None, "Gradients are fused into groups of about this size, last layer first, so that "
        "the first group can travel while the backward pass goes on.", least=1,
        unset="see `bucket_for`")
    op: GradientOp = "average"
    """`sum` does not divide by N; `adasum` is Horovod's Adasum, where the collective has it."""
    local_variables: tuple[str, ...] | Callable[[Any], bool] = ()
    """Variables whose gradients stay on their rank: names, paths or parts of paths (`"expert"` for
    all of a layer of that name), or a function of the variable."""

    scale_local: bool = False
    """Divide the gradients of local variables by N, as Horovod does."""
    factor: float = 1.0
    """Multiplies each gradient once it is reduced, before clipping."""
    groups: int | tuple[tuple[str, ...], ...] = 0
    """In place of `bucket_bytes`: so many groups, or groups of variables (`variable_key`)."""
    device_dense: str = ""
    """The device of reductions of dense gradients, such as `"/cpu:0"`; empty: theirs."""
    device_sparse: str = ""
    """As `device_dense`, where rows are gathered."""

    def __post_init__(self) -> None:
        if isinstance(self.local_variables, str):
            object.__setattr__(self, "local_variables", (self.local_variables,))
        super().__post_init__()
        if self.predivide != 1 and self.op != "average":
            raise ConfigError(f"predivide splits an average. Received: predivide="
                              f"{self.predivide:g} with op={self.op!r}")
        if self.op == "adasum" and self.compression in SUMMED_APART:
            raise ConfigError(f"Adasum cannot be combined with compression={self.compression!r}: "
                              "use 'none' or 'fp16'.")
        if self.op == "adasum" and (self.sparse == "gather" or self.merge == "none"):
            raise ConfigError("Adasum works on dense gradients only: leave sparse and merge out.")

    @classmethod
    def of(cls, config: TrainConfig) -> ReducerOptions:
        """The options in the settings of a run."""
        size = config.bucket_mb
        return cls(bucket_bytes=None if size is None else max(1, int(size * (1 << 20))),
                   **{name: getattr(config, name) for name in fields_of(ReductionConfig)})

    def changed_by(self, settings: ReducerOptions) -> ReducerOptions:
        """Merge with the settings of a run; ConfigError where both are set and differ."""
        said = {name: getattr(settings, name) for name, field in fields_of(ReducerOptions).items()
                if getattr(settings, name) != field.default}
        return join(self, said, mine="the options given to DistributedOptimizer",
                    theirs="The settings of the run")

    def is_local(self, path: str, variable: Any) -> bool:
        """Whether the gradient of a variable with this path stays on its rank."""
        if callable(self.local_variables):
            return bool(self.local_variables(variable))
        return any(_is_within(name, path) for name in self.local_variables)

    def unknown_names(self, paths: Sequence[str]) -> list[str]:
        """Names in `local_variables` that match none of these paths."""
        names = () if callable(self.local_variables) else self.local_variables
        return [name for name in names if not any(_is_within(name, path) for path in paths)]

    def bucket_for(self, total_bytes: int, *, one_host: bool) -> int:
        """The bytes of a bucket, for gradients of so many bytes together."""
        # The network is idle until the first bucket is complete, so that one should be a small
        # share; each bucket costs a negotiation (benchmarks/overlap.py).
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        most = _MOST_BUCKET_BYTES
        return most if one_host else min(most, max(_LEAST_BUCKET_BYTES, total_bytes // _BUCKETS))

    @property
    def text(self) -> str:
        """A string of the settings that must be equal on all ranks."""
        # Keys of variables belong to one process; `GradientKind` compares their groups.
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items()
                         if name != "local_variables" and not (name == "groups" and value))

    def group_of(self, key: str | None) -> int:
        """The group of a variable by its key; -1: none, or groups are counted only."""
        groups = () if isinstance(self.groups, int) else self.groups
        return next((i for i, keys in enumerate(groups) if key in keys), -1)


def _is_within(name: str, path: str) -> bool:
    return f"/{name.strip('/')}/" in f"/{path}/"


def check_use(options: ReducerOptions, leaves: Sequence[Any], collective: Collective, *,
              scaled: bool, zero: bool) -> None:
    """Refuse what the collective or an optimizer cannot do; warn of lost precision."""
    refusal = collective.refusal("adasum") if options.op == "adasum" else None
    if refusal is not None:
        raise OptimizerError(f"op='adasum' was asked for. {refusal}")
    clipping = next((leaf for leaf in leaves if leaf.global_clipnorm), None)
    if options.local_variables and clipping is not None:
        raise OptimizerError(
            f"`{clipping.name}` clips by the global norm, which counts the gradients of local "
            "variables: it would differ between ranks, and so would all weights. Use clipnorm "
            "or clipvalue, or an optimizer of its own for the local variables.")
    if (options.compression == "fp16" and not scaled and collective.size > 1
            and collective.rank == 0):
        get_logger().warning(
            "compression='fp16' without loss scaling: elements of gradients below 6e-8 become "
            "zero. Use it with keras.optimizers.LossScaleOptimizer, which scales what is sent "
            "(without gradient_accumulation_steps); or use 'bf16', which has the range of "
            "float32.")
    if zero:
        check_zero(options)


def check_zero(options: ReducerOptions) -> None:
    """Refuse options that do not work with zero."""
    for name in ("compression", "predivide", "op", "local_variables", "merge", "factor"):
        value = getattr(options, name)
        if value != getattr(ReducerOptions(), name):
            raise OptimizerError(f"zero averages whole gradients, so it cannot be combined with "
                                 f"{name}={value!r}. Leave one of the two out.")


@carried
@dataclass(frozen=True, kw_only=True)
class GradientKind:
    """The gradient of one variable; `index` in build order. `name` and `ids` may differ on ranks.

    `ids`: rows in a sparse gradient, with repetitions; None while unknown.
    """

    index: int
    name: str = field(compare=False)
    form: Literal["dense", "sparse"]
    dtype: str
    shape: tuple[int | None, ...]
    ids: int | None = field(compare=False, default=None)
    group: int = -1

    def __str__(self) -> str:
        shape = " x ".join("?" if n is None else f"{n:,}" for n in self.shape) or "scalar"
        group = "" if self.group < 0 else f" of group {self.group}"
        return f"a {self.form} {self.dtype} gradient ({shape}){group}"


Report = tuple[str, str, tuple[GradientKind, ...]]
"""What one rank is about to reduce: the name of its reducer, its options, the gradients."""


def refuse_differences(reports: Sequence[Report]) -> None:
    """Refuse reports that differ from that of rank 0, naming the first rank and variable."""
    first_reducer, first_options, first_kinds = reports[0]
    for rank, (reducer, options, kinds) in enumerate(reports):
        if reducer != first_reducer:
            raise OptimizerError(
                f"Rank {rank} applies gradients to another optimizer than rank 0: "
                f"`{reducer}` instead of `{first_reducer}`. Make and apply distributed "
                "optimizers in the same order on all ranks.")
        if options != first_options:
            raise OptimizerError(
                f"Rank {rank} was given other ReducerOptions than rank 0: {options}; rank 0 "
                f"has {first_options}. Give all ranks the same.")
        theirs, mine = ({kind.index: kind for kind in of_rank} for of_rank in (first_kinds, kinds))
        for index in sorted({*theirs, *mine}):
            a, b = theirs.get(index), mine.get(index)
            if a != b:
                name = next(kind.name for kind in (a, b) if kind is not None)
                raise OptimizerError(
                    f"The ranks have different gradients: for variable {index} (`{name}`) rank 0 "
                    f"has {a or 'none'}, rank {rank} has {b or 'none'}. They would wait for each "
                    "other for ever. Every rank must compute gradients of the same variables in "
                    "each step: where a variable is not used on a rank, give "
                    "tf.zeros_like(variable) as its gradient.")


@dataclass(frozen=True, kw_only=True)
class SparseChoice:
    """How the gradient of one table is sent, and the `form` in which the optimizer gets it."""

    way: Literal["gather", "dense"]
    reason: str
    form: Literal["sparse", "dense"] = "dense"


def choose_way(kinds: Sequence[GradientKind], options: ReducerOptions, *, value_bytes: float,
               dense_bytes: float, updates_rows: bool, one_host: bool = False) -> SparseChoice:
    """Decide how the gradient of one table is sent, from all ranks' reports. Equal on all ranks.

    A rank sends `(N - 1) * rows * row` bytes in a step for a gather, and `2 (N - 1) / N * table`
    for an allreduce (`dense_bytes`). Gathered rows are made dense where the optimizer would do it
    itself, and more than once, or where they are half the table.
    """
    rows, *inner = (n or 0 for n in kinds[0].shape)
    row_bytes = prod(inner) * value_bytes + INDEX_BYTES
    known = [kind.ids for kind in kinds if kind.ids is not None]
    # Distinct rows among so many that are drawn at random from the table, on average.
    used = sum(rows * (1 - exp(-ids / max(1, rows))) for ids in known) / max(1, len(known))
    few = len(kinds) * used < rows / 2 or len(known) < len(kinds)
    form: Literal["sparse", "dense"] = "sparse" if updates_rows and few else "dense"
    if options.merge == "none":
        return SparseChoice(way="gather", reason="merge='none'", form="sparse")
    if options.op == "adasum":
        return SparseChoice(way="dense", reason="Adasum")
    if options.sparse != "auto":
        return SparseChoice(way=options.sparse, reason="asked for", form=form)
    if len(known) < len(kinds):
        small = rows * row_bytes <= SMALL_TABLE_BYTES
        return SparseChoice(
            way="dense" if small else "gather", form=form,
            reason=f"rows per step not known, table of {_bytes(rows * row_bytes)}")
    gather_bytes = (len(kinds) - 1) * used * row_bytes
    pays = FEWER * gather_bytes < dense_bytes
    if one_host:
        pays = (FEWER_ON_ONE_HOST * gather_bytes < dense_bytes
                and dense_bytes - gather_bytes > SAVED_ON_ONE_HOST_BYTES)
    return SparseChoice(
        way="gather" if pays else "dense", form=form,
        reason=f"about {_bytes(gather_bytes)} to send per step for the rows used, "
               f"{_bytes(dense_bytes)} for the table{', within one host' if one_host else ''}")


def _bytes(number: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"

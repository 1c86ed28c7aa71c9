"""`ReducerOptions`: how gradients are reduced; and whether that can be done here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.collectives.base import Collective
from hvdtrain.config import SUMMED_APART, ReductionConfig, TrainConfig
from hvdtrain.errors import ConfigError, OptimizerError
from hvdtrain.log import get_logger
from hvdtrain.settings import fields_of, join, setting

GradientOp = Literal["average", "sum", "adasum"]


@dataclass(frozen=True, kw_only=True)
class ReducerOptions(ReductionConfig):
    """How gradients are reduced. Equal on all ranks (compared when the first step is traced).

    The fields that a run has as well are those of `TrainConfig`.
    """

    bucket_bytes: int = setting(
        32 << 20, "Gradients are fused into groups of about this size, last layer first, so that "
        "the first group can travel while the backward pass goes on.", least=1)
    op: GradientOp = "average"
    """`sum` does not divide by N; `adasum` is Horovod's Adasum, where the collective has it."""
    local_variables: tuple[str, ...] | Callable[[Any], bool] = ()
    """Variables whose gradients stay on their rank: names, paths or parts of paths (`"expert"` for
    all of a layer of that name), or a function of the variable."""

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
        """What the settings of a run say."""
        return cls(bucket_bytes=int(config.bucket_mb * (1 << 20)),
                   **{name: getattr(config, name) for name in fields_of(ReductionConfig)})

    def changed_by(self, settings: ReducerOptions) -> ReducerOptions:
        """These options, with what the settings of a run say beside them.

        Raises:
            ConfigError: Both say something, and not the same.
        """
        said = {name: getattr(settings, name) for name, field in fields_of(ReducerOptions).items()
                if getattr(settings, name) != field.default}
        return join(self, said, mine="the options given to DistributedOptimizer",
                    theirs="The settings of the run")

    def is_local(self, path: str, variable: Any) -> bool:
        """Whether the gradient of `variable`, called `path`, stays on its rank."""
        if callable(self.local_variables):
            return bool(self.local_variables(variable))
        return any(_is_within(name, path) for name in self.local_variables)

    def unknown_names(self, paths: Sequence[str]) -> list[str]:
        """Names in `local_variables` that no variable with one of these paths has."""
        if callable(self.local_variables):
            return []
        return [name for name in self.local_variables
                if not any(_is_within(name, path) for path in paths)]

    @property
    def text(self) -> str:
        """The settings that must be equal on all ranks."""
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items()
                         if name != "local_variables")


def _is_within(name: str, path: str) -> bool:
    return f"/{name.strip('/')}/" in f"/{path}/"


def check_use(options: ReducerOptions, leaves: Sequence[Any], collective: Collective, *,
              scaled: bool) -> None:
    """Refuse what the collective or an optimizer cannot do; warn of what loses numbers.

    Args:
        options: How to reduce.
        leaves: Sequence of Keras optimizers that update variables.
        collective: The collective to use.
        scaled: Boolean, the gradients carry a loss scale when they are reduced.

    Raises:
        OptimizerError: Saying what to do instead.
    """
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

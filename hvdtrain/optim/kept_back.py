"""What compression has not sent yet ("error feedback"), and what it remembers between steps.

What a rank keeps back of a gradient is added to its next one (Seide et al., 2014, "1-Bit Stochastic
Gradient Descent"). So of the ranks' gradients only the mean of what they keep back is missing in
the sums, and that mean is what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective

Array = np.ndarray[Any, Any]


class VariableKey(NamedTuple):
    """Tells the variable of a gradient apart from others."""

    identity: Any
    """Unique in this process."""
    place: int
    """In the optimizer; the same in all runs of a job."""


class KeptBack:
    """The variables of one reducer that hold what was not sent, in float32.

    Args:
        loss_scale: Callable that gives the factor that gradients carry now, or None. What is
            kept does not carry it, since it changes.
    """

    def __init__(self, loss_scale: Callable[[], Any] | None = None) -> None:
        self._loss_scale = loss_scale
        self._made: dict[tuple[str, VariableKey], Any] = {}
        self._restored: dict[str, Array] = {}
        self._noted: list[tuple[Any, Any]] = []

    def factor(self) -> Any:
        """What gradients are multiplied by now."""
        return 1.0 if self._loss_scale is None else tf.cast(self._loss_scale(), tf.float32)

    def residual(self, key: VariableKey, size: int) -> Any:
        """What was kept back of a gradient: a variable of shape `(size,)`, at first zero."""
        return self._variable("residual", key, lambda: np.zeros(size, np.float32))

    def basis(self, key: VariableKey, first: Callable[[], Array]) -> Any:
        """What a wire remembers of a gradient, equal on all ranks; at first `first()`."""
        return self._variable("basis", key, first)

    def _variable(self, kind: str, key: VariableKey, first: Callable[[], Array]) -> Any:
        if (kind, key) not in self._made:
            value = first()
            found = self._restored.pop(f"{kind}/{key.place}", None)
            if found is not None and found.shape == value.shape:
                value = found
            with tf.init_scope():
                self._made[kind, key] = tf.Variable(
                    value, trainable=False, name=f"hvdtrain_{kind}")
        return self._made[kind, key]

    def begin(self) -> None:
        """A step begins. What one that failed has noted is forgotten."""
        self._noted = []

    def note(self, variable: Any, value: Any) -> None:
        """What a variable shall be after this step."""
        self._noted.append((variable, value))

    def settle(self, gradients: Sequence[Any]) -> None:
        """Set the variables that were noted, unless all ranks are to skip the step's update.

        Then it leaves no trace in what is sent later.

        Args:
            gradients: Sequence of tensors and `IndexedSlices`, all that were averaged in the step.
        """
        noted, self._noted = self._noted, []
        if not noted:
            return
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(
            g.values if isinstance(g, tf.IndexedSlices) else g)) for g in gradients])
        for variable, value in noted:
            variable.assign(tf.where(finite, value, variable))

    def collect(self, collective: Collective) -> dict[str, Array]:
        """What a checkpoint holds, by name; and gives all ranks the mean of what they keep.

        What is sent later is the same with that. A run that goes on from the checkpoint, on any
        number of ranks, then keeps what the run that wrote it keeps. All ranks.
        """
        residuals = [v for (kind, _), v in self._made.items() if kind == "residual"]
        if residuals:
            means = collective.reduce([v.value() for v in residuals], name="hvdtrain.kept_back",
                                      op="average")
            for variable, mean in zip(residuals, means, strict=True):
                variable.assign(mean)
        return {f"{kind}/{key.place}": v.numpy() for (kind, key), v in self._made.items()}

    def restore(self, values: Mapping[str, Array]) -> None:
        """Begin with what `collect` gave, by the places of the variables."""
        self._restored = dict(values)

"""`ShardPlan`: which samples each rank trains on, with the same number of steps on every rank.

In step s the ranks together train on samples [s*G, (s+1)*G) of one global order, G being the
global batch; rank r takes the r-th part. So N ranks see in each step exactly what one process
with the global batch sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdtrain.data.part import Part
from hvdtrain.errors import DataError


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The training samples of one rank. Pure values: the same on every rank but for `rank`.

    Raises:
        DataError: Fewer samples than ranks, in all or in a step; nothing is left after dropping;
            or the global batch does not divide by the ranks, and it must.
    """

    samples: int
    rank: int
    size: int
    batch_per_rank: int
    batch_global: int | None = None
    """Samples per step over all ranks, where they do not divide by them; `batch_per_rank` is then
    the largest part. Default: `batch_per_rank` on each."""
    seed: int = 0
    shuffle: bool = True
    remainder: Literal["pad", "drop", "join"] = "pad"
    whole_batches: bool = False
    """The model takes batches of `batch_per_rank` only: a smaller last one is left out (`drop`),
    or filled with samples that are repeated (`pad`)."""

    for_evaluation: bool = False
    """There may be fewer samples than ranks."""

    def __post_init__(self) -> None:
        if self.samples < self.size and not self.for_evaluation:
            raise DataError(
                f"There are {self.samples} training samples for {self.size} ranks; every rank "
                f"needs at least one. Start at most {self.samples} ranks, or add data.")
        if self.steps == 0:
            raise DataError(
                f"With remainder='drop' nothing is left of {self.samples} samples for "
                f"{self.size} ranks. Use remainder='pad'.")
        self._check_batch()
        if self.whole_batches and self.remainder == "join" and self._left:
            raise DataError(
                f"The model takes batches of {self.batch_per_rank} only, but {self._left} of "
                f"{self.samples} samples are left for a last, smaller step. Use remainder='drop' "
                "or 'pad', or a model without a fixed batch.")

    def _check_batch(self) -> None:
        if self.global_batch < self.size and not self.for_evaluation:
            raise DataError(
                f"The global batch has {self.global_batch} samples for {self.size} ranks; every "
                f"rank needs at least one. Start at most {self.global_batch} ranks, or give a "
                "larger batch.")
        if self.global_batch % self.size and (self.remainder != "join" or self.whole_batches):
            raise DataError(
                f"The global batch of {self.global_batch} samples does not divide by {self.size} "
                "ranks, which takes remainder='join' and a model without a fixed batch. Use them, "
                f"or a multiple of {self.size}.")

    @property
    def global_batch(self) -> int:
        """Samples per step, over all ranks."""
        return self.batch_global or self.batch_per_rank * self.size

    @property
    def growth(self) -> int:
        """How many times the batch of one process the global batch is: for the learning rate."""
        return 1 if self.batch_global else self.size

    @property
    def _part(self) -> Part:
        return Part(rank=self.rank, size=self.size)

    @property
    def own_batch(self) -> int:
        """Samples that this rank reads in a full step: at least one, which may not count."""
        return max(1, int(self._part.count(self.global_batch)))

    @property
    def full_steps(self) -> int:
        """Steps with a full batch on every rank."""
        return self.samples // self.global_batch

    @property
    def last_batch_per_rank(self) -> int:
        """Samples of each rank in the last, smaller step; 0 if there is none.

        With `join` the largest share: other ranks have one less, or none.
        """
        if self.whole_batches:
            return self.batch_per_rank if self._left and self.remainder == "pad" else 0
        each = self._left // self.size
        return each if self.remainder == "drop" else -(-self._left // self.size)

    @property
    def _left(self) -> int:
        """Samples after the last full step."""
        return self.samples % self.global_batch

    @property
    def uneven(self) -> bool:
        """Whether ranks have different numbers of samples in some step."""
        return self.remainder == "join" and (self._left % self.size != 0 or (
            self.full_steps > 0 and self.global_batch % self.size != 0))

    @property
    def full_weight(self) -> float:
        """As `last_weight`, of the full steps."""
        return float(self._part.count(self.global_batch) * self.size / self.global_batch)

    @property
    def last_weight(self) -> float:
        """This rank's samples in the last step over the mean of all ranks: 1 if all have as many.

        A mean over ranks of means over their samples is the mean over all samples when each is
        multiplied by this.
        """
        if not self.uneven or not self._left:
            return 1.0
        return self._last_share * self.size / self._left

    @property
    def _last_share(self) -> int:
        return int(self._part.count(self._left))

    @property
    def steps(self) -> int:
        """Steps per epoch, equal on all ranks."""
        return self.full_steps + (1 if self.last_batch_per_rank else 0)

    @property
    def samples_per_rank(self) -> int:
        """Samples that this rank reads per epoch.

        A rank that has none in the last step reads one that does not count (`last_weight` is 0).
        """
        last = max(1, self._last_share) if self.uneven else self.last_batch_per_rank
        return self.full_steps * self.own_batch + (last if self._left else 0)

    @property
    def samples_per_epoch(self) -> int:
        """Samples that all ranks together train on per epoch."""
        return self.samples + self.padded - self.dropped

    @property
    def padded(self) -> int:
        """Samples that are trained on twice in an epoch, over all ranks (at most N-1)."""
        return self.last_batch_per_rank * self.size - self._left if self.remainder == "pad" else 0

    @property
    def dropped(self) -> int:
        """Samples that are left out of an epoch, over all ranks (at most N-1)."""
        return self._left - self.last_batch_per_rank * self.size if self.remainder == "drop" else 0

    def batch_text(self, party: str) -> str:
        """The batch of a step, for the plan that is printed."""
        if self.global_batch % self.size == 0:
            return f"{self.batch_per_rank} per {party} x {self.size} = {self.global_batch} global"
        return (f"{self.global_batch} global, at most {self.batch_per_rank} on each of "
                f"{self.size} {party}s")

    def data_text(self, party: str) -> str:
        """The samples of an epoch, for the plan that is printed."""
        change = (f", {self.padded} repeated" if self.padded else
                  f", {self.dropped} left out" if self.dropped else "")
        most = "at most " if self.uneven else ""
        last = (f", last batch {most}{self.last_batch_per_rank} per {party}"
                if self.last_batch_per_rank else "")
        order = f"reshuffled each epoch (seed {self.seed})" if self.shuffle else "in order"
        return f"{self.samples:,} samples, {order}{last}{change}"

    def samples_before(self, step: int) -> int:
        """Samples of an epoch that all ranks together have seen before a step."""
        return self.samples if step >= self.steps else step * self.global_batch

    def step_after(self, samples: int) -> int:
        """The step at which to go on after so many samples of an epoch.

        With another global batch than before, up to one batch may be repeated.
        """
        return self.steps if samples >= self.samples else samples // self.global_batch

    def order(self, epoch: int) -> np.ndarray[Any, Any]:
        """The samples of this rank in one epoch, in the order of training.

        Args:
            epoch: Integer, counted from 0.

        Returns:
            int64 array of shape `(samples_per_rank,)`.
        """
        everyone = self._global_order(int(epoch))
        cut = self.full_steps * self.global_batch
        begin = self._part.begin(self.global_batch)
        full = everyone[:cut].reshape(self.full_steps, self.global_batch)[
            :, begin:begin + self.own_batch].reshape(-1)
        tail = everyone[cut:]
        if self.uneven:
            begin = self._part.begin(len(tail))
            mine = tail[begin:begin + self._last_share] if self._last_share else tail[:1]
            return np.concatenate([full, mine])
        if self.padded:
            tail = np.concatenate([tail, np.resize(everyone, self.padded)])
        tail = tail[:self.last_batch_per_rank * self.size]
        mine = tail.reshape(self.size, self.last_batch_per_rank)[self.rank]
        return np.concatenate([full, mine])

    def _global_order(self, epoch: int) -> np.ndarray[Any, Any]:
        if not self.shuffle:
            return np.arange(self.samples, dtype=np.int64)
        return np.random.default_rng([self.seed, epoch]).permutation(self.samples)


def evaluation_rows(samples: int, rank: int, size: int) -> np.ndarray[Any, Any]:
    """The samples that one rank evaluates: a contiguous share, nothing repeated or left out.

    Returns:
        int64 array; empty on some ranks where there are fewer samples than ranks.
    """
    ends = [samples * (r + 1) // size for r in range(-1, size)]
    return np.arange(ends[rank], ends[rank + 1], dtype=np.int64)


def evaluation_rows_by_step(samples: int, rank: int, size: int,
                            batch: int) -> np.ndarray[Any, Any]:
    """As `evaluation_rows`, but in each step the ranks together have the samples that follow.

    In step s rank r has the samples from `(s * size + r) * batch` on, so that batch by batch its
    samples are those of its part of one process' batches of `size * batch`. What is left at the
    end is divided as it is.
    """
    full = samples // (size * batch)
    rows = np.arange(full * size * batch, dtype=np.int64).reshape(full, size, batch)[:, rank]
    begin = full * size * batch
    return np.concatenate([rows.reshape(-1), begin + evaluation_rows(samples - begin, rank, size)])

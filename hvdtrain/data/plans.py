"""Plans of an epoch: what each rank reads in which step, with as many steps on every rank.

`ShardPlan` is for samples with indices: in step s the ranks together train on samples [s*G,
(s+1)*G) of one global order, G being the global batch; rank r takes the r-th part. So N ranks see
in each step exactly what one process with the global batch sees. `StreamPlan` is for shares of
different lengths; `keras_adapters.BatchPlan` for batches that Keras or the script makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdtrain.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's part of each global batch, for integers and integer tensors.

    Rank r of N has the r-th of N consecutive parts of a batch, so that the ranks together have the
    samples of one process' batch, in its order. If a batch does not divide by N, `join` makes parts
    of different sizes, each weighted by its samples, `pad` repeats samples, `drop` leaves some out.
    """

    rank: int
    size: int
    remainder: Literal["join", "pad", "drop"] = "join"

    def begin(self, samples: Any) -> Any:
        """The first sample of the part within its batch; with `pad` it wraps around."""
        if self.remainder == "join":
            return samples * self.rank // self.size
        if self.remainder == "pad":
            return self.rank * self.count(samples) % samples
        return self.rank * self.count(samples)

    def count(self, samples: Any) -> Any:
        """The samples of the part, may be 0."""
        if self.remainder == "join":
            return samples * (self.rank + 1) // self.size - samples * self.rank // self.size
        if self.remainder == "pad":
            return -(-samples // self.size)
        return samples // self.size

    def weight(self, samples: Any) -> Any:
        """The part's samples over the mean of all ranks: 1 if all have equally many."""
        # A mean over ranks of means over their samples is the mean over all samples when each is
        # multiplied by this.
        return self.count(samples) * self.size / samples if self.remainder == "join" else 1.0

    def is_even(self, samples: int | None) -> bool:
        """Whether all ranks have equally many samples of such a batch; None: unknown."""
        return self.size == 1 or self.remainder != "join" or (
            samples is not None and samples % self.size == 0)


class _PlanTexts:
    """The texts of a plan; `self` is a `ShardPlan` or a `StreamPlan`."""

    _reshuffled = "reshuffled each epoch"

    def batch_text(self: Any, party: str) -> str:
        """The batch of a step, for the printed plan."""
        if self.global_batch % self.size == 0:
            return f"{self.batch_per_rank} per {party} x {self.size} = {self.global_batch} global"
        return uneven_batch_text(self.global_batch, self.batch_per_rank, self.size, party)

    def data_text(self: Any, party: str) -> str:
        """The samples of an epoch, for the printed plan."""
        order = f"{self._reshuffled} (seed {self.seed})" if self.shuffle else "in order"
        most, last = "at most " if self.uneven else "", self.last_batch_per_rank
        text = f"{self.samples:,} samples, {order}"
        text += f", last batch {most}{last} per {party}" if last else ""
        return text + (f", {self.padded} repeated" if self.padded else
                       f", {self.dropped} left out" if self.dropped else "")


@dataclass(frozen=True, kw_only=True)
class ShardPlan(_PlanTexts):
    """The training samples of one rank; equal on every rank but for `rank`. DataError if invalid.

    `batch_global` is samples per step over all ranks, where they do not divide by them;
    `batch_per_rank` is then the largest part. `batch_ranks`: it is the batches of as many ranks, by
    which the learning rate is scaled. `whole_batches`: the model takes batches of
    `batch_per_rank` only, so a smaller last one is left out (`drop`) or filled with repeated
    samples (`pad`). `for_evaluation`: there may be fewer samples than ranks.
    """

    samples: int
    rank: int
    size: int
    batch_per_rank: int
    batch_global: int | None = None
    batch_ranks: int | None = None
    seed: int = 0
    shuffle: bool = True
    remainder: Literal["pad", "drop", "join"] = "pad"
    whole_batches: bool = False
    for_evaluation: bool = False

    def __post_init__(self) -> None:
        for number, found, more in (
                (self.samples, f"There are {self.samples} training samples", "add data"),
                (self.global_batch, f"The global batch has {self.global_batch} samples",
                 "give a larger batch")):
            if number < self.size and not self.for_evaluation:
                raise DataError(f"{found} for {self.size} ranks; every rank needs at least one. "
                                f"Start at most {number} ranks, or {more}.")
        if self.steps == 0:
            raise DataError(
                f"With remainder='drop' nothing is left of {self.samples} samples for "
                f"{self.size} ranks. Use remainder='pad'.")
        if self.global_batch % self.size and (self.remainder != "join" or self.whole_batches):
            raise DataError(
                f"The global batch of {self.global_batch} samples does not divide by {self.size} "
                "ranks, which takes remainder='join' and a model without a fixed batch. Use them, "
                f"or a multiple of {self.size}.")
        if self.whole_batches and self.remainder == "join" and self._left:
            raise DataError(
                f"The model takes batches of {self.batch_per_rank} only, but {self._left} of "
                f"{self.samples} samples are left for a last, smaller step. Use remainder='drop' "
                "or 'pad', or a model without a fixed batch.")

    @property
    def global_batch(self) -> int:
        """Samples per step, over all ranks."""
        return self.batch_global or self.batch_per_rank * self.size

    @property
    def growth(self) -> int:
        """Global batch / batch of one process: for the learning rate."""
        return self.batch_ranks or (1 if self.batch_global else self.size)

    @property
    def _part(self) -> Part:
        return Part(rank=self.rank, size=self.size)

    @property
    def _left(self) -> int:
        return self.samples % self.global_batch

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
        """Samples of the last, smaller step on the rank with most of them; 0 if there is none."""
        if self.whole_batches:
            return self.batch_per_rank if self._left and self.remainder == "pad" else 0
        each = self._left // self.size
        return each if self.remainder == "drop" else -(-self._left // self.size)

    @property
    def steps(self) -> int:
        """Steps per epoch, equal on all ranks."""
        return self.full_steps + (1 if self.last_batch_per_rank else 0)

    @property
    def uneven(self) -> bool:
        """Whether ranks have different numbers of samples in some step."""
        return self.remainder == "join" and (self._left % self.size != 0 or (
            self.full_steps > 0 and self.global_batch % self.size != 0))

    def weights(self) -> np.ndarray[Any, Any]:
        """This rank's `Part.weight` in each step, float32."""
        weights = np.full(self.steps, self._part.weight(self.global_batch), np.float32)
        if self.last_batch_per_rank:
            weights[-1] = self._part.weight(self._left) if self.uneven else 1.0
        return weights

    @property
    def samples_per_rank(self) -> int:
        """Samples that this rank reads per epoch, with those that do not count."""
        return self.full_steps * self.own_batch + self._last_rows[1]

    @property
    def _last_rows(self) -> tuple[int, int]:
        """Offset and number of this rank's samples after the full steps."""
        # A rank that has none reads one that does not count: its weight is 0.
        if self.uneven and self._left:
            return int(self._part.begin(self._left)), max(1, int(self._part.count(self._left)))
        return self.rank * self.last_batch_per_rank, self.last_batch_per_rank

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

    def samples_before(self, step: int) -> int:
        """Samples of an epoch that all ranks together have seen before a step."""
        return self.samples if step >= self.steps else step * self.global_batch

    def step_after(self, samples: int) -> int:
        """The step at which to resume after so many samples; up to a batch may be repeated."""
        return self.steps if samples >= self.samples else samples // self.global_batch

    def order(self, epoch: int) -> np.ndarray[Any, Any]:
        """The indices of this rank's samples in an epoch, in training order, int64."""
        everyone = (np.random.default_rng([self.seed, int(epoch)]).permutation(self.samples)
                    if self.shuffle else np.arange(self.samples, dtype=np.int64))
        cut, begin = self.full_steps * self.global_batch, self._part.begin(self.global_batch)
        full = everyone[:cut].reshape(self.full_steps, self.global_batch)[
            :, begin:begin + self.own_batch].reshape(-1)
        tail = np.concatenate([everyone[cut:], np.resize(everyone, self.padded)])
        first, count = self._last_rows
        return np.concatenate([full, tail[first:first + count]])


@dataclass(frozen=True, kw_only=True)
class StreamPlan(_PlanTexts):
    """The steps of an epoch over shares with these `counts`; stands for a `ShardPlan`.

    With `shuffle` each rank draws an order of its samples; a stream has `stream_order`.
    """

    counts: tuple[int, ...]
    rank: int
    batch_per_rank: int
    growth: int = 1
    seed: int = 0
    shuffle: bool = False
    stream_order: str = ""

    padded = dropped = 0
    _reshuffled = "reshuffled each epoch within the files of each rank"

    def __post_init__(self) -> None:
        if self.samples == 0:
            raise DataError("The stream has no samples on any rank; at least one is needed.")

    @property
    def uneven(self) -> bool:
        """Whether ranks have different numbers of samples in some step."""
        return len(set(self.counts)) > 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.counts)

    @property
    def own_batch(self) -> int:
        """Samples that this rank reads in a full step."""
        return self.batch_per_rank

    @property
    def samples_per_rank(self) -> int:
        """Samples of this rank."""
        return self.counts[self.rank]

    @property
    def samples(self) -> int:
        """Samples of all ranks."""
        return sum(self.counts)

    samples_per_epoch = samples

    @property
    def global_batch(self) -> int:
        """Samples per full step, over all ranks."""
        return self.batch_per_rank * self.size

    @property
    def steps(self) -> int:
        """Steps per epoch, equal on all ranks: those of the longest share."""
        return -(-max(self.counts) // self.batch_per_rank)

    @property
    def last_batch_per_rank(self) -> int:
        """Samples of the last step on the rank that has most of them; 0 if it is a full batch."""
        return max(self.counts) % self.batch_per_rank

    def _seen(self, *counts: int) -> np.ndarray[Any, Any]:
        begins = np.arange(self.steps + 1) * self.batch_per_rank
        return np.asarray(sum(np.minimum(count, begins) for count in counts))

    def sizes(self, rank: int) -> np.ndarray[Any, Any]:
        """Samples of a rank in each step, int64."""
        return np.diff(self._seen(self.counts[rank]))

    def weights(self) -> np.ndarray[Any, Any]:
        """This rank's samples over the mean of all ranks, in each step, float32."""
        weights: np.ndarray[Any, Any] = self.sizes(self.rank) / (
            np.diff(self._seen(*self.counts)) / self.size)
        return weights.astype(np.float32)

    def samples_before(self, step: int) -> int:
        """Samples of an epoch that all ranks together have seen before a step."""
        return sum(min(count, step * self.batch_per_rank) for count in self.counts)

    def step_after(self, samples: int) -> int:
        """The last step before which at most so many samples are seen."""
        return int(np.searchsorted(self._seen(*self.counts), samples, side="right")) - 1

    def order(self, epoch: int) -> np.ndarray[Any, Any]:
        """The indices of this rank's samples within its share, in the order of an epoch, int64."""
        # It is drawn from seed, epoch and rank; without `shuffle` they are in order.
        own = self.counts[self.rank]
        if not self.shuffle:
            return np.arange(own, dtype=np.int64)
        return np.random.default_rng([self.seed, int(epoch), self.rank]).permutation(own)


def uneven_batch_text(batch: int, most: int, size: int, party: str) -> str:
    """The batch of a step with different numbers of samples on the ranks."""
    return f"{batch} global, at most {most} on each of {size} {party}s"


def evaluation_rows(samples: int, rank: int, size: int) -> np.ndarray[Any, Any]:
    """The consecutive samples that one rank evaluates; none twice or left out."""
    return np.arange(samples * rank // size, samples * (rank + 1) // size, dtype=np.int64)


def in_turn(counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The samples' places in the data, rank by rank, if each batch in turn is divided over ranks.

    `counts` has shape `(ranks, steps)`.
    """
    ranks = np.repeat(np.tile(np.arange(len(counts)), counts.shape[1]), counts.T.reshape(-1))
    return np.concatenate([np.flatnonzero(ranks == rank) for rank in range(len(counts))])

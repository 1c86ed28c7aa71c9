"""`StreamPlan`: the steps of an epoch over shares of different lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.errors import DataError


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """The steps of an epoch over shares of different lengths; stands for a `ShardPlan`.

    Raises:
        DataError: No rank has a sample.
    """

    counts: tuple[int, ...]
    """Samples of each rank's share."""
    rank: int
    batch_per_rank: int
    growth: int = 1
    """As `ShardPlan.growth`."""
    seed: int = 0
    shuffle: bool = False
    """Whether each rank draws an order of its own samples; a stream has the order it has."""
    stream_order: str = ""
    """What decides the order of a stream, as far as it is known."""

    padded = dropped = 0

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

    def batch_text(self, party: str) -> str:
        """As `ShardPlan.batch_text`."""
        return f"{self.batch_per_rank} per {party} x {self.size} = {self.global_batch} global"

    def data_text(self, party: str) -> str:
        """As `ShardPlan.data_text`."""
        most = "at most " if self.uneven else ""
        last = (f", last batch {most}{self.last_batch_per_rank} per {party}"
                if self.last_batch_per_rank else "")
        order = (f"reshuffled each epoch within the files of each rank (seed {self.seed})"
                 if self.shuffle else "in order")
        return f"{self.samples:,} samples, {order}{last}"

    def batch_of(self, rank: int, step: int) -> int:
        """Samples of a rank in a step."""
        left = self.counts[rank] - step * self.batch_per_rank
        return min(max(left, 0), self.batch_per_rank)

    def weights(self) -> np.ndarray[Any, Any]:
        """For each step this rank's samples over the mean of all ranks; float32."""
        sizes = np.asarray([[self.batch_of(rank, step) for rank in range(self.size)]
                            for step in range(self.steps)], np.float64)
        weights: np.ndarray[Any, Any] = sizes[:, self.rank] / sizes.mean(axis=1)
        return weights.astype(np.float32)

    def samples_before(self, step: int) -> int:
        """Samples of an epoch that all ranks together have seen before a step."""
        return sum(min(count, step * self.batch_per_rank) for count in self.counts)

    def step_after(self, samples: int) -> int:
        """The last step before which no more than so many samples are seen."""
        steps = range(self.steps, -1, -1)
        return next(step for step in steps if self.samples_before(step) <= samples)

    def order(self, epoch: int) -> np.ndarray[Any, Any]:
        """This rank's samples in one epoch, by their numbers within its share.

        Args:
            epoch: Integer, counted from 0.

        Returns:
            int64 array of as many elements as this rank has samples: drawn anew for each epoch
            from seed, epoch and rank; without `shuffle` the numbers in order.
        """
        own = self.counts[self.rank]
        if not self.shuffle:
            return np.arange(own, dtype=np.int64)
        return np.random.default_rng([self.seed, int(epoch), self.rank]).permutation(own)

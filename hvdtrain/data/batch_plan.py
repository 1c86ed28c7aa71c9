"""`BatchPlan`: the steps of an epoch over batches that Keras or the script makes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The steps of an epoch over batches that are made as in one process.

    Stands for a `ShardPlan` where what is trained on was given to Keras' `fit`: each rank takes
    its part of each global batch. What is not known before it was read is None.
    """

    rank: int
    size: int
    global_batch: int | None
    """Samples per full step, over all ranks."""
    steps: int | None
    """Steps per epoch."""
    samples: int | None
    """Samples of an epoch."""
    growth: int
    """How many times the batch of one process the global batch is: for the learning rate."""
    uneven: bool
    """Whether ranks may have different numbers of samples in some step."""
    order: str
    """What decides the order of the samples, in words."""
    divided: str
    """Where the data are divided over the ranks, in words."""
    stream_order: str = ""
    """What decides the order, to be compared with that of a run before."""

    @property
    def batch_per_rank(self) -> int | None:
        """Samples of a full step on the rank that has most of them."""
        return None if self.global_batch is None else -(-self.global_batch // self.size)

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples that all ranks together train on per epoch."""
        return self.samples

    def samples_before(self, step: int) -> int:
        """Samples of an epoch that all ranks together have seen before a step.

        Steps, where the size of a batch is not known.
        """
        seen = step * (self.global_batch or 1)
        return seen if self.samples is None else min(seen, self.samples)

    def step_after(self, samples: int) -> int:
        """The step at which to go on after so many samples of an epoch."""
        if self.steps is not None and self.samples is not None and samples >= self.samples:
            return self.steps
        return samples // (self.global_batch or 1)

    def batch_text(self, party: str) -> str:
        """The batch of a step, for the plan that is printed."""
        if self.global_batch is None:
            return f"as the data set makes it, divided over {self.size} {party}s"
        if self.global_batch % self.size == 0:
            return f"{self.global_batch} global = {self.batch_per_rank} per {party} x {self.size}"
        return (f"{self.global_batch} global, at most {self.batch_per_rank} on each of "
                f"{self.size} {party}s")

    def data_text(self, party: str) -> str:
        """The samples of an epoch, for the plan that is printed."""
        known = "samples" if self.samples is None else f"{self.samples:,} samples"
        return f"{known}, {self.order}" + (
            f"; {self.divided}" if self.size > 1 and self.divided else "")

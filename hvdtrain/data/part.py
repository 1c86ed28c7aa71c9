"""`Part`: which samples of each global batch one rank takes.

A batch of n samples is divided over N ranks: rank r has the r-th of N parts that follow each
other, so that the ranks together have the samples of one process' batch, in its order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's part of each global batch. Works on integers and on integer tensors alike."""

    rank: int
    size: int
    remainder: Literal["join", "pad", "drop"] = "join"
    """Of a batch that does not divide by the ranks: parts of different sizes, each weighted by
    its samples (`join`); samples that are repeated (`pad`) or left out (`drop`)."""

    def begin(self, samples: Any) -> Any:
        """The first sample of the part within its batch; with `pad` they go on at its start."""
        if self.remainder == "join":
            return samples * self.rank // self.size
        if self.remainder == "pad":
            return self.rank * self.count(samples) % samples
        return self.rank * self.count(samples)

    def count(self, samples: Any) -> Any:
        """The samples of the part, of a batch of so many; may be 0."""
        if self.remainder == "join":
            return samples * (self.rank + 1) // self.size - samples * self.rank // self.size
        if self.remainder == "pad":
            return -(-samples // self.size)
        return samples // self.size

    def rows(self, samples: Any) -> Any:
        """Numbers of the part's samples within a batch: an int64 tensor, never empty.

        A rank that has none reads one, which does not count: its `weight` is 0.
        """
        import tensorflow as tf
        samples = tf.cast(samples, tf.int64)
        numbers = self.begin(samples) + tf.range(tf.maximum(self.count(samples), 1))
        return numbers % samples

    def weight(self, samples: Any) -> Any:
        """The part's samples over the mean of all ranks, a float32 tensor: 1 if all have as many.

        A mean over ranks of means over their samples is the mean over all samples when each is
        multiplied by this.
        """
        import tensorflow as tf
        if self.remainder != "join":
            return tf.constant(1.0)
        samples = tf.cast(samples, tf.int64)
        return tf.cast(self.count(samples) * self.size, tf.float32) / tf.cast(samples, tf.float32)

    def is_even(self, samples: int | None) -> bool:
        """Whether all ranks have as many samples of a batch of so many; None: not known."""
        return self.size == 1 or self.remainder != "join" or (
            samples is not None and samples % self.size == 0)

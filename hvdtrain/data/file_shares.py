"""`by_file`: whole files for each rank, so that it opens, indexes and unpacks its own only.

The samples of a rank's files are its share, as of a stream: shares differ, and `StreamPlan` makes
of their lengths the same number of steps on every rank, and the weight of each rank in each step.
Other than a stream's, the samples of a share have numbers: their order is drawn anew for each
epoch, and no sample is read only to be passed over.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.base import Collective
from hvdtrain.data.files import Paths, find_files, name_of
from hvdtrain.data.pipeline import evaluation_dataset, fetcher, numbers_of, ready
from hvdtrain.data.source import Source, Structure, as_source, check_source
from hvdtrain.data.stream import StreamSource
from hvdtrain.data.stream_plan import StreamPlan
from hvdtrain.data.weights import own_files_only
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.settings import refuse_differences

_CHUNK_ROWS = 256


def by_file(paths: Paths, load: Callable[[Sequence[Path]], Any], *,
            name: str | None = None) -> FileShares:
    """Data of which each rank opens its own files only. Call it on every rank alike.

    Files are dealt by size: the largest first, each to the rank with the fewest bytes so far. On
    every rank that comes out alike, since it depends on names and sizes only. A rank trains on
    the samples of its files in an order that is drawn from the run's seed, the epoch and the rank
    (`shuffle` of `TrainConfig`), or in that of the files' names.

    Args:
        paths: Path, pattern or sequence of them; see `hvdtrain.data.files.find_files`. At least
            as many files as ranks, and on every rank the same.
        load: Callable that is given some of the files, sorted by name, and returns a `Source` of
            the samples in them, or arrays; it is called once on each rank. The source may be
            `weighted` (with weights that are given, not `"balanced"`) and `unpacked`.
        name: String for messages; None for the names of the files.

    Returns:
        A `FileShares`, to be given to `hvdtrain.fit` and `hvdtrain.evaluate`.

    Raises:
        DataError: There are no such files.

    Example:
        ```python
        train = hvdtrain.by_file("train/*.tfrecord.gz", lambda files: hvdtrain.load_tfrecord(
            files, features, target="label"))
        ```
    """
    return FileShares(find_files(paths), load, name=name)


def deal(sizes: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Divide files over ranks: the largest first, each to the rank with the fewest bytes so far.

    Args:
        sizes: Bytes of each file.
        ranks: Integer, number of ranks.

    Returns:
        For each rank the numbers of its files, ascending. Of ranks with as many bytes the one
        with fewer files is next, then the lower one; of files of one size the first.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    waiting = [(0, 0, rank) for rank in range(ranks)]
    for file in sorted(range(len(sizes)), key=lambda file: (-sizes[file], file)):
        size, count, rank = heapq.heappop(waiting)
        shares[rank].append(file)
        heapq.heappush(waiting, (size + sizes[file], count + 1, rank))
    return tuple(tuple(sorted(share)) for share in shares)


class FileShares(StreamSource):
    """Samples of which each rank has those in its own files. Made by `by_file`."""

    def __init__(self, files: Sequence[Path], load: Callable[[Sequence[Path]], Any], *,
                 name: str | None = None) -> None:
        self.files = tuple(sorted(files))
        self.sizes = tuple(file.stat().st_size for file in self.files)
        super().__init__(self._dataset, name=name or name_of(self.files))
        self._load = load
        self._loaded: tuple[tuple[int, int], Source] | None = None

    def files_of(self, rank: int, size: int) -> tuple[Path, ...]:
        """The files of one rank.

        Raises:
            DataError: There are fewer files than ranks.
        """
        if len(self.files) < size:
            raise DataError(
                f"{self.name}: {len(self.files)} files for {size} ranks. Sharding by file needs "
                "at least one file for each rank. Write the samples to more files, start fewer "
                "ranks, or share the files by sample: shard = \"sample\" in the job file, or the "
                "source itself without by_file.")
        return tuple(self.files[file] for file in deal(self.sizes, size)[rank])

    def share(self, rank: int, size: int) -> Source:
        """The samples of a rank's files. They are opened once; only the last share is kept.

        Raises:
            DataError: They cannot be opened, or there is no sample in them.
        """
        if self._loaded is None or self._loaded[0] != (rank, size):
            self._loaded = (rank, size), self._open(self.files_of(rank, size))
        return self._loaded[1]

    def count_everywhere(self, collective: Collective) -> tuple[int, ...]:
        """Open every rank's files, each rank its own, and count the samples. All ranks.

        Raises:
            DataError: On every rank, where one cannot open its files.
            ConfigError: On every rank, where ranks see other files, or samples that differ in
                structure.
        """
        mine: dict[str, Any] = {}
        failure: HvdtrainError | None = None
        try:
            share = self.share(collective.rank, collective.size)
            mine = {"number of files": len(self.files), "bytes of the files": sum(self.sizes),
                    "checksum of the files' names and sizes": zlib.crc32(repr(
                        ([file.name for file in self.files], self.sizes)).encode()),
                    "structure of a sample": repr(share.signature)}
        except HvdtrainError as error:
            failure = error
        failures = collective.gather_objects(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(failures):
            if text is not None:
                raise DataError(f"Rank {rank} cannot open its files. {text}")
        names = [f"rank {rank}" for rank in range(collective.size)]
        refuse_differences(collective.gather_objects(mine), names)
        return super().count_everywhere(collective)

    def count(self, rank: int, size: int) -> int:
        """The number of samples of a rank's share; opens its files."""
        if (rank, size) not in self._counts:
            self._counts[rank, size] = len(self.share(rank, size))
        return self._counts[rank, size]

    @property
    def signature(self) -> Structure:
        """See `StreamSource.signature`."""
        return self._any().signature

    def first(self) -> Structure:
        """One sample, with a first axis of length 1; of this rank's files once they are open."""
        return self._any().read(np.zeros(1, np.int64))

    def batches(self, rank: int, size: int, batch: int, epoch: Any = 0, begin: Any = 0) -> Any:
        """See `StreamSource.batches`."""
        del epoch
        share = self.share(rank, size)
        return evaluation_dataset(share, np.arange(len(share)), batch).skip(begin)

    @property
    def bytes_read(self) -> int:
        """Bytes that this process has read for samples of its share."""
        return self._loaded[1].bytes_read if self._loaded else 0

    @property
    def index_bytes_read(self) -> int:
        """Bytes that this process has read to find out where the samples of its share are."""
        return self._loaded[1].index_bytes_read if self._loaded else 0

    def _dataset(self, rank: int, size: int) -> Any:
        return self.batches(rank, size, _CHUNK_ROWS).unbatch()

    def _any(self) -> Source:
        """The share that is open; before one is, the first file."""
        return self._loaded[1] if self._loaded else self._open(self.files[:1])

    def _open(self, files: Sequence[Path]) -> Source:
        token = own_files_only.set(True)
        try:
            source = as_source(self._load(list(files)), self.name)
        finally:
            own_files_only.reset(token)
        if not isinstance(source, Source):
            raise DataError(f"{self.name}: load(files) must return a hvdtrain.Source or arrays. "
                            f"Received: {type(source).__name__}")
        if not len(source):
            raise DataError(f"{source.name}: there are no samples in these files; each rank needs "
                            "at least one.")
        check_source(source)
        return source


def share_dataset(share: Source, plan: StreamPlan, *, first_epoch: int = 0,
                  first_step: int = 0, epochs: int | None = None) -> Any:
    """This rank's batches of its own files, epoch after epoch without end.

    Args:
        share: The samples of this rank's files.
        plan: The steps, and the order within the share.
        first_epoch: Integer, the epoch to begin with.
        first_step: Integer, the step of that epoch to begin with; nothing is read before it.
        epochs: Integer, end after so many; None for never.

    Returns:
        A `tf.data.Dataset` as that of `training_dataset`: of pairs `(weight, batch)` where the
        plan is uneven. Where the share has ended a batch is one sample, of weight 0.
    """
    fetch = fetcher(share)
    weights = tf.constant(plan.weights())
    own, batch = plan.counts[plan.rank], plan.batch_per_rank

    def one_epoch(epoch: Any) -> Any:
        order = tf.numpy_function(plan.order, [epoch], tf.int64, stateful=False)
        order.set_shape([own])
        begin = tf.where(tf.equal(epoch, first_epoch), tf.constant(first_step, tf.int64), 0)

        def rows(step: Any) -> Any:
            return tf.cond(step * batch < own,
                           lambda: order[step * batch:(step + 1) * batch], lambda: order[:1])
        steps = tf.data.Dataset.range(begin, plan.steps)
        if not plan.uneven:
            return steps.map(lambda step: fetch(rows(step)))
        return steps.map(lambda step: (weights[step], fetch(rows(step))))

    return ready(numbers_of(first_epoch, epochs).flat_map(one_epoch))

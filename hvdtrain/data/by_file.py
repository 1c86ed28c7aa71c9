"""`by_file`: whole files for each rank, so that it opens, indexes and unpacks only its own.

Shares differ in length: `StreamPlan` gives ranks as many steps, and a weight in each step.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.collectives.base import Collective
from hvdtrain.data.files import Paths, find_files, name_of
from hvdtrain.data.pipeline import evaluation_dataset
from hvdtrain.data.source import Source, Structure, as_source, check_source, one_sample
from hvdtrain.data.stream import StreamSource
from hvdtrain.data.weights import own_files_only
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.settings import refuse_differences

_CHUNK_ROWS = 256


def by_file(paths: Paths, load: Callable[[Sequence[Path]], Any], *,
            name: str | None = None) -> FileShards:
    """Data of which each rank opens its own files only. All ranks must call it alike.

    Files are dealt by size: the largest first, each to the rank with the fewest bytes so far, the
    same on every rank. A rank trains on the samples of its files in an order drawn from the run's
    seed, the epoch and the rank (`shuffle` of `TrainConfig`), or in that of the files' names.

    Args:
        paths: Path, pattern or sequence of them; see `hvdtrain.data.files.find_files`. At least as
            many files as ranks, the same on every rank.
        load: Callable that gets some of the files, sorted by name, and returns a `Source` of their
            samples, or arrays; called once on each rank. The source may be `weighted` (not with
            `"balanced"`) and `unpacked`.
        name: String for messages; None for the names of the files.

    Returns:
        The samples of all files, for `hvdtrain.fit` and `hvdtrain.evaluate`.

    Raises:
        DataError: There are no such files.

    Example:
        ```python
        train = hvdtrain.by_file("train/*.tfrecord.gz", lambda files: hvdtrain.load_tfrecord(
            files, features, target="label"))
        ```
    """
    return FileShards(find_files(paths), load, name=name)


def deal(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The indices of each rank's files, ascending, dealt by their bytes as `by_file` says."""
    # Ties go to the rank with fewer files, then the lower one; to the first of files of one size.
    shards: list[list[int]] = [[] for _ in range(ranks)]
    waiting = [(0, 0, rank) for rank in range(ranks)]
    for file in sorted(range(len(sizes)), key=lambda file: (-sizes[file], file)):
        size, count, rank = waiting[0]
        shards[rank].append(file)
        heapq.heapreplace(waiting, (size + sizes[file], count + 1, rank))
    return [sorted(shard) for shard in shards]


class FileShards(StreamSource):
    """Samples of which each rank has those in its own files. Made by `by_file`."""
    # Unlike those of a stream they have indices within a shard: their order is drawn for each
    # epoch, and none is read only to be skipped.

    def __init__(self, files: Sequence[Path], load: Callable[[Sequence[Path]], Any], *,
                 name: str | None = None) -> None:
        self.files = tuple(sorted(files))
        self.sizes = tuple(file.stat().st_size for file in self.files)
        super().__init__(self._in_order, name=name or name_of(self.files))
        self._load = load
        self._loaded: tuple[tuple[int, int], Source] | None = None

    def files_of(self, rank: int, size: int) -> list[Path]:
        """The files of one rank."""
        if len(self.files) < size:
            raise DataError(
                f"{self.name}: {len(self.files)} files for {size} ranks. Sharding by file needs "
                "at least one file for each rank. Write the samples to more files, start fewer "
                "ranks, or share the files by sample: shard = \"sample\" in the job file, or the "
                "source itself without by_file.")
        return [self.files[file] for file in deal(self.sizes, size)[rank]]

    def shard(self, rank: int, size: int) -> Source:
        """The samples of a rank's files (or DataError), opened once; only the last is kept."""
        if self._loaded is None or self._loaded[0] != (rank, size):
            self._loaded = (rank, size), self._open(self.files_of(rank, size))
        return self._loaded[1]

    def count_everywhere(self, collective: Collective) -> tuple[int, ...]:
        """Open every rank's files, each rank its own, and count the samples. All ranks."""
        # Raises on every rank: DataError where one cannot open its files, ConfigError where ranks
        # see other files or structures.
        failure: HvdtrainError | None = None
        mine: dict[str, Any] = {
            "number of files": len(self.files), "bytes of the files": sum(self.sizes),
            "checksum of the files' names and sizes": zlib.crc32(repr(
                ([file.name for file in self.files], self.sizes)).encode())}
        try:
            shard = self.shard(collective.rank, collective.size)
            mine["structure of a sample"] = repr(shard.signature)
        except HvdtrainError as error:
            failure = error
        failures = collective.gather_objects(failure and str(failure))
        if failure is not None:
            raise failure
        for rank, text in enumerate(failures):
            if text is not None:
                raise DataError(f"Rank {rank} cannot open its files. {text}")
        refuse_differences(collective.gather_objects(mine))
        return super().count_everywhere(collective)

    def count(self, rank: int, size: int) -> int:
        """The number of samples of a rank's shard; opens its files."""
        if (rank, size) not in self._counts:
            self._counts[rank, size] = len(self.shard(rank, size))
        return self._counts[rank, size]

    @cached_property
    def signature(self) -> Structure:
        return self._any().signature

    def first(self) -> Structure:  # of this rank's files once they are open
        return one_sample(self._any())

    def _in_order(self, rank: int, size: int) -> Any:
        shard = self.shard(rank, size)
        return evaluation_dataset(shard, np.arange(len(shard)), _CHUNK_ROWS).unbatch()

    @property
    def bytes_read(self) -> int:
        return self._loaded[1].bytes_read if self._loaded else 0

    @property
    def index_bytes_read(self) -> int:
        return self._loaded[1].index_bytes_read if self._loaded else 0

    def _any(self) -> Source:
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

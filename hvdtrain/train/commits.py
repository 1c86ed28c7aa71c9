"""`CommitStore`: the newest state of a training, in memory that outlives the ranks of a host.

A file has a head, the arrays one after the other, and their description with what the run says
about itself (`collectives.plain`). It is written under the name `spare` and then renamed.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.collectives.plain import decode, dtype_named, encode, name_of_dtype
from hvdtrain.commit_names import SPARE, commit_name, commits_in
from hvdtrain.errors import CheckpointError, CollectiveError, NotWrittenError

Array = np.ndarray[Any, Any]
_HEAD = struct.Struct("<8sQQ")  # the mark; begin and end of the description
_MARK = b"hvdcmt01"
_ALIGNED = 64  # bytes


class CommitStore:
    """The commits in a folder of a host; one process writes, when all others have read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def newest(self) -> int | None:
        """The steps of the newest commit, if there is one."""
        return next(reversed(commits_in(self.folder)), None)

    def write(self, steps: int, about: object, arrays: Iterable[tuple[str, Array]]) -> None:
        """Write a commit and keep only this one; a kill at any moment leaves the former.

        Args:
            steps: Integer, its number, at least that of the newest.
            about: A plain value (`collectives.plain`).
            arrays: Iterable of names and contiguous arrays, each copied before the next is asked.

        Raises:
            NotWrittenError: The memory is full.
        """
        spare, path = self.folder / SPARE, self.folder / commit_name(steps)
        former = [self.folder / commit_name(n) for n in commits_in(self.folder) if n != steps]
        try:
            size = _write(spare, about, arrays)
            os.rename(spare, path)
            for number, old in enumerate(reversed(former)):
                if number:
                    old.unlink()
                else:
                    os.rename(old, spare)
            if not spare.exists():  # so that no later commit finds the memory full
                with open(spare, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise NotWrittenError(
                f"A commit could not be written to {self.folder}: {error.strerror}. Elastic "
                "training keeps two commits of model and optimizer in the memory of each host. "
                "Give it more (a container: --shm-size), or train without it.") from error

    def about(self, steps: int) -> Any:
        """What `write` was told about a commit, or CheckpointError where it is damaged."""
        return self._read(steps)[1][0]

    def arrays(self, steps: int) -> list[tuple[str, Array]]:
        """Names and arrays of a commit, which are valid until the one after the next is written."""
        memory, (_, forms) = self._read(steps)
        try:
            return [(name, np.frombuffer(memory, dtype_named(dtype), int(np.prod(shape)),
                                         begin).reshape(shape))
                    for name, dtype, shape, begin in forms]
        except (ValueError, TypeError, AttributeError) as error:
            raise self._damaged(steps, error) from error

    def _read(self, steps: int) -> tuple[mmap.mmap, Any]:
        try:
            with open(self.folder / commit_name(steps), "rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            mark, begin, end = _HEAD.unpack_from(memory)
            if mark != _MARK or end != len(memory):
                raise ValueError(f"its head tells of {end} bytes, and it has {len(memory)}")
            return memory, decode(memory[begin:end])
        except (OSError, ValueError, struct.error, CollectiveError) as error:
            raise self._damaged(steps, error) from error

    def _damaged(self, steps: int, error: Exception) -> CheckpointError:
        return CheckpointError(f"The commit {self.folder / commit_name(steps)} is damaged "
                               f"({error}).")


def _write(path: Path, about: object, arrays: Iterable[tuple[str, Array]]) -> int:
    """Write a file in place, so that its memory is used again; gives its bytes."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        forms, begin = [], _ALIGNED
        for name, array in arrays:
            _put(descriptor, array.reshape(-1).view(np.uint8).data, begin)
            forms.append((name, name_of_dtype(array.dtype), array.shape, begin))
            begin += -(-array.nbytes // _ALIGNED) * _ALIGNED
        text = encode((about, forms))
        _put(descriptor, memoryview(text), begin)
        _put(descriptor, memoryview(_HEAD.pack(_MARK, begin, begin + len(text))), 0)
        os.ftruncate(descriptor, begin + len(text))
        return begin + len(text)
    finally:
        os.close(descriptor)


def _put(descriptor: int, data: memoryview, at: int) -> None:
    while data.nbytes:
        done = os.pwrite(descriptor, data, at)
        data, at = data[done:], at + done

"""`once_per_host`: one process of a host makes a file or folder, the others wait for it."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hvdtrain.cache import default_cache
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.whole_file import acquire, remove_leftovers, whole_file

T = TypeVar("T")

_RECORD_BYTES = 1 << 16
"""Longest record of a failure that is read back."""


def cache_folder(given: str | Path | None) -> Path:
    """The folder for files made from data: the given one, or `data` in `default_cache`."""
    return Path(given) if given is not None else default_cache(os.environ) / "data"


def fingerprint(files: Sequence[Path], *settings: object) -> str:
    """A name that changes with a file (path, size, modified time) or the `repr` of a setting."""
    digest = hashlib.sha256(repr(settings).encode())
    for file in files:
        status = file.stat()
        digest.update(f"\0{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode(
            errors="surrogateescape"))
    return digest.hexdigest()[:24]


def each_in_own_order(files: Sequence[Path], work: Callable[[Path], T]) -> list[T]:
    """`once_per_host` for each file, in another order in each process."""
    # So the processes of a host work on different files, instead of waiting for one.
    order = np.random.default_rng(os.getpid()).permutation(len(files)).tolist()
    made = {number: work(files[number]) for number in order}
    return [made[number] for number in range(len(files))]


def once_per_host(result: str | Path, work: Callable[[Path], None]) -> Path:
    """Make a file or folder in one process of this host; the others wait for it.

    Any number of processes may call it at the same time, with the same `result`. One of them works,
    holding a lock; if it is killed its lock ends and another takes over. Where `result` is on a
    shared file system that supports locks, one process of all hosts works.

    Args:
        result: Path of the file or folder. If it exists, nothing is done.
        work: Callable that gets a path beside `result` and makes the file or folder there. It is
            renamed to `result` when `work` returns, so that nobody sees a part of it.

    Returns:
        `result`, which exists.

    Raises:
        DataError: The folder cannot be written, or `work` has failed in the process that this one
            has waited for, with its message. In the process that works: what `work` raises.
    """
    result = Path(result)
    if result.exists():
        return result
    try:
        result.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(result.with_name(f".{result.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise DataError(
            f"{result} cannot be made: {error.strerror} ({error.filename}). Expected a folder in "
            "which this process may write. Give another one (cache=... or HVDTRAIN_CACHE).",
        ) from error
    try:
        failures_before, _ = _last_failure(lock)
        try:
            acquire(lock, f"another process of this host is making {result}")
        except OSError as error:
            raise DataError(
                f"{result.parent} is on a file system that cannot lock files ({error.strerror}). "
                "Give a cache folder on a local disk (cache=... or HVDTRAIN_CACHE).") from error
        if result.exists():
            return result
        failures, message = _last_failure(lock)
        if failures > failures_before:
            raise DataError(message)
        _make(result, work, lock, failures)
    finally:
        os.close(lock)
    return result


def cached_array(path: Path, make: Callable[[], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """A non-empty array, made by one process per host and memory-mapped, or DataError."""
    def work(temporary: Path) -> None:
        with temporary.open("wb") as stream:
            np.save(stream, make(), allow_pickle=False)
    once_per_host(path, work)
    try:
        return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"The index {path} cannot be read ({error}). Delete it; it will be made "
                        "again.") from error


def _make(result: Path, work: Callable[[Path], None], lock: int, failures: int) -> None:
    remove_leftovers(result.parent, glob.escape(result.name), locked=True)
    try:
        with whole_file(result) as temporary:
            work(temporary)
    except Exception as error:
        text = str(error) if isinstance(error, HvdtrainError) else (
            f"{result} could not be made: {type(error).__name__}: {error}")
        record = json.dumps([failures + 1, text[:_RECORD_BYTES // 8]]).encode()
        os.pwrite(lock, record, 0)
        os.ftruncate(lock, len(record))
        if isinstance(error, OSError) and not isinstance(error, HvdtrainError):
            raise DataError(f"{text}. Free space on the disk, or give another folder (cache=... "
                            "or HVDTRAIN_CACHE).") from error
        raise


def _last_failure(lock: int) -> tuple[int, str]:
    try:
        count, message = json.loads(os.pread(lock, _RECORD_BYTES, 0))
        return int(count), str(message)
    except ValueError:
        return 0, ""  # nobody has failed yet

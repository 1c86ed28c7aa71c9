"""`once_per_host`: one process of a host makes a file or folder, the others wait for it.

For what each host needs once and every rank asks for: an index, an unpacked file, a download.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
from collections.abc import Callable
from pathlib import Path

from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.log import get_logger
from hvdtrain.whole_file import remove_leftovers, whole_file

_RECORD_BYTES = 1 << 16
"""Longest record of a failure that is read back."""


def once_per_host(result: str | Path, work: Callable[[Path], None]) -> Path:
    """Make a file or folder in one process of this host; the others wait for it.

    Any number of processes may call it at the same time, with the same `result`. One of them
    works, holding a lock; a lock ends with its process, so that another one takes over if that
    one is killed. Where `result` lies on a file system that hosts share and that passes on
    locks, one process of all hosts works.

    Args:
        result: Path of what is made. If it is there, nothing is done.
        work: Callable that is given a path beside `result` and makes the file or folder there.
            It is renamed to `result` when `work` returns, so that nobody sees a part of it.

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
        _acquire(lock, result)
        if result.exists():
            return result
        failures, message = _last_failure(lock)
        if failures > failures_before:
            raise DataError(message)
        _make(result, work, lock, failures)
    finally:
        os.close(lock)
    return result


def _acquire(lock: int, result: Path) -> None:
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            get_logger().info("another process of this host is making %s; waiting for it", result)
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise DataError(
            f"{result.parent} is on a file system that cannot lock files ({error.strerror}). Give "
            "a cache folder on a local disk (cache=... or HVDTRAIN_CACHE).") from error


def _make(result: Path, work: Callable[[Path], None], lock: int, failures: int) -> None:
    """Do the work; the lock is held."""
    remove_leftovers(result.parent, glob.escape(result.name), locked=True)
    try:
        with whole_file(result) as temporary:
            work(temporary)
    except Exception as error:
        text = str(error) if isinstance(error, HvdtrainError) else (
            f"{result} could not be made: {type(error).__name__}: {error}")
        _write_failure(lock, failures + 1, text)
        if isinstance(error, OSError) and not isinstance(error, HvdtrainError):
            raise DataError(f"{text}. Free space on the disk, or give another folder (cache=... "
                            "or HVDTRAIN_CACHE).") from error
        raise


def _last_failure(lock: int) -> tuple[int, str]:
    """How often the work has failed so far, and how the last time."""
    try:
        count, message = json.loads(os.pread(lock, _RECORD_BYTES, 0))
        return int(count), str(message)
    except ValueError:
        return 0, ""  # nobody has failed yet


def _write_failure(lock: int, count: int, message: str) -> None:
    record = json.dumps([count, message[:_RECORD_BYTES // 8]]).encode()
    os.pwrite(lock, record, 0)
    os.ftruncate(lock, len(record))
